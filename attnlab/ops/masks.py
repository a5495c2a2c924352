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
"""

import functools
import numbers
from dataclasses import dataclass, fields
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from attnlab.types import Array


class Tile(NamedTuple):
    """The coordinates of a rectangle of scores; all broadcast to `[..., H, Tq, Tk]`.

    Attributes:
      head: `[H, 1, 1]`, the query head.
      q_index, kv_index: `[Tq, 1]` and `[1, Tk]`, rows of q and of k.
      q_position, kv_position: `[..., 1, Tq, 1]` and `[..., 1, 1, Tk]`, places in the sequence.
      is_whole: whether it covers all rows and columns in their order, so that arrays can be taken as they are.
    """

    head: Int[Array, "..."]
    q_index: Int[Array, "..."]
    kv_index: Int[Array, "..."]
    q_position: Int[Array, "..."]
    kv_position: Int[Array, "..."]
    is_whole: bool = False


def whole(q_length: int, kv_length: int, num_heads: int = 1, q_positions=None, kv_positions=None, xp=jnp) -> Tile:
    """The tile that covers all of a `[..., H, Tq, Tk]` score array.

    `q_positions` `[Tq]` or `[..., Tq]` and `kv_positions` likewise are `arange` when absent. `xp` is the array
    module for what is not given: `numpy` keeps a static question out of the trace.
    """
    q_index, kv_index = xp.arange(q_length, dtype=xp.int32), xp.arange(kv_length, dtype=xp.int32)
    q_positions = q_index if q_positions is None else q_positions
    kv_positions = kv_index if kv_positions is None else kv_positions
    return Tile(
        head=xp.arange(num_heads)[:, None, None],
        q_index=q_index[:, None],
        kv_index=kv_index[None, :],
        q_position=q_positions[..., None, :, None],
        kv_position=kv_positions[..., None, None, :],
        is_whole=True,
    )


class _Leaf:
    def __repr__(self):
        return "<leaf>"


_LEAF = _Leaf()


def _static(value) -> bool:
    return value is None or callable(value) or isinstance(value, numbers.Number)


def _flatten(mask):
    values = [getattr(mask, field.name) for field in fields(mask)]
    static = tuple(value if _static(value) else _LEAF for value in values)
    return [value for value in values if not _static(value)], static


def _unflatten(cls, static, leaves):
    # Not through __init__: JAX also rebuilds pytrees around placeholders, which no check would let pass.
    mask, leaves = object.__new__(cls), iter(leaves)
    for field, value in zip(fields(cls), static):
        object.__setattr__(mask, field.name, next(leaves) if value is _LEAF else value)
    return mask


class Mask:
    """What every mask can do; subclasses are frozen dataclasses that define `visible`.

    Attributes:
      positional: whether the answer depends on positions, which must then be explicit when Tq ≠ Tk.
    """

    positional = False

    def __init_subclass__(cls):
        jax.tree_util.register_pytree_node(cls, _flatten, functools.partial(_unflatten, cls))

    def visible(self, tile: Tile) -> Bool[Array, "..."]:
        """Bool, broadcastable to `[..., H, Tq, Tk]`: may the tile's queries look at its keys?"""
        raise TypeError(f"{type(self).__name__} defines no visible(tile): write it in the subclass")

    def check(self, batch: tuple[int, ...], num_heads: int, q_length: int, kv_length: int) -> None:
        """Raises ValueError when the mask's arrays do not fit scores `[*batch, num_heads, q_length, kv_length]`."""

    def dense(self, q_length: int, kv_length: int, *, q_positions=None, kv_positions=None) -> Bool[Array, "..."]:
        """Draws the mask.

        Args:
          q_length, kv_length: Tq and Tk, rows and columns of the drawing.
          q_positions, kv_positions: `[Tq]` or `[..., Tq]`, `[Tk]` or `[..., Tk]`; `arange` when absent.

        Returns:
          bool `[Tq, Tk]`, with the leading axes that the mask's arrays bring.

        Raises:
          ValueError: positions matter, Tq ≠ Tk, and none are given.
        """
        require_positions(self, q_length, kv_length, q_positions, kv_positions)
        tile = whole(q_length, kv_length, 1, q_positions, kv_positions)
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
    """A query sees its own position and those before it: j ≤ i.

    >>> Causal().dense(3, 3).astype(int)
    Array([[1, 0, 0],
           [1, 1, 0],
           [1, 1, 1]], dtype=int32)
    """

    positional = True

    def visible(self, tile):
        return tile.kv_position <= tile.q_position


@dataclass(frozen=True)
class SlidingWindow(Mask):
    """A query sees `left` positions before it, `right` after it, and itself: i − left ≤ j ≤ i + right.

    With w = left + right + 1 neighbours attention costs O(w·n·d) (restricted self-attention, Vaswani et al. 2017,
    section 4).

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
        return (distance >= -self.left) & (distance <= self.right)


@dataclass(frozen=True)
class Padding(Mask):
    """A query sees the first `lengths` keys of its row: index j < lengths.

    `lengths` is an int array with exactly q's batch axes, or one number for all.

    >>> Padding(jnp.array([1, 3])).dense(1, 3).astype(int)[:, 0, 0]
    Array([[1, 0, 0],
           [1, 1, 1]], dtype=int32)
    """

    lengths: Int[Array, "..."] | int

    def visible(self, tile):
        return tile.kv_index < (self.lengths if _static(self.lengths) else self.lengths[..., None, None, None])

    def check(self, batch, num_heads, q_length, kv_length):
        shape = np.shape(self.lengths)
        if shape not in ((), batch):
            raise ValueError(
                f"Padding lengths have shape {shape}, expected () or q's batch axes {batch}: give one length a row"
            )


@dataclass(frozen=True)
class Dense(Mask):
    """Any mask, written out: bool `[Tq, Tk]` or `[..., H or 1, Tq, Tk]` with q's batch axes.

    >>> Dense(jnp.eye(2, dtype=bool)).dense(2, 2).astype(int)
    Array([[1, 0],
           [0, 1]], dtype=int32)
    """

    array: Bool[Array, "..."]

    def visible(self, tile):
        return self.array if tile.is_whole else self.array[..., tile.q_index, tile.kv_index]

    def check(self, batch, num_heads, q_length, kv_length):
        shape = np.shape(self.array)
        if self.array.dtype != bool:
            raise ValueError(
                f"Dense mask has type {self.array.dtype}, expected bool: use array.astype(bool) where True means seen, "
                "or bias=array where it is to be added to the scores"
            )
        allowed = [(q_length, kv_length)] + [(*batch, heads, q_length, kv_length) for heads in (1, num_heads)]
        if shape not in allowed:
            expected = " or ".join(map(str, dict.fromkeys(allowed)))
            raise ValueError(
                f"Dense mask has shape {shape}, expected exactly {expected}: "
                "name every axis (add the head axis with mask[..., None, :, :]); nothing is broadcast silently"
            )


@dataclass(frozen=True)
class _Joint(Mask):
    a: Mask
    b: Mask

    @property
    def positional(self):
        return self.a.positional or self.b.positional

    def check(self, *shape):
        self.a.check(*shape)
        self.b.check(*shape)


@dataclass(frozen=True)
class And(_Joint):
    """Visible where both are: `a & b`."""

    def visible(self, tile):
        return self.a.visible(tile) & self.b.visible(tile)


@dataclass(frozen=True)
class Or(_Joint):
    """Visible where either is: `a | b`."""

    def visible(self, tile):
        return self.a.visible(tile) | self.b.visible(tile)


@dataclass(frozen=True)
class Not(Mask):
    """Visible where `a` is not: `~a`."""

    a: Mask

    @property
    def positional(self):
        return self.a.positional

    def visible(self, tile):
        return ~self.a.visible(tile)

    def check(self, *shape):
        self.a.check(*shape)


def join(*masks: Mask | None) -> Mask | None:
    """The conjunction of the masks that are not None; None when there are none.

    >>> join(None, Causal(), None)
    Causal()
    """
    joined = None
    for mask in masks:
        if mask is not None:
            joined = _mask(mask) if joined is None else joined & mask
    return joined


def _mask(mask) -> Mask:
    if isinstance(mask, Mask):
        return mask
    raise TypeError(f"{type(mask).__name__} is no mask: wrap a bool array as masks.Dense(array)")
