"""Batches of token windows. The global batch at a step is a pure function of (seed, step)."""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import grain
import numpy as np
from absl import flags
from grain.experimental import index_shuffle

from attnlab.errors import UserError


class Batch(NamedTuple):
    """Windows of a text, with their weights and global indices; leading axes may be added for devices.

    Attributes:
      tokens: int32 `[batch, context + 1]`; inputs are all but the last column, targets all but the first.
      example: int32 `[batch]`, the index of each window in the global batch. Random keys are folded with it, so that
        results do not depend on the number of devices.
      weight: float32 `[batch]`, 1, or 0 for padding of the last batch.
    """

    tokens: np.ndarray
    example: np.ndarray
    weight: np.ndarray


class TrainBatches:
    """Shuffled windows of a text, epoch after epoch.

    An epoch is a permutation of adjacent windows, all shifted by one random offset: it shows each token once, and
    different epochs cut the text at different places.

    Args:
      tokens: int `[length]`, the text.
      context: predicted tokens per window.
      batch_size: windows in the global batch.
      seed: determines the order and the offsets.
      process_index, process_count: this process gets its contiguous share of each global batch.

    Raises:
      UserError: the text is shorter than one window, or batch_size is not a multiple of process_count.

    >>> batches = TrainBatches(np.arange(100), context=4, batch_size=3, seed=0)
    >>> batches[7].tokens.shape
    (3, 5)
    """

    def __init__(self, tokens, *, context, batch_size, seed, process_index=0, process_count=1):
        if len(tokens) < context + 1:
            raise UserError(
                f"the training text has {len(tokens)} tokens, shorter than model.context + 1 = {context + 1}: "
                "use a longer text or a smaller context"
            )
        if batch_size < 1 or batch_size % process_count:
            raise UserError(f"batch_size = {batch_size} must be a multiple of the {process_count} processes")
        self._tokens, self._context, self._batch_size = tokens, context, batch_size
        self._windows = max(1, (len(tokens) - context) // context)
        self._offsets = min(context, len(tokens) - self._windows * context)
        self._epoch = functools.lru_cache(maxsize=4)(lambda epoch: _epoch(seed, epoch, self._offsets))
        share = batch_size // process_count
        self._examples = np.arange(process_index * share, (process_index + 1) * share)

    def __len__(self) -> int:
        return 2**62  # endless, but Grain requires a length

    def __getitem__(self, step: int) -> Batch:
        """This process's share of the global batch at `step`."""
        starts = np.array([self._start(step * self._batch_size + int(example)) for example in self._examples])
        tokens = self._tokens[starts[:, None] + np.arange(self._context + 1)]
        return Batch(tokens.astype(np.int32), self._examples.astype(np.int32), np.ones(len(starts), np.float32))

    def _start(self, example: int) -> int:
        epoch, index = divmod(example, self._windows)
        order, offset = self._epoch(epoch)
        window = index_shuffle(index, max_index=self._windows - 1, seed=order, rounds=4) if self._windows > 1 else 0
        return window * self._context + offset


def _epoch(seed: int, epoch: int, offsets: int) -> tuple[int, int]:
    """The seed of an epoch's permutation and the offset of its windows."""
    order, offset = np.random.SeedSequence((seed, epoch)).generate_state(2)
    return int(order), int(offset) % offsets


class EvalBatches:
    """A fixed pass over a text: adjacent windows, or evenly spaced ones if there are more than `windows`.

    Args:
      tokens: int `[length]`, the held-out text.
      context: predicted tokens per window.
      batch_size: windows in a global batch; the last batch is padded with windows of weight 0.
      windows: maximal number of windows.
      process_index, process_count: as for `TrainBatches`.

    Raises:
      UserError: the text is shorter than one window, or `windows` is below 1.

    >>> batches = EvalBatches(np.arange(12), context=4, batch_size=2, windows=9)
    >>> [batch.tokens[:, 0].tolist() for batch in batches]
    [[0, 4]]
    """

    def __init__(self, tokens, *, context, batch_size, windows, process_index=0, process_count=1):
        if len(tokens) < context + 1:
            raise UserError(
                f"the validation text has {len(tokens)} tokens, shorter than model.context + 1 = {context + 1}: "
                "use a longer text, a smaller context or a larger data.validation_fraction"
            )
        if windows < 1:
            raise UserError(f"eval.windows = {windows}: expected 1 or more")
        count = (len(tokens) - 1) // context
        starts = np.arange(count) * context
        if count > windows:
            starts = np.linspace(0, len(tokens) - 1 - context, windows).round().astype(np.int64)
        self._tokens, self._context, self._starts = tokens, context, starts
        self._batch_size = batch_size
        share = batch_size // process_count
        self._examples = np.arange(process_index * share, (process_index + 1) * share)

    @property
    def windows(self) -> int:
        """Number of windows that a pass scores."""
        return len(self._starts)

    def __len__(self) -> int:
        return -(-len(self._starts) // self._batch_size)

    def __getitem__(self, index: int) -> Batch:
        """This process's share of global batch `index`."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        examples = index * self._batch_size + self._examples
        real = examples < len(self._starts)
        starts = self._starts[np.where(real, examples, 0)]
        tokens = self._tokens[starts[:, None] + np.arange(self._context + 1)]
        return Batch(tokens.astype(np.int32), examples.astype(np.int32), real.astype(np.float32))


def prefetched(batches: TrainBatches | EvalBatches, start: int = 0, stop: int | None = None) -> Iterator[Batch]:
    """Iterate over `batches[start]`, `batches[start + 1]`, …, prefetched by a Grain thread.

    >>> batches = TrainBatches(np.arange(100), context=4, batch_size=3, seed=0)
    >>> [batch.tokens.shape for batch in prefetched(batches, start=7, stop=9)]
    [(3, 5), (3, 5)]
    """
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # Grain reads its own absl flags; their defaults will do
    stop = len(batches) if stop is None else stop
    if start >= stop:
        return iter(())
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=8)
    return iter(grain.MapDataset.source(batches).slice(slice(start, stop)).to_iter_dataset(options))
