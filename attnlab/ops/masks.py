"""Masks: which keys each query may attend to; they combine with `&`, `|`, `~`.

Masks are pytrees: arrays in them are leaves, Python numbers are static, so a mask passes through `jit`, `vmap`, `grad`
and `scan`. An *index* counts rows of an array; a *position* is a row's place in its sequence. `Causal` and
`SlidingWindow` compare positions, `Padding` and `Dense` use indices.

`visible` returns which pairs of a tile are visible. `bounds` finds, by interval arithmetic on the coordinates, the
tiles where some pair may be visible and those where all are, so that a backend can skip tiles or comparisons.
"""

import numbers
import operator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Integer

from attnlab.ops import checks, elementwise
from attnlab.ops.mask_algebra import And, Mask, require_mask
from attnlab.ops.tiles import Span, known, padded
from attnlab.types import Array


@dataclass(frozen=True)
class Causal(Mask):
    """A query attends to its position and earlier positions: j ≤ i (Vaswani et al. 2017, section 3.2.3).

    >>> Causal().dense(3, 3).astype(int)
    Array([[1, 0, 0],
           [1, 1, 0],
           [1, 1, 1]], dtype=int32)
    """

    positional = True

    def visible(self, tile):
        return tile.kv_position <= tile.q_position

    def bounds(self, tiling):
        return _at_most(tiling.kv_position, tiling.q_position)


@dataclass(frozen=True)
class SlidingWindow(Mask):
    """A query attends to `left` positions before it, `right` positions after it, and its own: i − left ≤ j ≤ i + right.

    Both are integers ≥ 0, in positions (otherwise ValueError). With w = left + right + 1, attention to n keys of d
    features costs O(w·n·d) (restricted self-attention, Vaswani et al. 2017, section 4).

    >>> SlidingWindow(left=1, right=1).dense(4, 4).sum(axis=-1)
    Array([2, 3, 3, 2], dtype=int32)
    """

    left: int
    right: int = 0
    positional = True

    def __post_init__(self):
        for name, size in (("left", self.left), ("right", self.right)):
            if not isinstance(size, numbers.Integral) or size < 0:
                raise ValueError(f"SlidingWindow {name} = {size!r}: expected an integer number of positions, 0 or more")

    def visible(self, tile):
        (left, right), distance = self._reach(), tile.kv_position - tile.q_position
        return (distance >= -left) & (distance <= right)

    def bounds(self, tiling):
        (q_low, q_high), (kv_low, kv_high) = tiling.q_position, tiling.kv_position
        lowest, highest = kv_low - q_high, kv_high - q_low  # values of kv − q
        left, right = self._reach()
        return (highest >= -left) & (lowest <= right), (lowest >= -left) & (highest <= right)

    def _reach(self):
        return min(self.left, checks.INT32_MAX), min(self.right, checks.INT32_MAX)


@dataclass(frozen=True)
class PrefixLM(Mask):
    """Full attention to a prefix and causal attention to later keys: j < length or j ≤ i (Raffel et al. 2020).

    `length`, in positions, is one number for all sequences, or an int array with exactly q's batch axes.

    >>> PrefixLM(2).dense(3, 3).astype(int)
    Array([[1, 1, 0],
           [1, 1, 0],
           [1, 1, 1]], dtype=int32)
    """

    length: Integer[Array, "..."] | int
    positional = True

    def __post_init__(self):
        if isinstance(self.length, np.ndarray) and checks.is_cut(self.length.dtype):
            object.__setattr__(self, "length", checks.clipped_to_int32(self.length))

    def visible(self, tile):
        return (tile.kv_position < _limit(self.length, tile)) | Causal().visible(tile)

    def bounds(self, tiling):
        length = _per_example(self.length)
        in_prefix = _at_most(tiling.kv_position, Span(length - 1, length - 1))
        return tuple(map(operator.or_, in_prefix, Causal().bounds(tiling)))

    def of_shard(self, shard):
        return self if isinstance(self.length, numbers.Number) else PrefixLM(shard.take(self.length))

    def check(self, batch, num_heads, q_length, kv_length):
        _check_per_example("PrefixLM length", self.length, batch)


@dataclass(frozen=True)
class Padding(Mask):
    """Every query attends to the first `lengths` keys of its sequence: index j < lengths.

    `lengths`, in keys, is one number for all sequences, or an int array with exactly q's batch axes. A length
    outside [0, Tk] is an error unless it is traced.

    >>> Padding(jnp.array([1, 3])).dense(1, 3).astype(int)[:, 0, 0]
    Array([[1, 0, 0],
           [1, 1, 1]], dtype=int32)
    """

    lengths: Integer[Array, "..."] | int

    def __post_init__(self):
        if isinstance(self.lengths, np.ndarray) and checks.is_cut(self.lengths.dtype):
            object.__setattr__(self, "lengths", checks.clipped_to_int32(self.lengths))

    def visible(self, tile):
        return tile.kv_index < _limit(self.lengths, tile)

    def bounds(self, tiling):
        lengths = _per_example(self.lengths)
        return _at_most(tiling.kv_index, Span(lengths - 1, lengths - 1))

    def of_shard(self, shard):
        return self if isinstance(self.lengths, numbers.Number) else Padding(shard.take(self.lengths))

    def check(self, batch, num_heads, q_length, kv_length):
        _check_per_example("Padding lengths", self.lengths, batch)
        checks.in_range("Padding lengths", self.lengths, kv_length + 1, remedy=checks.ORDER)


@dataclass(frozen=True)
class Segments(Mask):
    """A query attends to the keys whose id equals its own, so that one sequence can hold several documents.

    `q_ids` is an int array `[Tq]` or `[..., Tq]` with exactly q's batch axes; `kv_ids` is `[Tk]` or
    `[..., Tk]`, or None to use `q_ids`. Ids may be in any order; tiles can be skipped where equal ids are contiguous.

    >>> (Segments(jnp.array([0, 0, 1, 1])) & Causal()).dense(4, 4).astype(int)
    Array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [0, 0, 1, 0],
           [0, 0, 1, 1]], dtype=int32)
    """

    q_ids: Integer[Array, "... Tq"]
    kv_ids: Integer[Array, "... Tk"] | None = None

    def _ids(self):
        return self.q_ids, self.q_ids if self.kv_ids is None else self.kv_ids

    def visible(self, tile):
        q_ids, kv_ids = self._ids()
        return tile.of_queries(q_ids) == tile.of_keys(kv_ids)

    def bounds(self, tiling):
        q_ids, kv_ids = self._ids()
        (q_low, q_high), (kv_low, kv_high) = tiling.of_queries(q_ids), tiling.of_keys(kv_ids)
        any_visible = (q_low <= kv_high) & (kv_low <= q_high)
        return any_visible, (q_low == q_high) & (kv_low == kv_high) & (q_low == kv_low)

    def of_shard(self, shard):
        q_ids, kv_ids = self._ids()
        return Segments(shard.take(q_ids, "queries"), shard.take(kv_ids, "keys"))

    def check(self, batch, num_heads, q_length, kv_length):
        types = [jax.dtypes.canonicalize_dtype(ids.dtype) for ids in self._ids()]
        if checks.is_cut(np.promote_types(*types)):  # uint32 with int32: 2³² − 1 would equal −1
            raise ValueError(f"Segments q_ids has type {types[0]} and kv_ids {types[1]}: use one type for both")
        for name, ids, length in (("q_ids", self.q_ids, q_length), ("kv_ids", self._ids()[1], kv_length)):
            if np.shape(ids) not in ((length,), (*batch, length)):
                remedy = "pass kv_ids too" if self.kv_ids is None and q_length != kv_length else "one id per token"
                raise ValueError(
                    f"Segments {name} has shape {np.shape(ids)}, expected {(length,)} or {(*batch, length)}: {remedy}"
                )


@dataclass(frozen=True)
class BlockSparse(Mask):
    """A query attends to the keys of the blocks that are set: `blocks[i // size, j // size]` (Child et al. 2019).

    `blocks` is bool `[⌈Tq / size⌉, ⌈Tk / size⌉]` or `[..., H or 1, …, …]` with q's batch axes; i, j are indices.

    >>> BlockSparse(jnp.eye(2, dtype=bool), size=2).dense(4, 4).astype(int)
    Array([[1, 1, 0, 0],
           [1, 1, 0, 0],
           [0, 0, 1, 1],
           [0, 0, 1, 1]], dtype=int32)
    """

    blocks: Bool[Array, "..."]
    size: int

    def __post_init__(self):
        if not isinstance(self.size, numbers.Integral) or self.size < 1:
            raise ValueError(f"BlockSparse size = {self.size!r}: expected an integer, 1 or more")

    def visible(self, tile):
        return tile.of_blocks(self.blocks, self.size)

    def bounds(self, tiling):
        # set_before counts the set blocks above and left of each corner; four corners give the count within a tile.
        blocks = known(self.blocks)
        xp = np if isinstance(blocks, np.ndarray) else jnp
        set_before = xp.pad(blocks.astype(xp.int32), [(0, 0)] * (blocks.ndim - 2) + [(1, 0), (1, 0)])
        set_before = set_before.cumsum(axis=-2).cumsum(axis=-1)
        (top, bottom), (left, right) = ([x[0] // self.size for x in span] for span in (tiling.q_index, tiling.kv_index))
        bottom, right = bottom + 1, right + 1
        count = (set_before[..., bottom, right] - set_before[..., top, right]) - (
            set_before[..., bottom, left] - set_before[..., top, left]
        )
        return count > 0, count == (bottom - top) * (right - left)

    def of_shard(self, shard):
        sides = ("heads", "rows", "columns")[-self.blocks.ndim :]
        return BlockSparse(shard.take(self.blocks, *sides), self.size)

    def check(self, batch, num_heads, q_length, kv_length):
        if self.blocks.dtype != bool:
            raise ValueError(f"BlockSparse blocks has type {self.blocks.dtype}, expected bool: use blocks.astype(bool)")
        block_counts = (-(-q_length // self.size), -(-kv_length // self.size))
        allowed = [block_counts] + [(*batch, heads, *block_counts) for heads in (1, num_heads)]
        if np.shape(self.blocks) not in allowed:
            raise ValueError(
                f"BlockSparse blocks has shape {np.shape(self.blocks)}, expected exactly {_either(allowed)}: "
                f"one entry for each {self.size} × {self.size} block of {q_length} × {kv_length} scores"
            )


@dataclass(frozen=True, init=False)
class MaskFn(elementwise.Function, Mask):
    """Any rule: a query at position i attends to a key at position j where `fn(b, h, i, j, *arrays)` is true.

    The function is written for scalars: example b (counted through all batch axes), head h and positions; it returns
    a bool scalar and is vectorized over all pairs. `arrays` are passed to it unchanged; it may close over arrays too.

    >>> strided = MaskFn(lambda b, h, i, j, stride: (i - j) % stride[h] == 0, jnp.array([1, 2]))
    >>> (strided & Causal()).dense(3, 3, num_heads=2).astype(int)[1]
    Array([[1, 0, 0],
           [0, 1, 0],
           [1, 0, 1]], dtype=int32)
    """

    def visible(self, tile):
        coordinates = (tile.example, tile.head, tile.q_position, tile.kv_position)
        return tile.apply(self.fn, coordinates, self.arrays, jnp.bool_)

    def for_tiles(self, q_length, kv_length):
        fn, arrays = elementwise.without_closure(self.fn, (jnp.int32,) * 4, self.arrays)
        return MaskFn(fn, *arrays)


@dataclass(frozen=True)
class Dense(Mask):
    """A mask as an array: bool `[Tq, Tk]` or `[..., H or 1, Tq, Tk]` with q's batch axes; nothing else is broadcast.

    >>> Dense(jnp.eye(2, dtype=bool)).dense(2, 2).astype(int)
    Array([[1, 0],
           [0, 1]], dtype=int32)
    """

    array: Bool[Array, "..."]

    def visible(self, tile):
        return tile.of_pairs(self.array)

    def bounds(self, tiling):
        return tiling.of_pairs(self.array)

    def of_shard(self, shard):
        return Dense(shard.take(self.array, *("heads", "queries", "keys")[-self.array.ndim :]))

    def for_tiles(self, q_length, kv_length):
        return Dense(padded(padded(self.array, q_length, axis=-2), kv_length))

    def check(self, batch, num_heads, q_length, kv_length):
        shape = np.shape(self.array)
        if self.array.dtype != bool:
            raise ValueError(
                f"Dense mask has type {self.array.dtype}, expected bool: use array.astype(bool) if True means visible, "
                "or bias=array to add it to the scores"
            )
        allowed = [(q_length, kv_length)] + [(*batch, heads, q_length, kv_length) for heads in (1, num_heads)]
        if shape not in allowed:
            raise ValueError(
                f"Dense mask has shape {shape}, expected exactly {_either(allowed)}: "
                "give every axis (add the head axis with mask[..., None, :, :]); nothing is broadcast silently. "
                "For padding, use Padding(lengths), or Segments(ones, is_token.astype(int))"
            )


def join(*masks: Mask | Bool[Array, "..."] | None) -> Mask | None:
    """Join masks by `&`, skipping None; None if all are None. Arrays count as `Dense`; other types raise TypeError.

    >>> join(None, Causal(), None)
    Causal()
    """
    joined = None
    for mask in masks:
        if isinstance(mask, jax.Array | np.ndarray):
            mask = Dense(mask)
        if mask is not None:
            joined = require_mask(mask) if joined is None else joined & mask
    return joined


class Band(NamedTuple):
    """A mask in the form that kernels take: i − left ≤ j ≤ i + right (None for no bound) and equal segment ids."""

    left: int | None
    right: int | None
    segments: tuple[Segments, ...]


def as_band(mask: Mask | None) -> Band | None:
    """A conjunction of Causal, SlidingWindow and Segments as a band; None for any other mask."""
    match mask:
        case None:
            return Band(None, None, ())
        case Causal():
            return Band(None, 0, ())
        case SlidingWindow(left, right):
            return Band(left, right, ())
        case Segments():
            return Band(None, None, (mask,))
        case And(a, b):
            a, b = as_band(a), as_band(b)
            if a is None or b is None:
                return None
            left, right = (
                min((bound for bound in bounds if bound is not None), default=None)
                for bounds in ((a.left, b.left), (a.right, b.right))
            )
            return Band(left, right, a.segments + b.segments)
    return None


def _at_most(x: Span, y: Span):
    """Return (any_visible, all_visible) of the mask x ≤ y."""
    return x.low <= y.high, x.high <= y.low


def _limit(length, tile):
    """The limit as one number, or as int32 for each example of a tile."""
    return min(length, checks.POSITION_LIMIT) if isinstance(length, numbers.Number) else tile.of_examples(length)


def _per_example(lengths):
    """A number, or an int32 array `[..., 1, 1, 1]` that broadcasts against scores."""
    if isinstance(lengths, numbers.Number):
        return min(lengths, checks.POSITION_LIMIT)
    return checks.clipped_to_int32(known(lengths))[..., None, None, None]


def _check_per_example(name, value, batch):
    if np.shape(value) not in ((), batch):
        raise ValueError(
            f"{name} has shape {np.shape(value)}, expected () or q's batch axes {batch}: one for each sequence"
        )
    if not jnp.issubdtype(jnp.result_type(value), jnp.integer):
        raise ValueError(f"{name} has type {jnp.result_type(value)}, expected integers")


def _either(shapes) -> str:
    return " or ".join(map(str, dict.fromkeys(shapes)))
