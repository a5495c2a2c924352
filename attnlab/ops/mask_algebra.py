"""The base class of masks, and their composition with `&`, `|` and `~`."""

import operator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from attnlab.ops.nodes import Node
from attnlab.ops.tiles import WHOLE, Shard, Tile, Tiling, blocked, known, whole
from attnlab.types import Array


class Mask(Node):
    """Base class of masks; subclasses are frozen dataclasses that define `visible`.

    Attributes:
      positional: whether the mask depends on positions, which must then be explicit when Tq ≠ Tk.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class First(Mask):
    ...     def visible(self, tile):
    ...         return tile.kv_index == 0
    ...
    ...     def bounds(self, tiling):  # may be left out
    ...         lowest, highest = tiling.kv_index
    ...         return lowest == 0, highest == 0
    >>> (First() & Causal()).dense(2, 2).astype(int)
    Array([[1, 0],
           [1, 0]], dtype=int32)
    >>> First().tiles(1, 4, block_sizes=(1, 2))
    (array([[[[ True, False]]]]), array([[[[False, False]]]]))
    """

    positional = False

    def visible(self, tile: Tile) -> Bool[Array, "..."]:
        """Return which keys each query may attend to.

        Args:
          tile: coordinates, each broadcastable to the scores `[..., H, queries, keys]` (the last two axes may be
            swapped): `example`, `head`, `q_position`, `kv_position`, `q_index`, `kv_index`.

        Returns:
          bool, broadcastable to the scores, elementwise in the coordinates.
        """
        raise TypeError(f"{type(self).__name__} defines no visible(tile): write it in the subclass")

    def bounds(self, tiling: Tiling) -> tuple[Bool[Array, "..."], Bool[Array, "..."]]:
        """Return (any_visible, all_visible) for every tile, broadcastable to `[..., H, nQ, nK]`.

        `any_visible` may be true for a tile without a visible pair, and `all_visible` false for a fully visible tile;
        the reverse is a bug. This default evaluates the whole mask, one row of tiles at a time; it is faster to compute
        bounds from the coordinates of `tiling`: `q_position`, `kv_position`, `q_index` and `kv_index` are pairs of the
        lowest and the highest coordinate of every tile.
        """

        def row(i):
            visible = self.visible(tiling.row(i))
            shape = jnp.broadcast_shapes(visible.shape, (tiling.block_sizes[0], kv_length))
            by_tile = blocked(jnp.broadcast_to(visible, shape), tiling.block_sizes[1])
            return by_tile.any(axis=(-3, -1)), by_tile.all(axis=(-3, -1))

        kv_length = len(tiling.covers.keys.index)
        any_visible, all_visible = jax.lax.map(row, jnp.arange(tiling.shape[0]))
        return jnp.moveaxis(any_visible, 0, -2), jnp.moveaxis(all_visible, 0, -2)

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
        shard: Shard = WHOLE,
    ) -> tuple[Bool[Array, "..."], Bool[Array, "..."]]:
        """Return, for each tile, whether any pair may be visible and whether all must be.

        Takes the arguments of `dense`; `block_sizes` is (queries, keys) of a tile, and the last tiles may be ragged.
        For a `shard` of a call, `self` must be the result of `of_shard(shard)`.

        Returns:
          (any_visible, all_visible), bool `[*batch or 1s, H or 1, nQ, nK]`; NumPy arrays when known at trace time.

        Raises:
          ValueError: Tq ≠ Tk without the positions that the mask compares; a block size below 1.

        >>> SlidingWindow(left=1).tiles(4, 4, block_sizes=(2, 2))[0].astype(int)[0, 0]
        array([[1, 0],
               [1, 1]])
        """
        require_positions(self, q_length, kv_length, q_positions, kv_positions)
        if min(block_sizes) < 1:
            raise ValueError(f"block_sizes = {block_sizes}: expected sizes of 1 or more")
        covers = whole(q_length, kv_length, num_heads, q_positions, kv_positions, batch, xp=np, shard=shard)
        tiling = Tiling(covers, block_sizes)
        mask = self.for_tiles(q_length, kv_length)
        values = (*jax.tree.leaves((mask, q_positions, kv_positions, shard)), covers.example)
        if any(isinstance(value, jax.core.Tracer) for value in values):
            bounds = mask.bounds(tiling)
        else:
            with jax.ensure_compile_time_eval():
                bounds = [known(x) for x in mask.bounds(tiling)]
        rank = max(4, *(x.ndim for x in bounds))
        xp = np if all(isinstance(x, np.ndarray) for x in bounds) else jnp
        bounds = (xp.asarray(x).reshape((1,) * (rank - x.ndim) + x.shape) for x in bounds)
        return tuple(xp.broadcast_to(x, (*x.shape[:-2], *tiling.shape)) for x in bounds)

    def for_tiles(self, q_length: int, kv_length: int) -> "Mask":
        """The same mask for evaluation tile by tile inside a loop and a derivative rule.

        Arrays that its functions close over become leaves if any is traced. Arrays of all pairs are padded to
        `q_length` and `kv_length`, the ends of the last tiles, so that each tile is a slice of them.
        """
        return self

    def of_shard(self, shard: Shard) -> "Mask":
        """The same mask for a part of a call, e.g. of a call that `attnlab.context_parallel` splits over devices.

        Subclasses whose arrays have axes for examples or heads override it. Subclasses that use only coordinates, or
        read their arrays through `tile.of_queries`, `of_keys` or `of_pairs`, need not.
        """
        return self

    def check(self, batch: tuple[int, ...], num_heads: int, q_length: int, kv_length: int) -> None:
        """Raise ValueError when the mask's arrays do not fit scores `[*batch, num_heads, q_length, kv_length]`."""

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
        """The mask as an array: True where a query may attend to a key.

        Args:
          q_length, kv_length: Tq and Tk.
          q_positions, kv_positions: `[Tq]` or `[..., Tq]`, `[Tk]` or `[..., Tk]`; `arange` when absent.
          num_heads, batch: H and q's batch axes, for a mask that depends on the head or the example.

        Returns:
          bool `[..., Tq, Tk]` with the leading axes of the mask's arrays, but without leading axes of size 1.

        Raises:
          ValueError: Tq ≠ Tk without the positions that the mask compares.

        >>> Causal().dense(1, 4, q_positions=jnp.array([2]), kv_positions=jnp.arange(4)).astype(int)
        Array([[1, 1, 1, 0]], dtype=int32)
        """
        require_positions(self, q_length, kv_length, q_positions, kv_positions)
        visible = self.visible(whole(q_length, kv_length, num_heads, q_positions, kv_positions, batch))
        visible = jnp.broadcast_to(visible, jnp.broadcast_shapes(visible.shape, (q_length, kv_length)))
        while visible.ndim > 2 and visible.shape[0] == 1:
            visible = visible[0]
        return visible

    def __and__(self, other: "Mask") -> "Mask":
        return And(self, require_mask(other))

    def __or__(self, other: "Mask") -> "Mask":
        return Or(self, require_mask(other))

    def __invert__(self) -> "Mask":
        return Not(self)

    def __bool__(self):
        raise TypeError(
            f"{type(self).__name__} has no truth value: combine masks with &, | and ~, not with and, or and not; "
            "test for a missing mask with `is None`"
        )


def require_positions(mask, q_length, kv_length, q_positions, kv_positions, what="mask") -> None:
    """Raise ValueError when `mask` compares positions that are missing and have no default (Tq ≠ Tk)."""
    if not mask.positional or q_length == kv_length or (q_positions is not None and kv_positions is not None):
        return
    missing = " and ".join(
        name for name, positions in (("q_positions", q_positions), ("kv_positions", kv_positions)) if positions is None
    )
    raise ValueError(
        f"{what} {type(mask).__name__} compares positions, but Tq = {q_length} and Tk = {kv_length} differ: "
        f"pass {missing} (for decoding, q_positions = length + arange(Tq))"
    )


@dataclass(frozen=True)
class _Binary(Mask):
    a: Mask
    b: Mask

    @property
    def positional(self):
        return self.a.positional or self.b.positional

    def visible(self, tile):
        return self._combine(self.a.visible(tile), self.b.visible(tile))

    def bounds(self, tiling):
        return tuple(map(self._combine, self.a.bounds(tiling), self.b.bounds(tiling)))

    def check(self, *shape):
        self.a.check(*shape)
        self.b.check(*shape)

    def for_tiles(self, *lengths):
        return type(self)(self.a.for_tiles(*lengths), self.b.for_tiles(*lengths))

    def of_shard(self, shard):
        return type(self)(self.a.of_shard(shard), self.b.of_shard(shard))


@dataclass(frozen=True)
class And(_Binary):
    """Visible where both masks are: `a & b`.

    >>> (Causal() & Padding(2)).dense(3, 3).astype(int)
    Array([[1, 0, 0],
           [1, 1, 0],
           [1, 1, 0]], dtype=int32)
    """

    _combine = staticmethod(operator.and_)


@dataclass(frozen=True)
class Or(_Binary):
    """Visible where either mask is: `a | b`.

    >>> (Causal() | Padding(2)).dense(3, 3).astype(int)
    Array([[1, 1, 0],
           [1, 1, 0],
           [1, 1, 1]], dtype=int32)
    """

    _combine = staticmethod(operator.or_)


@dataclass(frozen=True)
class Not(Mask):
    """Visible where the mask is not: `~a`.

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
        any_visible, all_visible = self.a.bounds(tiling)
        return ~all_visible, ~any_visible

    def check(self, *shape):
        self.a.check(*shape)

    def for_tiles(self, *lengths):
        return Not(self.a.for_tiles(*lengths))

    def of_shard(self, shard):
        return Not(self.a.of_shard(shard))


def require_mask(mask) -> Mask:
    if isinstance(mask, Mask):
        return mask
    raise TypeError(f"{type(mask).__name__} is not a mask: wrap a bool array as masks.Dense(array)")


def conjuncts(mask: Mask | None) -> list[Mask]:
    """The masks that `&` joins into `mask`; an empty list for None.

    >>> conjuncts(Causal() & (Padding(2) & ~Causal()))
    [Causal(), Padding(lengths=2), Not(a=Causal())]
    """
    if isinstance(mask, And):
        return conjuncts(mask.a) + conjuncts(mask.b)
    return [] if mask is None else [mask]
