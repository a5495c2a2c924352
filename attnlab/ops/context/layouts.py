"""The rows of a sequence that each device computes: contiguous or in zigzag order, depending on the mask's tiles.

Under a causal mask, contiguous rows give the last device nearly twice the mean number of tiles. In zigzag order each
device has a chunk from the first half of the sequence and its mirror image from the second, which balances the work.
"""

from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from attnlab.ops.mask_algebra import And
from attnlab.ops.masks import Mask, join
from attnlab.ops.schedule import Costs, schedule

_TILE = 512  # side of the tiles that `choose` counts
_MOST_IMBALANCE = 1.06  # rows stay contiguous up to this ratio of the busiest device's tiles to the mean


class Layout(NamedTuple):
    """The split of the queries of a call over n devices; all devices gather all keys."""

    chunks: Int[np.ndarray, "n m"]  # each device's chunks, out of n·m equal chunks: m is 1, or 2 in zigzag
    block_sizes: tuple[int, int]  # (queries, keys) of a tile
    imbalance: float  # tiles of the busiest device divided by the mean

    @property
    def is_zigzag(self) -> bool:
        return self.chunks.shape[1] == 2

    def rows(self, length: int) -> Int[np.ndarray, "n rows"]:
        size = length // self.chunks.size
        return (self.chunks[:, :, None] * size + np.arange(size)).reshape(len(self.chunks), -1).astype(np.int32)

    def __str__(self):
        order = ", rows in zigzag order" if self.is_zigzag else ""
        busiest = f"the busiest computes {self.imbalance:.2f} times the mean"
        return f"over {len(self.chunks)} devices, keys gathered{order}: {busiest}"


def choose(
    mask: Mask | None,
    lengths: tuple[int, int],
    n: int,
    *,
    costs: Costs,
    block_sizes: tuple[int, int] | None = None,
    **where,
) -> Layout:
    """Choose a layout over n devices; `mask` may be the `known_part` of a mask, and `where` goes to `Mask.tiles`."""
    layouts = [np.arange(n)[:, None]]
    if lengths[0] // n % 2 == 0:
        layouts.append(zigzag(n))
    tiles = _tiles_of_chunks(mask, lengths, layouts[-1].size, where)
    mean = max(tiles.sum() / n, 1)
    by_device = [tiles.reshape(n, -1).sum(axis=1), *(tiles[chunks].sum(axis=1) for chunks in layouts[1:])]
    imbalances = [float(device_tiles.max() / mean) for device_tiles in by_device]
    best = 0 if imbalances[0] <= _MOST_IMBALANCE else int(np.argmin(imbalances))
    if block_sizes is None:
        (q_size, kv_size), _ = schedule(mask, *lengths, costs=costs, **where)
        block_sizes = _divisor(lengths[0] // layouts[best].size, q_size), kv_size
    return Layout(layouts[best], block_sizes, imbalances[best])


def zigzag(n: int) -> Int[np.ndarray, "n 2"]:
    """Assign chunks d and 2·n − 1 − d of 2·n to device d, the even-numbered chunk first (see `shards`)."""
    chunks = np.stack([np.arange(n), 2 * n - 1 - np.arange(n)], axis=1)
    return np.take_along_axis(chunks, np.argsort(chunks % 2, axis=1), axis=1)


def known_part(mask: Mask | None, positions_are_known: bool = True) -> Mask | None:
    """The masks joined by `&` that are known while tracing; the other masks can only hide more pairs."""
    if isinstance(mask, And):
        return join(*(known_part(part, positions_are_known) for part in (mask.a, mask.b)))
    if mask is None or (mask.positional and not positions_are_known):
        return None
    return None if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(mask)) else mask


def _tiles_of_chunks(mask, lengths, count: int, where) -> Int[np.ndarray, " count"]:
    """The number of tiles with visible pairs in each of `count` chunks of the queries."""
    tile = _divisor(lengths[0] // count, _TILE)
    visible = None if mask is None else mask.tiles(*lengths, (tile, _TILE), **where)[0]
    if not isinstance(visible, np.ndarray):  # no mask, or its functions close over traced arrays: count all tiles
        return np.full(count, lengths[0] // count // tile * -(-lengths[1] // _TILE))
    return visible.sum(axis=(*range(visible.ndim - 2), -1), dtype=np.int64).reshape(count, -1).sum(axis=1)


def _divisor(size: int, most: int) -> int:
    """The largest divisor of `size` that is at most `most`, or `size` itself if that divisor is small."""
    divisor = max(d for d in range(1, min(size, most) + 1) if size % d == 0)
    return divisor if divisor >= min(size, 16) else size
