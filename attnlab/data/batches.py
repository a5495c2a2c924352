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
    """Windows of a text, with what a step must know of them; leading axes may be added for devices.

    Attributes:
      tokens: int32 `[rows, context + 1]`; inputs are all but the last column, targets all but the first.
      example: int32 `[rows]`, the row of the global batch that each is. Random keys are folded with it, so that the
        number of devices changes nothing.
      weight: float32 `[rows]`, 1, or 0 for a row that only fills up a batch.
    """

    tokens: np.ndarray
    example: np.ndarray
    weight: np.ndarray


class TrainBatches:
    """Shuffled windows of a text, epoch after epoch.

    An epoch is a permutation of windows that lie end to end, all shifted by one random offset, so that it shows each
    token once and no two epochs cut the text at the same places.

    Args:
      tokens: int `[length]`, the text.
      context: tokens that a window predicts.
      batch_size: rows of the global batch.
      seed: of the order and the offsets.
      process_index, process_count: this process gets its contiguous share of each global batch's rows.

    Raises:
      UserError: a text shorter than one window, a batch that the processes do not divide.

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
        rows = batch_size // process_count
        self._rows = np.arange(process_index * rows, (process_index + 1) * rows)

    def __len__(self) -> int:
        return 2**62  # steps, without end; Grain asks for a length

    def __getitem__(self, step: int) -> Batch:
        """This process' rows of the global batch at `step`."""
        starts = np.array([self._start(step * self._batch_size + int(row)) for row in self._rows])
        tokens = self._tokens[starts[:, None] + np.arange(self._context + 1)]
        return Batch(tokens.astype(np.int32), self._rows.astype(np.int32), np.ones(len(starts), np.float32))

    def _start(self, example: int) -> int:
        epoch, index = divmod(example, self._windows)
        order, offset = self._epoch(epoch)
        window = index_shuffle(index, max_index=self._windows - 1, seed=order, rounds=4) if self._windows > 1 else 0
        return window * self._context + offset


def _epoch(seed: int, epoch: int, offsets: int) -> tuple[int, int]:
    """The seed of an epoch's permutation, and the offset of its windows."""
    order, offset = np.random.SeedSequence((seed, epoch)).generate_state(2)
    return int(order), int(offset) % offsets


class EvalBatches:
    """A fixed pass over a text: windows end to end, or evenly spaced when that is too many.

    Args:
      tokens: int `[length]`, the held-out text.
      context: tokens that a window predicts.
      batch_size: rows of a global batch; the last one is filled up with rows of weight 0.
      windows: how many at most.
      process_index, process_count: as for `TrainBatches`.

    Raises:
      UserError: a text shorter than one window.

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
        rows = batch_size // process_count
        self._rows = np.arange(process_index * rows, (process_index + 1) * rows)

    @property
    def windows(self) -> int:
        """How many windows a pass scores."""
        return len(self._starts)

    def __len__(self) -> int:
        return -(-len(self._starts) // self._batch_size)

    def __getitem__(self, index: int) -> Batch:
        """This process' rows of global batch `index`."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        rows = index * self._batch_size + self._rows
        real = rows < len(self._starts)
        starts = self._starts[np.where(real, rows, 0)]
        tokens = self._tokens[starts[:, None] + np.arange(self._context + 1)]
        return Batch(tokens.astype(np.int32), rows.astype(np.int32), real.astype(np.float32))


def prefetched(batches: TrainBatches | EvalBatches, start: int = 0, stop: int | None = None) -> Iterator[Batch]:
    """`batches[start]`, `batches[start + 1]`, … read ahead by a thread of Grain's.

    >>> batches = TrainBatches(np.arange(100), context=4, batch_size=3, seed=0)
    >>> [batch.tokens.shape for batch in prefetched(batches, start=7, stop=9)]
    [(3, 5), (3, 5)]
    """
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # Grain reads its own absl flags, whose defaults serve
    stop = len(batches) if stop is None else stop
    if start >= stop:
        return iter(())
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=8)
    return iter(grain.MapDataset.source(batches).slice(slice(start, stop)).to_iter_dataset(options))
