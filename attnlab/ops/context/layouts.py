"""The rows of a sequence that each device computes, and how it gets their keys, chosen by the tiles of the mask.

No fixed layout serves all masks: contiguous rows give the last device of a causal mask nearly twice the mean of tiles,
and rows in zigzag order do the same to documents. So devices get blocks of queries by their numbers of tiles.
"""

from typing import Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from attnlab.ops.mask_algebra import And
from attnlab.ops.masks import Mask, join
from attnlab.ops.schedule import Costs, schedule

Way = Literal["gather", "halo", "ring"]

_MOST_BLOCKS = 8  # blocks per device; each block is one message
_TILE = 512  # side of the tiles that are counted
_MOST_IMBALANCE = 1.06  # busiest device's tiles over the mean, beyond which rows are not contiguous
_HALO_SHARE = 0.25  # share of all keys up to which a device takes a halo instead of all keys
_MOST_GATHERED = 2**28  # bytes of keys and values per device, beyond which they pass in a ring


class Layout(NamedTuple):
    """The split of a call along its sequence over n devices; block b is the rows from b·T/(n·blocks) on."""

    way: Way  # "gather": all keys; "halo": nearby rows; "ring": one device after another
    queries: Int[np.ndarray, "n blocks"]  # blocks of q that each device computes
    keys: Int[np.ndarray, "n blocks"]  # the same for k and v, in a ring; contiguous otherwise
    halo: tuple[int, int]  # rows of k and v to the left and to the right
    block_sizes: tuple[int, int] | None  # tile sizes; None for the backend's choice
    imbalance: float  # tiles of the busiest device over the mean

    def rows(self, blocks: Int[np.ndarray, "n blocks"], length: int) -> Int[np.ndarray, "n rows"]:
        size = length // blocks.size
        return (blocks[:, :, None] * size + np.arange(size)).reshape(len(blocks), -1).astype(np.int32)

    def __str__(self):
        n = len(self.queries)
        how = {
            "gather": "keys gathered",
            "halo": f"keys of {self.halo[0]} rows before and {self.halo[1]} after its own",
            "ring": "keys in a ring",
        }[self.way]
        order = "" if is_contiguous(self.queries) else ", blocks of queries given out by their tiles"
        order = ", rows in zigzag order" if order and self.way == "ring" else order
        return f"over {n} devices, {how}{order}: the busiest computes {self.imbalance:.2f} of the mean"


def contiguous(n: int, blocks: int) -> Int[np.ndarray, "n blocks"]:
    return np.arange(n * blocks).reshape(n, blocks)


def is_contiguous(blocks: Int[np.ndarray, "n blocks"]) -> bool:
    return bool((blocks.ravel() == np.arange(blocks.size)).all())


def choose(
    mask: Mask | None,
    lengths: tuple[int, int],
    n: int,
    *,
    way: str = "auto",
    gathered_bytes: int = 0,
    block_sizes: tuple[int, int] | None = None,
    costs: Costs | None = None,
    **where,
) -> Layout:
    """The layout of a call over n devices; `mask` may be its `known_part`, `where` goes to `Mask.tiles`."""
    counts = _Counts(mask, lengths, n, where)
    halo, in_order = counts.halo(), tuple(contiguous(n, blocks) for blocks in counts.blocks)
    if way == "auto":
        is_too_large = gathered_bytes > _MOST_GATHERED
        fits = lengths[1] // n + sum(halo) <= lengths[1] * _HALO_SHARE
        fits &= is_too_large or counts.imbalance("halo", *in_order) <= _MOST_IMBALANCE
        way = "halo" if fits else "ring" if is_too_large else "gather"
    if way == "halo" and lengths[1] // n + sum(halo) > lengths[1]:
        raise ValueError(
            "context_parallel way = 'halo' needs a mask whose keys are near its queries, and known while tracing, as "
            "SlidingWindow: use way='auto'"
        )
    queries, keys = in_order
    if way != "halo" and counts.imbalance(way, queries, keys) > _MOST_IMBALANCE:
        queries, keys = counts.in_zigzag() if way == "ring" else (counts.balanced(), keys)
        if counts.imbalance(way, queries, keys) >= counts.imbalance(way, *in_order):
            queries, keys = in_order
    halo = halo if way == "halo" else (0, 0)
    block_sizes = block_sizes or _tile_sizes(mask, lengths, queries, keys, way, costs, where)
    return Layout(way, _joined(queries), _joined(keys), halo, block_sizes, counts.imbalance(way, queries, keys))


def known_part(mask: Mask | None, positions_are_known: bool = True) -> Mask | None:
    """The masks of a conjunction that are known while tracing; the other masks can only hide more pairs."""
    if isinstance(mask, And):
        return join(*(known_part(part, positions_are_known) for part in (mask.a, mask.b)))
    if mask is None or (mask.positional and not positions_are_known):
        return None
    return None if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(mask)) else mask


class _Counts:
    """The number of tiles that a mask has in each block of queries and each block of keys."""

    def __init__(self, mask, lengths, n, where):
        self.n, self.lengths = n, lengths
        counts = range(1, _MOST_BLOCKS + 1)
        self.blocks = tuple(max(m for m in counts if length // n % m == 0) for length in lengths)  # of a device
        sizes = [length // (n * blocks) for length, blocks in zip(lengths, self.blocks)]  # rows of a block
        self.sizes = tuple(_divisor(size, _TILE) for size in sizes)
        shape = tuple(length // size for length, size in zip(lengths, self.sizes))
        visible = np.ones(shape, np.int64)
        found = None if mask is None else mask.tiles(*lengths, self.sizes, **where)[0]
        if isinstance(found, np.ndarray):  # not of a function that closes over traced arrays
            visible = found.sum(axis=tuple(range(found.ndim - 2)), dtype=np.int64)
        self.is_visible = visible > 0
        per_block = [size // tile for size, tile in zip(sizes, self.sizes)]
        self.of_blocks = visible.reshape(shape[0] // per_block[0], per_block[0], -1, per_block[1]).sum(axis=(1, 3))

    def imbalance(self, way, queries, keys) -> float:
        """The tiles of the busiest device over the mean; in a ring all devices wait for the busiest in each turn."""
        pairs = self.of_blocks[queries][..., keys].sum(axis=(1, 3))  # [n, n], of queries and keys of two devices
        turns = (np.arange(self.n)[:, None] - np.arange(self.n)) % self.n  # whose keys device i has in turn s
        busiest = np.take_along_axis(pairs, turns, axis=1).max(axis=0).sum() if way == "ring" else pairs.sum(1).max()
        return float(busiest / max(pairs.sum() / self.n, 1))

    def balanced(self):
        """Blocks of queries for each device: the largest first, each to the device with the fewest tiles."""
        tiles, load, given = self.of_blocks.sum(axis=1), np.zeros(self.n, np.int64), [[] for _ in range(self.n)]
        for block in np.argsort(-tiles, kind="stable"):
            free = [d for d in range(self.n) if len(given[d]) < self.blocks[0]]
            device = min(free, key=lambda d: (load[d], d != block // self.blocks[0], d))
            given[device].append(int(block))
            load[device] += tiles[block]
        return np.sort(np.array(given), axis=1)

    def in_zigzag(self):
        """Blocks of queries and of keys for each device, the first and the last remaining rows."""
        return tuple((contiguous if blocks % 2 else _zigzag)(self.n, blocks) for blocks in self.blocks)

    def halo(self):
        """Rows of keys before and after a device's rows that its queries may attend to."""
        rows, columns = np.nonzero(self.is_visible)
        if not len(rows):
            return 0, 0
        own = self.lengths[1] // self.n
        device = rows * self.sizes[0] // (self.lengths[0] // self.n)
        left = (device * own - columns * self.sizes[1]).max()
        right = ((columns + 1) * self.sizes[1] - (device + 1) * own).max()
        return max(int(left), 0), max(int(right), 0)


def _joined(blocks):
    while blocks.shape[1] % 2 == 0 and not (blocks[:, ::2] % 2).any() and (blocks[:, ::2] + 1 == blocks[:, 1::2]).all():
        blocks = blocks[:, ::2] // 2
    return blocks


def _zigzag(n: int, blocks: int):
    """Device d has the d-th and the d-th last of 2·n pieces."""
    pieces = np.arange(n * blocks).reshape(2 * n, blocks // 2)
    return np.concatenate([pieces[:n], pieces[n:][::-1]], axis=1)


def _divisor(size: int, most: int) -> int:
    """The largest divisor that is at most `most`, or the size itself if its divisors are small."""
    found = max(d for d in range(1, min(size, most) + 1) if size % d == 0)
    return found if found >= min(size, 16) else size


def _tile_sizes(mask, lengths, queries, keys, way, costs, where):
    """Tile sizes that divide the blocks of rows where possible."""
    if costs is None or 0 in lengths:
        return None
    sizes, _ = schedule(mask, *lengths, costs=costs, **where)
    of_keys = sizes[1] if way == "gather" else _divisor(lengths[1] // keys.size, sizes[1])
    return _divisor(lengths[0] // queries.size, sizes[0]), of_keys
