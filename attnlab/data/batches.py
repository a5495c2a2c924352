"""Batches of token windows. The global batch at a step is a pure function of (seed, step)."""

import collections
import copy
import functools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from attnlab.data.permutation import permuted
from attnlab.support.errors import UserError

PREFETCHED = 8  # batches read ahead
BLOCK = 256, 2**18  # limits on the windows and the tokens that training reads at a time


class Batch(NamedTuple):
    """Windows of a text, with their weights and global indices; leading axes may be added for devices.

    Attributes:
      tokens: int32 `[batch, context + 1]`; inputs are all but the last column, targets all but the first.
      example: int32 `[batch]`, the index of each window in the global batch. It is folded into random keys, so results
        do not depend on the number of devices.
      weight: float32 `[batch]`, 1, or 0 for padding of the last batch.
      segments: int32 `[batch, context + 1]`, the number of each token's document within its window, from 0; None if
        documents are not distinguished.
      targets: int32 `[batch, context]`, a task's targets, −1 where none counts; None if they are the next tokens.
      places: int32 `[batch, answers]`, the positions of all targets that count; None if all may count.
    """

    tokens: np.ndarray
    example: np.ndarray
    weight: np.ndarray
    segments: np.ndarray | None = None
    targets: np.ndarray | None = None
    places: np.ndarray | None = None


@runtime_checkable
class Batches(Protocol):
    """Batches by number: `TrainBatches`, `EvalBatches`, or batches of a task."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> Batch: ...


class TrainBatches:
    """Shuffled windows of a text, epoch after epoch.

    An epoch is a permutation of adjacent windows, all shifted by one random offset: no token is predicted twice, and
    different epochs cut the text at different places. Several texts have separate epochs; example number n, counted
    over all steps, comes from the text that `interleave(n, weights)` returns.

    Args:
      tokens: the text, int `[length]`, or anything with `len` and `read(starts, length)`, such as `store.Tokens`; with
        `weights`, a list of texts.
      context: predicted tokens per window.
      batch_size: windows in the global batch.
      seed: determines the order and the offsets.
      process_index, process_count: this process gets its contiguous share of each global batch.
      documents: start of each document, int64 `[documents]`, ascending; batches then have `segments`. With `weights`, a
        list of such arrays.
      weights: positive integers, one per text; windows of several texts are drawn in proportion.

    Raises:
      UserError: a text is shorter than one window, or batch_size is not a multiple of process_count.

    >>> batches = TrainBatches(np.arange(100), context=4, batch_size=3, seed=0)
    >>> batches[7].tokens.shape
    (3, 5)
    """

    def __init__(
        self, tokens, *, context, batch_size, seed, process_index=0, process_count=1, documents=None, weights=None
    ):
        self._texts = _texts(tokens, documents, weights, context)
        for text in self._texts:
            if text.length < context + 1:
                raise UserError(
                    f"the training text has {text.length} tokens, shorter than model.context + 1 = {context + 1}: "
                    "use a longer text or a smaller context"
                )
        if batch_size < 1 or batch_size % process_count:
            raise UserError(f"batch_size = {batch_size} must be a multiple of the {process_count} processes")
        self._weights, self._batch_size = weights or [1], batch_size
        share = batch_size // process_count
        self._examples = np.arange(process_index * share, (process_index + 1) * share)
        windows, most_tokens = BLOCK
        self._block, self._context = max(1, min(windows, most_tokens // context) // share), context
        self._set_seed(seed)

    def _set_seed(self, seed: int) -> None:
        orders = [_Shuffled(text.length, self._context, seed, number) for number, text in enumerate(self._texts)]
        self._read = functools.lru_cache(maxsize=2)(functools.partial(self._read_block, orders))

    def of_seed(self, seed: int) -> "TrainBatches":
        """Batches of the same texts with another seed."""
        other = copy.copy(self)
        other._set_seed(seed)
        return other

    def __len__(self) -> int:
        return 2**62  # endless

    def __getitem__(self, step: int) -> Batch:
        """This process's share of the global batch at `step`."""
        block, number = divmod(step, self._block)
        tokens, segments = self._read(block)
        weight = np.ones(len(self._examples), np.float32)
        segments = None if segments is None else segments[number]
        return Batch(tokens[number], self._examples.astype(np.int32), weight, segments)

    def _read_block(self, orders, block: int):
        """Read a block of steps, in about the time of one: tokens and segments, each `[steps, batch, context + 1]`."""
        steps = np.arange(block * self._block, (block + 1) * self._block)
        which, numbers = interleave((steps[:, None] * self._batch_size + self._examples).ravel(), self._weights)
        starts = np.empty_like(numbers)
        for text, order in enumerate(orders):
            starts[which == text] = order.starts(numbers[which == text])
        windows = _windows(self._texts, which, starts)
        return [None if x is None else x.reshape(len(steps), -1, x.shape[-1]) for x in windows]


class Stacked:
    """The batches of several runs, with a leading axis of runs."""

    def __init__(self, of_runs: Sequence[Batches]):
        self._of_runs = of_runs

    def __len__(self) -> int:
        return min(map(len, self._of_runs))

    def __getitem__(self, number: int) -> Batch:
        batches = [batches[number] for batches in self._of_runs]
        return Batch(*(None if x[0] is None else np.stack(x) for x in zip(*batches)))


def interleave(number: np.ndarray, weights: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Each example's text and number in that text; any `sum(weights)` successive examples have `weights[i]` of text i.

    Of the first n examples, ⌊n · weights[0] / sum(weights)⌋ are from text 0; the others are interleaved the same way.
    """
    number = np.array(number, np.int64)
    text, rest = np.full(number.shape, len(weights) - 1), sum(weights)
    for each, weight in enumerate(weights[:-1]):
        left, before = text == len(weights) - 1, number * weight // rest
        taken = left & ((number + 1) * weight // rest > before)
        text[taken] = each
        number = np.where(taken, before, np.where(left, number - before, number))
        rest -= weight
    return text, number


def _shares(count: int, weights: Sequence[int]) -> list[int]:
    """The number of examples of each text among the first `count`."""
    shares, rest = [], sum(weights)
    for weight in weights[:-1]:
        shares.append(count * weight // rest)
        count, rest = count - shares[-1], rest - weight
    return [*shares, count]


class _Shuffled:
    """The order of a text's windows."""

    def __init__(self, length: int, context: int, seed: int, text: int):
        self._context = context
        self._windows = max(1, (length - context) // context)
        self._offsets = min(context, length - self._windows * context)
        # The first text has the same order as if it were the only text.
        self._epoch = functools.lru_cache(maxsize=4)(functools.partial(_epoch, seed, text, self._offsets))

    def starts(self, examples: np.ndarray) -> np.ndarray:
        """The first token of each example's window."""
        epochs, index = np.divmod(examples, self._windows)
        starts = np.empty_like(index)
        for epoch in np.unique(epochs):
            (order, offset), now = self._epoch(int(epoch)), epochs == epoch
            starts[now] = permuted(index[now], self._windows, order) * self._context + offset
        return starts


def _epoch(seed: int, text: int, offsets: int, epoch: int) -> tuple[int, int]:
    """The seed of an epoch's permutation and the offset of its windows."""
    order, offset = np.random.SeedSequence((seed, epoch, text) if text else (seed, epoch)).generate_state(2)
    return int(order), int(offset) % offsets


class EvalBatches:
    """A fixed pass over a text: its adjacent windows or, if they are too many, `windows` evenly spaced windows.

    Args:
      tokens: the held-out text, or texts, as for `TrainBatches`.
      context: predicted tokens per window.
      batch_size: windows in a global batch; the last batch is padded with windows of weight 0.
      windows: maximum number of windows; several texts share it in proportion to their weights.
      part: "all" of each text, or its "first" or "second" half.
      process_index, process_count, documents, weights: as for `TrainBatches`.

    Raises:
      UserError: a text is shorter than one window, or `windows` is below 1.

    >>> batches = EvalBatches(np.arange(12), context=4, batch_size=2, windows=9)
    >>> [batch.tokens[:, 0].tolist() for batch in batches]
    [[0, 4]]
    """

    def __init__(
        self,
        tokens,
        *,
        context,
        batch_size,
        windows,
        part="all",
        process_index=0,
        process_count=1,
        documents=None,
        weights=None,
    ):
        self._texts = _texts(tokens, documents, weights, context)
        spans = [_span(text.length, part) for text in self._texts]
        if (shortest := min(end - start for start, end in spans)) < context + 1:
            which = "the validation text" if part == "all" else f"the {part} half of the validation text"
            raise UserError(
                f"{which} has {shortest} tokens, shorter than model.context + 1 = {context + 1}: "
                "use a longer text, a smaller context or a larger data.validation_fraction"
            )
        if windows < 1:
            raise UserError(f"eval.windows = {windows}: expected 1 or more")
        shares = [max(1, share) for share in _shares(windows, weights or [1])]  # at least one window of each text
        starts = [first + _evenly_spaced(end - first, context, share) for (first, end), share in zip(spans, shares)]
        self._which, self._starts = np.repeat(np.arange(len(starts)), list(map(len, starts))), np.concatenate(starts)
        self._batch_size = batch_size
        share = batch_size // process_count
        self._examples = np.arange(process_index * share, (process_index + 1) * share)

    @property
    def windows(self) -> int:
        """Number of windows in a pass."""
        return len(self._starts)

    @property
    def windows_of_texts(self) -> list[int]:
        """Number of windows from each text."""
        return np.bincount(self._which, minlength=len(self._texts)).tolist()

    def __len__(self) -> int:
        return -(-self.windows // self._batch_size)

    def __getitem__(self, index: int) -> Batch:
        """This process's share of global batch `index`."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        examples = index * self._batch_size + self._examples
        real = examples < self.windows
        chosen = np.where(real, examples, 0)
        tokens, segments = _windows(self._texts, self._which[chosen], self._starts[chosen])
        return Batch(tokens, examples.astype(np.int32), real.astype(np.float32), segments)


def _span(length: int, part: str) -> tuple[int, int]:
    half = length // 2
    return {"all": (0, length), "first": (0, half), "second": (half, length)}[part]


def _evenly_spaced(length: int, context: int, windows: int) -> np.ndarray:
    count = (length - 1) // context
    if count > windows:
        return np.linspace(0, length - 1 - context, windows).round().astype(np.int64)
    return np.arange(count) * context


class _Text(NamedTuple):
    """A text from which windows of `window` tokens are read."""

    tokens: object
    documents: np.ndarray | None
    window: int

    @property
    def length(self) -> int:
        return len(self.tokens)

    def read(self, starts: np.ndarray) -> np.ndarray:
        """int32 `[n, window]`."""
        if hasattr(self.tokens, "read"):
            return self.tokens.read(starts, self.window)
        return self.tokens[starts[:, None] + np.arange(self.window)].astype(np.int32)

    def segments(self, starts: np.ndarray) -> np.ndarray | None:
        """int32 `[n, window]`: for each token, how many documents have begun after the window's first token."""
        if self.documents is None:
            return None
        begins = np.zeros((len(starts), self.window), np.int32)
        firsts = np.searchsorted(self.documents, starts, side="right")
        ends = np.searchsorted(self.documents, starts + self.window, side="left")
        for row, start, first, end in zip(begins, starts, firsts, ends):
            row[self.documents[first:end] - start] = 1
        return begins.cumsum(axis=1, dtype=np.int32)


def _texts(tokens, documents, weights, context: int) -> list[_Text]:
    tokens = [tokens] if weights is None else tokens
    documents = [documents] if weights is None else documents or [None] * len(tokens)
    return [_Text(*text, context + 1) for text in zip(tokens, documents, strict=True)]


def _windows(texts: list[_Text], which: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Windows, located by text number and first token, and their segments: each `[n, window]`."""
    tokens = np.empty((len(starts), texts[0].window), np.int32)
    segments = None if texts[0].documents is None else np.empty_like(tokens)
    for number, text in enumerate(texts):
        rows = which == number
        if not rows.any():
            continue
        tokens[rows] = text.read(starts[rows])
        if segments is not None:
            segments[rows] = text.segments(starts[rows])
    return tokens, segments


def prefetched(batches: Batches, start: int = 0, stop: int | None = None) -> Iterator[Batch]:
    """Iterate over `batches[start]`, `batches[start + 1]`, …; a thread reads ahead."""
    pool, numbers = ThreadPoolExecutor(1, "attnlab-batches"), range(start, len(batches) if stop is None else stop)
    try:
        yield from in_order((pool.submit(batches.__getitem__, number) for number in numbers), PREFETCHED + 1)
    finally:
        pool.shutdown(cancel_futures=True)


def in_order(jobs: Iterable[Future], ahead: int) -> Iterator:
    """Yield the results of jobs in order; at most `ahead` jobs are pending."""
    pending = collections.deque()
    for job in jobs:
        pending.append(job)
        if len(pending) >= ahead:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()
