"""Masks: who may look at whom.

A mask says for every query i and key j whether i sees j. Masks are pytrees: arrays in them are leaves,
Python numbers are static, so a mask passes through `jit`, `vmap`, `grad` and `scan`. They join by `&`, `|`, `~`:

>>> (Causal() & SlidingWindow(left=1)).dense(4, 4).astype(int)
Array([[1, 0, 0, 0],
       [1, 1, 0, 0],
       [0, 1, 1, 0],
       [0, 0, 1, 1]], dtype=int32)

An *index* is a row of an array; a *position* is that row's place in its sequence. `Causal` and `SlidingWindow`
compare positions, `Padding` and `Dense` look at indices.

A mask answers two questions: which pairs of a tile are visible, and, for a whole tiling at once, in which tiles any
pair may be (`some`) and in which all must be (`all`). The second is interval arithmetic on the smallest and the
largest coordinates of each tile; it may err on the safe side and lets a backend skip tiles or comparisons:

>>> some, all_ = Causal().tiles(6, 6, block_sizes=(2, 2))
>>> some[0, 0].astype(int) + all_[0, 0]
array([[1, 0, 0],
       [2, 1, 0],
       [2, 2, 1]])
"""

import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Integer

from attnlab.ops import elementwise
from attnlab.ops.nodes import Node, is_static
from attnlab.ops.tiles import Span, Tile, Tiling, blocked, known, padded, whole
from attnlab.types import Array


class Mask(Node):
    """What every mask can do; subclasses are frozen dataclasses that define `visible`.

    Attributes:
      positional: whether the answer depends on positions, which must then be explicit when Tq ≠ Tk.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Even(Mask):
    ...     def visible(self, tile):
    ...         return tile.kv_index % 2 == 0
    >>> (Even() & Causal()).dense(3, 3).astype(int)
    Array([[1, 0, 0],
           [1, 0, 0],
           [1, 0, 1]], dtype=int32)
    """

    positional = False

    def visible(self, tile: Tile) -> Bool[Array, "..."]:
        """May these queries see those keys?

        Args:
          tile: coordinates, each broadcastable to the scores `[..., H, queries, keys]` (the last two axes may be
            swapped): `example`, `head`, `q_position`, `kv_position`, `q_index`, `kv_index`.

        Returns:
          bool, broadcastable to the scores, elementwise in the coordinates.
        """
        raise TypeError(f"{type(self).__name__} defines no visible(tile): write it in the subclass")

    def bounds(self, tiling: Tiling) -> tuple[Bool[Array, "..."], Bool[Array, "..."]]:
        """(some, all), broadcastable to `[..., H, nQ, nK]`: may any pair of a tile be visible, must all be?

        As it stands here it draws the mask, one row of tiles after another; intervals answer faster. `tiling` has
        `q_position`, `kv_position`, `q_index` and `kv_index`, each a pair: the lowest and the highest of every tile.

        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class First(Mask):
        ...     def visible(self, tile):
        ...         return tile.kv_index == 0
        ...
        ...     def bounds(self, tiling):
        ...         lowest, highest = tiling.kv_index
        ...         return lowest == 0, highest == 0
        >>> First().tiles(1, 4, block_sizes=(1, 2))
        (array([[[[ True, False]]]]), array([[[[False, False]]]]))
        """

        def row(i):
            seen = self.visible(tiling.row(i))
            seen = jnp.broadcast_to(seen, jnp.broadcast_shapes(seen.shape, (tiling.block_sizes[0], kv_length)))
            by_tile = blocked(seen, tiling.block_sizes[1])
            return by_tile.any(axis=(-3, -1)), by_tile.all(axis=(-3, -1))

        kv_length = len(tiling.covers.keys.index)
        some, every = jax.lax.map(row, jnp.arange(tiling.shape[0]))
        return jnp.moveaxis(some, 0, -2), jnp.moveaxis(every, 0, -2)

    def tiles(
        self,
        q_length: int,
        kv_length: int,
        block_sizes: tuple[int, int],
        *,
        q_positions=None,
        kv_positions=None,
        num_heads: int = 1,
        batch: tuple[int, ...] = (),
    ) -> tuple[Bool[Array, "..."], Bool[Array, "..."]]:
        """For every tile: may any pair be visible, must all be?

        Args:
          q_length, kv_length, q_positions, kv_positions, num_heads, batch: as in `dense`.
          block_sizes: queries and keys of a tile; the last ones may be ragged.

        Returns:
          (some, all), bool `[B or 1, H or 1, nQ, nK]`, with all of q's batch axes in the place of B. NumPy arrays
          when everything is known while tracing.

        Raises:
          ValueError: positions matter, Tq ≠ Tk, and none are given; a block size below 1.

        >>> SlidingWindow(left=1).tiles(4, 4, block_sizes=(2, 2))[0].astype(int)[0, 0]
        array([[1, 0],
               [1, 1]])
        """
        require_positions(self, q_length, kv_length, q_positions, kv_positions)
        if min(block_sizes) < 1:
            raise ValueError(f"block_sizes = {block_sizes}: expected sizes of 1 or more")
        covers = whole(q_length, kv_length, num_heads, q_positions, kv_positions, batch, xp=np)
        tiling = Tiling(covers, block_sizes)
        mask = self.for_tiles(q_length, kv_length)
        values = (*jax.tree.leaves(mask), q_positions, kv_positions)
        if any(isinstance(value, jax.core.Tracer) for value in values):
            some_and_all = mask.bounds(tiling)
        else:
            with jax.ensure_compile_time_eval():
                some_and_all = [known(x) for x in mask.bounds(tiling)]
        rank = max(4, *(x.ndim for x in some_and_all))
        xp = np if all(isinstance(x, np.ndarray) for x in some_and_all) else jnp
        some, every = (xp.asarray(x).reshape((1,) * (rank - x.ndim) + x.shape) for x in some_and_all)
        return tuple(xp.broadcast_to(x, (*x.shape[:-2], *tiling.shape)) for x in (some, every))

    def for_tiles(self, q_length: int, kv_length: int) -> "Mask":
        """The same mask, ready to be asked tile by tile from within a loop and a derivative rule.

        Functions close over nothing: what they closed over has become leaves. And large arrays reach to `q_length` and
        `kv_length`, the ends of the last tiles, so that their parts are slices.

        >>> Dense(jnp.ones((3, 3), bool)).for_tiles(4, 6).array.shape
        (4, 6)
        """
        return self

    def check(self, batch: tuple[int, ...], num_heads: int, q_length: int, kv_length: int) -> None:
        """Raises ValueError when the mask's arrays do not fit scores `[*batch, num_heads, q_length, kv_length]`.

        >>> Padding(jnp.array([3, 4])).check(batch=(3,), num_heads=1, q_length=5, kv_length=5)
        Traceback (most recent call last):
        ValueError: Padding lengths of shape (2,): expected () or q's batch axes (3,), one a row
        """

    def dense(
        self,
        q_length: int,
        kv_length: int,
        *,
        q_positions=None,
        kv_positions=None,
        num_heads: int = 1,
        batch: tuple[int, ...] = (),
    ) -> Bool[Array, "..."]:
        """Draws the mask.

        Args:
          q_length, kv_length: Tq and Tk, rows and columns of the drawing.
          q_positions, kv_positions: `[Tq]` or `[..., Tq]`, `[Tk]` or `[..., Tk]`; `arange` when absent.
          num_heads, batch: H and q's batch axes, for a mask that asks for the head or the example.

        Returns:
          bool `[Tq, Tk]`, with the leading axes that the mask's arrays bring, those of size 1 left out.

        Raises:
          ValueError: positions matter, Tq ≠ Tk, and none are given.

        >>> Causal().dense(1, 4, q_positions=jnp.array([2]), kv_positions=jnp.arange(4)).astype(int)
        Array([[1, 1, 1, 0]], dtype=int32)
        """
        require_positions(self, q_length, kv_length, q_positions, kv_positions)
        tile = whole(q_length, kv_length, num_heads, q_positions, kv_positions, batch)
        seen = self.visible(tile)
        seen = jnp.broadcast_to(seen, jnp.broadcast_shapes(seen.shape, (q_length, kv_length)))
        while seen.ndim > 2 and seen.shape[0] == 1:
            seen = seen[0]
        return seen

    def __and__(self, other: "Mask") -> "Mask":
        return And(self, _mask(other))

    def __or__(self, other: "Mask") -> "Mask":
        return Or(self, _mask(other))

    def __invert__(self) -> "Mask":
        return Not(self)


def require_positions(mask, q_length, kv_length, q_positions, kv_positions, what="mask") -> None:
    """Raises ValueError when `mask` compares positions that nobody gave and that cannot be guessed (Tq ≠ Tk)."""
    if not mask.positional or q_length == kv_length or (q_positions is not None and kv_positions is not None):
        return
    missing = " and ".join(
        name for name, given in (("q_positions", q_positions), ("kv_positions", kv_positions)) if given is None
    )
    raise ValueError(
        f"{what} {type(mask).__name__} compares positions, but Tq = {q_length} and Tk = {kv_length} differ: "
        f"pass {missing} (for decoding, q_positions = length + arange(Tq))"
    )


@dataclass(frozen=True)
class Causal(Mask):
    """A query sees its own position and those before it: j ≤ i (Vaswani et al. 2017, section 3.2.3).

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
    """A query sees `left` positions before it, `right` after it, and itself: i − left ≤ j ≤ i + right.

    With w = left + right + 1 neighbours attention costs O(w·n·d) (restricted self-attention, Vaswani et al. 2017,
    section 4). Both are whole numbers of positions; below 0 they are a ValueError.

    >>> SlidingWindow(left=1, right=1).dense(4, 4).sum(axis=-1)
    Array([2, 3, 3, 2], dtype=int32)
    """

    left: int
    right: int = 0
    positional = True

    def __post_init__(self):
        for name, size in (("left", self.left), ("right", self.right)):
            if not isinstance(size, numbers.Integral) or size < 0:
                raise ValueError(f"SlidingWindow {name} = {size!r}: expected a whole number of positions, 0 or more")

    def visible(self, tile):
        distance = tile.kv_position - tile.q_position
        return (distance >= -min(self.left, _MOST)) & (distance <= min(self.right, _MOST))

    def bounds(self, tiling):
        (q_low, q_high), (kv_low, kv_high) = tiling.q_position, tiling.kv_position
        nearest, farthest = kv_low - q_high, kv_high - q_low  # of kv − q, the most negative and the most positive
        some = (farthest >= -self.left) & (nearest <= self.right)
        return some, (nearest >= -self.left) & (farthest <= self.right)


@dataclass(frozen=True)
class PrefixLM(Mask):
    """A query sees a prefix of its sequence whole, and the rest causally: j < length or j ≤ i (Raffel et al. 2020).

    `length`, in positions, is an int array with exactly q's batch axes, or one number for all; anything else is a
    ValueError of `attention`.

    >>> PrefixLM(2).dense(3, 3).astype(int)
    Array([[1, 1, 0],
           [1, 1, 0],
           [1, 1, 1]], dtype=int32)
    """

    length: Integer[Array, "..."] | int
    positional = True

    def visible(self, tile):
        return (tile.kv_position < _per_example(self.length)) | Causal().visible(tile)

    def bounds(self, tiling):
        length = _per_example(self.length)
        return Or._of(_at_most(tiling.kv_position, Span(length - 1, length - 1)), Causal().bounds(tiling))

    def check(self, batch, num_heads, q_length, kv_length):
        _check_per_example("PrefixLM length", self.length, batch)


@dataclass(frozen=True)
class Padding(Mask):
    """A query sees the first `lengths` keys of its row: index j < lengths.

    `lengths`, in keys, is an int array with exactly q's batch axes, or one number for all; anything else is a
    ValueError of `attention`.

    >>> Padding(jnp.array([1, 3])).dense(1, 3).astype(int)[:, 0, 0]
    Array([[1, 0, 0],
           [1, 1, 1]], dtype=int32)
    """

    lengths: Integer[Array, "..."] | int

    def visible(self, tile):
        return tile.kv_index < _per_example(self.lengths)

    def bounds(self, tiling):
        lengths = _per_example(self.lengths)
        return _at_most(tiling.kv_index, Span(lengths - 1, lengths - 1))

    def check(self, batch, num_heads, q_length, kv_length):
        _check_per_example("Padding lengths", self.lengths, batch)


@dataclass(frozen=True)
class Segments(Mask):
    """A query sees the keys of its own segment: ids equal. Packs several documents into one row.

    `q_ids` is an int array `[Tq]` or `[..., Tq]` with exactly q's batch axes, `kv_ids` likewise for the keys; None
    when they are those of the queries. Ids in any order; neighbours with equal ids make tiles that can be skipped.
    Another shape is a ValueError of `attention`.

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
        some = (q_low <= kv_high) & (kv_low <= q_high)
        return some, (q_low == q_high) & (kv_low == kv_high) & (q_low == kv_low)

    def check(self, batch, num_heads, q_length, kv_length):
        for name, ids, length in (("q_ids", self.q_ids, q_length), ("kv_ids", self._ids()[1], kv_length)):
            if np.shape(ids) not in ((length,), (*batch, length)):
                remedy = "give kv_ids too" if self.kv_ids is None and q_length != kv_length else "one id a row"
                raise ValueError(
                    f"Segments {name} have shape {np.shape(ids)}, expected {(length,)} or {(*batch, length)}: {remedy}"
                )


@dataclass(frozen=True)
class BlockSparse(Mask):
    """A query sees the keys of the blocks that are set: `blocks[i // size, j // size]` (Child et al. 2019).

    `blocks` is bool `[ceil(Tq / size), ceil(Tk / size)]` or `[..., H or 1, …, …]` with q's batch axes, by index;
    another shape or type is a ValueError of `attention`, a size below 1 one at once.

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
            raise ValueError(f"BlockSparse size = {self.size!r}: expected a whole number of rows, 1 or more")

    def visible(self, tile):
        blocks = jnp.asarray(self.blocks)
        rows, columns = tile.q_index[0] // self.size, tile.kv_index[0] // self.size  # without their head axis
        return blocks[..., rows, columns]

    def bounds(self, tiling):
        # How many blocks are set above and left of each corner; four corners count the blocks that a tile touches.
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

    def check(self, batch, num_heads, q_length, kv_length):
        if self.blocks.dtype != bool:
            raise ValueError(
                f"BlockSparse blocks have type {self.blocks.dtype}, expected bool: use blocks.astype(bool)"
            )
        cut = (-(-q_length // self.size), -(-kv_length // self.size))
        allowed = [cut] + [(*batch, heads, *cut) for heads in (1, num_heads)]
        if np.shape(self.blocks) not in allowed:
            raise ValueError(
                f"BlockSparse blocks have shape {np.shape(self.blocks)}, expected exactly {_either(allowed)}: "
                f"one entry for every {self.size} × {self.size} block of {q_length} × {kv_length} scores"
            )


@dataclass(frozen=True, init=False)
class MaskFn(Mask):
    """Any rule: query at position i sees key at position j where `fn(b, h, i, j, *arrays)`.

    The function is called with scalars, example b (counted through all batch axes), head h and positions, and is
    applied to all pairs at once; `arrays` come to it whole. It may close over arrays as well. One that takes other
    arguments, or returns no bool scalar, is a ValueError of `attention`.

    >>> strided = MaskFn(lambda b, h, i, j, stride: (i - j) % stride[h] == 0, jnp.array([1, 2]))
    >>> (strided & Causal()).dense(3, 3, num_heads=2).astype(int)[1]
    Array([[1, 0, 0],
           [0, 1, 0],
           [1, 0, 1]], dtype=int32)
    """

    fn: Callable
    arrays: tuple[Array, ...]
    positional = True

    def __init__(self, fn, *arrays):
        object.__setattr__(self, "fn", fn)
        object.__setattr__(self, "arrays", arrays)

    def visible(self, tile):
        coordinates = (tile.example, tile.head, tile.q_position, tile.kv_position)
        return elementwise.apply(self.fn, coordinates, self.arrays, jnp.bool_)

    def for_tiles(self, q_length, kv_length):
        fn, arrays = elementwise.opened(self.fn, (jnp.int32,) * 4, self.arrays)
        return MaskFn(fn, *arrays)


@dataclass(frozen=True)
class Dense(Mask):
    """Any mask, written out: bool `[Tq, Tk]` or `[..., H or 1, Tq, Tk]` with q's batch axes.

    Another shape or type is a ValueError of `attention`; nothing is broadcast silently.

    >>> Dense(jnp.eye(2, dtype=bool)).dense(2, 2).astype(int)
    Array([[1, 0],
           [0, 1]], dtype=int32)
    """

    array: Bool[Array, "..."]

    def visible(self, tile):
        return tile.of_pairs(self.array)

    def bounds(self, tiling):
        return tiling.of_pairs(self.array)

    def for_tiles(self, q_length, kv_length):
        return Dense(padded(padded(self.array, q_length, axis=-2), kv_length))

    def check(self, batch, num_heads, q_length, kv_length):
        shape = np.shape(self.array)
        if self.array.dtype != bool:
            raise ValueError(
                f"Dense mask has type {self.array.dtype}, expected bool: use array.astype(bool) where True means seen, "
                "or bias=array where it is to be added to the scores"
            )
        allowed = [(q_length, kv_length)] + [(*batch, heads, q_length, kv_length) for heads in (1, num_heads)]
        if shape not in allowed:
            raise ValueError(
                f"Dense mask has shape {shape}, expected exactly {_either(allowed)}: "
                "name every axis (add the head axis with mask[..., None, :, :]); nothing is broadcast silently"
            )


@dataclass(frozen=True)
class _Joint(Mask):
    a: Mask
    b: Mask

    @property
    def positional(self):
        return self.a.positional or self.b.positional

    def bounds(self, tiling):
        return self._of(self.a.bounds(tiling), self.b.bounds(tiling))

    def check(self, *shape):
        self.a.check(*shape)
        self.b.check(*shape)

    def for_tiles(self, *lengths):
        return type(self)(self.a.for_tiles(*lengths), self.b.for_tiles(*lengths))


@dataclass(frozen=True)
class And(_Joint):
    """Visible where both are: `a & b`.

    >>> (Causal() & Padding(2)).dense(3, 3).astype(int)
    Array([[1, 0, 0],
           [1, 1, 0],
           [1, 1, 0]], dtype=int32)
    """

    def visible(self, tile):
        return self.a.visible(tile) & self.b.visible(tile)

    @staticmethod
    def _of(a, b):
        """(some, all) of two masks joined."""
        return a[0] & b[0], a[1] & b[1]


@dataclass(frozen=True)
class Or(_Joint):
    """Visible where either is: `a | b`.

    >>> (Causal() | Padding(2)).dense(3, 3).astype(int)
    Array([[1, 1, 0],
           [1, 1, 0],
           [1, 1, 1]], dtype=int32)
    """

    def visible(self, tile):
        return self.a.visible(tile) | self.b.visible(tile)

    @staticmethod
    def _of(a, b):
        """(some, all) of two masks joined."""
        return a[0] | b[0], a[1] | b[1]


@dataclass(frozen=True)
class Not(Mask):
    """Visible where `a` is not: `~a`.

    >>> (~Causal()).dense(3, 3).astype(int)
    Array([[0, 1, 1],
           [0, 0, 1],
           [0, 0, 0]], dtype=int32)
    """

    a: Mask

    @property
    def positional(self):
        return self.a.positional

    def visible(self, tile):
        return ~self.a.visible(tile)

    def bounds(self, tiling):
        some, every = self.a.bounds(tiling)
        return ~every, ~some

    def check(self, *shape):
        self.a.check(*shape)

    def for_tiles(self, *lengths):
        return Not(self.a.for_tiles(*lengths))


def join(*masks: Mask | None) -> Mask | None:
    """The conjunction of the masks that are not None; None when there are none.

    Raises:
      TypeError: something is no mask.

    >>> join(None, Causal(), None)
    Causal()
    """
    joined = None
    for mask in masks:
        if mask is not None:
            joined = _mask(mask) if joined is None else joined & mask
    return joined


class Band(NamedTuple):
    """A mask as kernels know it: i − left ≤ j ≤ i + right, None for no bound, and the same segment."""

    left: int | None
    right: int | None
    segments: tuple[Segments, ...]


def as_band(mask: Mask | None) -> Band | None:
    """A conjunction of Causal, SlidingWindow and Segments as a band; None for a mask that is something else.

    >>> as_band(Causal() & SlidingWindow(3, 3))
    Band(left=3, right=0, segments=())
    """
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


_MOST = 2**30  # beyond any position, and half of what an int32 holds


def _at_most(x: Span, y: Span):
    """(some, all) of x ≤ y."""
    return x.low <= y.high, x.high <= y.low


def _per_example(value):
    """A number, or an array with q's batch axes laid out like scores."""
    return min(value, _MOST) if is_static(value) else known(value)[..., None, None, None].astype(np.int32)


def _check_per_example(what, value, batch):
    if np.shape(value) not in ((), batch):
        raise ValueError(f"{what} of shape {np.shape(value)}: expected () or q's batch axes {batch}, one a row")
    if not jnp.issubdtype(jnp.result_type(value), jnp.integer):
        raise ValueError(f"{what} of type {jnp.result_type(value)}: expected whole numbers")


def _either(shapes) -> str:
    return " or ".join(map(str, dict.fromkeys(shapes)))


def _mask(mask) -> Mask:
    if isinstance(mask, Mask):
        return mask
    raise TypeError(f"{type(mask).__name__} is no mask: wrap a bool array as masks.Dense(array)")
