"""The coordinates of tiles, rectangles of a score array.

The coordinates of a `Tile` broadcast against its scores. Code that is elementwise in the coordinates works for any
tile, whichever of the last two axes has the queries. A `Tiling` holds the smallest and the largest coordinate of each
tile, so that interval arithmetic can find the fully masked tiles.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Bool, Int

from attnlab.ops import checks, elementwise
from attnlab.types import Array


class Shard(NamedTuple):
    """A part of a call, as indices in the whole call, which masks and score mods use; None for all indices."""

    examples: Int[Array, "..."] | None = None  # counted through all batch axes
    heads: Int[Array, " H"] | None = None
    queries: Int[Array, " Tq"] | None = None

    def take(self, x: Array, *sides: str) -> Array:
        """Select these examples from an array `[*batch, *sides]`, or `[*sides]` if all share it, and these heads along
        the axis named "heads" in `sides`, unless its size is 1."""
        for axis, side in enumerate(sides, -len(sides)):
            if side == "heads" and self.heads is not None and x.shape[axis] > 1:
                x = jnp.take(jnp.asarray(x), self.heads, axis=axis)
        batch = x.shape[: x.ndim - len(sides)]
        if self.examples is None or not batch:
            return x
        return jnp.take(x.reshape(-1, *x.shape[len(batch) :]), self.examples, axis=0)


WHOLE = Shard()  # all of a call


class Side(NamedTuple):
    index: Int[Array, " n"]  # rows of the array; past its end, the last row repeated
    position: Int[Array, "..."]  # positions in the sequence, `[..., n]`
    axis: int  # −2 or −1, their axis in the scores
    start: int | Array | None = None  # the first index if indices are consecutive
    is_whole: bool = False  # whether the side is all rows, in order
    whole_index: Int[Array, " n"] | None = None  # indices in the whole call; `index` if None

    @property
    def index_in_call(self) -> Int[Array, " n"]:
        return self.index if self.whole_index is None else self.whole_index

    def take(self, x: Array, axis: int = -1) -> Array:
        """The entries of `x` for these rows, along an axis with one entry per row of the call, or one entry for all."""
        if x.shape[axis] == 1:
            return x
        if self.whole_index is not None:
            return jnp.take(jnp.asarray(x), self.whole_index, axis=axis, mode="clip")
        if self.is_whole:
            return x
        # A slice costs less than a gather, but a ragged last tile needs a gather: past the end, a slice would shift.
        size, length = len(self.index), x.shape[axis]
        is_inside = self.start + size <= length if isinstance(self.start, int) else length % size == 0
        if self.start is None or not is_inside:
            return jnp.take(x, self.index, axis=axis, mode="clip")
        return lax.dynamic_slice_in_dim(x, self.start, size, axis=axis)

    def of(self, x: Array, per_head: bool) -> Array:
        """The entries of `[..., n]`, or `[..., n, H]`, for these rows, to broadcast against scores."""
        if not per_head:
            return self.lay(self.take(x))
        x = self.take(jnp.swapaxes(jnp.asarray(x), -1, -2))  # [..., H, n]
        return x[..., :, None] if self.axis == -2 else x[..., None, :]

    def lay(self, x: Array) -> Array:
        """Reshape `[..., n]` to `[..., 1, n, 1]` or `[..., 1, 1, n]`, to broadcast against scores."""
        return x[..., None, :, None] if self.axis == -2 else x[..., None, None, :]

    def block(self, i: int | Array, size: int) -> "Side":
        """Block i of a whole side; past its end the last row is repeated."""
        index = jnp.minimum(i * size + jnp.arange(size, dtype=jnp.int32), len(self.index) - 1)
        position = jnp.take(jnp.asarray(self.position), index, axis=-1)
        in_call = None if self.whole_index is None else jnp.take(self.whole_index, index)
        return Side(index, position, self.axis, whole_index=in_call)


class Tile(NamedTuple):
    """The coordinates of scores `[..., H, queries, keys]` or `[..., H, keys, queries]`, counted in the whole call."""

    example: Int[Array, "..."]  # `[..., 1, 1, 1]`, counted through all batch axes
    head: Int[Array, "H 1 1"]
    queries: Side
    keys: Side

    q_index = property(lambda self: self.queries.lay(self.queries.index_in_call))
    kv_index = property(lambda self: self.keys.lay(self.keys.index))
    q_position = property(lambda self: self.queries.lay(self.queries.position))
    kv_position = property(lambda self: self.keys.lay(self.keys.position))

    def of_queries(self, x: Array, per_head: bool = False) -> Array:
        """The part of an array `[..., Tq]`, or `[..., Tq, H]`, for this tile's queries, laid out like the scores."""
        return self.queries.of(x, per_head)

    def of_keys(self, x: Array, per_head: bool = False) -> Array:
        """The part of an array `[..., Tk]`, or `[..., Tk, H]`, for this tile's keys, laid out like the scores."""
        return self.keys.of(x, per_head)

    def of_examples(self, x: Array) -> Array:
        """An array with q's batch axes, or of shape (), laid out like the scores; integers as int32."""
        x = known(x)
        x = checks.clipped_to_int32(x) if jnp.issubdtype(x.dtype, jnp.integer) else x
        return x[..., None, None, None]

    def of_heads(self, x: Array) -> Array:
        """An array `[H]` of the whole call, laid out like the scores."""
        return jnp.asarray(x)[self.head]

    def of_blocks(self, x: Array, size: int) -> Array:
        """The entries `[..., i // size, j // size]` at indices i and j, laid out like the scores."""
        rows, columns = self.q_index[0] // size, self.kv_index[0] // size  # without their head axis
        return jnp.asarray(x)[..., rows, columns]

    def apply(self, fn: Callable, coordinates: tuple[Array, ...], arrays: tuple[Array, ...], kind: type) -> Array:
        """Evaluate a function of scalars, `fn(*coordinates, *arrays)`, at all points."""
        return elementwise.apply(fn, coordinates, arrays, kind)

    def of_pairs(self, x: Array) -> Array:
        """The part of an array `[..., Tq or 1, Tk or 1]` for this tile, laid out like the scores."""
        x = self.queries.take(self.keys.take(x, axis=-1), axis=-2)
        return x if self.queries.axis == -2 else jnp.swapaxes(x, -1, -2)


def whole(
    q_length: int,
    kv_length: int,
    num_heads: int = 1,
    q_positions=None,
    kv_positions=None,
    batch=(),
    xp=jnp,
    shard: Shard = WHOLE,
) -> Tile:
    """The tile of all scores `[*batch, H, Tq, Tk]`; with `xp=numpy`, static masks are evaluated while tracing."""

    def side(length, positions, axis, whole_index=None):
        index = xp.arange(length, dtype=xp.int32)
        if positions is not None:  # as int32, because unsigned integers would wrap
            positions = (jnp if isinstance(positions, jax.core.Tracer) else xp).asarray(positions, xp.int32)
        positions = index if positions is None else positions
        return Side(index, positions, axis, start=0, is_whole=True, whole_index=whole_index)

    return Tile(
        example=examples(batch, shard, xp),
        head=heads(num_heads, shard, xp),
        queries=side(q_length, q_positions, -2, shard.queries),
        keys=side(kv_length, kv_positions, -1),
    )


def examples(batch: tuple[int, ...], shard: Shard = WHOLE, xp=jnp) -> Int[Array, "..."]:
    """The indices of examples in the whole call, `[*batch, 1, 1, 1]`."""
    # NumPy has no arrays with the symbolic sizes of jax.export.
    xp = xp if all(isinstance(size, int) for size in batch) else jnp
    index = xp.arange(math.prod(batch), dtype=xp.int32) if shard.examples is None else shard.examples
    return index.reshape(*batch, 1, 1, 1)


def heads(num_heads: int, shard: Shard = WHOLE, xp=jnp) -> Int[Array, "H 1 1"]:
    """The indices of heads in the whole call, `[H, 1, 1]`."""
    index = xp.arange(num_heads, dtype=xp.int32) if shard.heads is None else shard.heads
    return index[:, None, None]


class Span(NamedTuple):
    low: Array
    high: Array


class Tiling(NamedTuple):
    """A score array `[..., H, Tq, Tk]` cut into nQ × nK tiles; its spans broadcast to `[..., H, nQ, nK]`."""

    covers: Tile  # the tile that covers the score array
    block_sizes: tuple[int, int]  # queries and keys of a tile; the last tiles may be ragged

    @property
    def shape(self) -> tuple[int, int]:
        sides = (self.covers.queries, self.covers.keys)
        return tuple(-(-len(side.index) // size) for side, size in zip(sides, self.block_sizes))

    q_index = property(lambda self: _spans(self.covers.queries, self.covers.queries.index_in_call, self.block_sizes[0]))
    kv_index = property(lambda self: _spans(self.covers.keys, self.covers.keys.index, self.block_sizes[1]))
    q_position = property(lambda self: _spans(self.covers.queries, self.covers.queries.position, self.block_sizes[0]))
    kv_position = property(lambda self: _spans(self.covers.keys, self.covers.keys.position, self.block_sizes[1]))

    def of_queries(self, x: Array) -> Span:
        """The span of an array `[..., Tq]` of the whole call in each tile."""
        return _spans(self.covers.queries, self.covers.queries.take(x), self.block_sizes[0])

    def of_keys(self, x: Array) -> Span:
        """The span of an array `[..., Tk]` in each tile."""
        return _spans(self.covers.keys, x, self.block_sizes[1])

    def of_pairs(self, x: Bool[Array, "..."]) -> tuple[Array, Array]:
        """Return (any, all) of each tile's entries in a bool array `[..., Tq, Tk]` of the whole call."""
        x = blocked(known(self.covers.queries.take(x, axis=-2)), self.block_sizes[1])  # [..., Tq, nK, size]
        any_set, all_set = (blocked(x.swapaxes(-1, -2), self.block_sizes[0]) for x in (x.any(-1), x.all(-1)))
        return any_set.any(-1).swapaxes(-1, -2), all_set.all(-1).swapaxes(-1, -2)

    def row(self, i: int | Array) -> Tile:
        """The tile of query block i and all keys; past the end the last query repeats: any and all stay the same."""
        return self.covers._replace(queries=self.covers.queries.block(i, self.block_sizes[0]))


def _spans(side: Side, x: Array, size: int) -> Span:
    """The smallest and the largest entry of each block of `x`, which has one entry per row of the side."""
    blocks = blocked(known(x), size)
    return Span(side.lay(blocks.min(axis=-1)), side.lay(blocks.max(axis=-1)))


def known(x: Array) -> Array:
    return x if isinstance(x, jax.core.Tracer) else np.asarray(x)


def padded(x: Array, length: int, axis: int = -1) -> Array:
    """`x` with zeros (False) appended along an axis up to `length`, if it is shorter."""
    missing = max(0, length - x.shape[axis])
    widths = [(0, missing if at == axis % x.ndim else 0) for at in range(x.ndim)]
    return jnp.pad(x, widths) if missing else x


def blocked(x: Array, size: int) -> Array:
    """Cut `[..., n]` into blocks `[..., ceil(n / size), size]`; the last entry is repeated to fill the last block."""
    xp = np if isinstance(x, np.ndarray) else jnp
    missing = -x.shape[-1] % size
    if missing:
        x = xp.concatenate([x, xp.repeat(x[..., -1:], missing, axis=-1)], axis=-1)
    return x.reshape(*x.shape[:-1], -1, size)
