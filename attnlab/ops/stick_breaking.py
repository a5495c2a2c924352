"""Stick-breaking attention: each query breaks a stick of length 1 over the keys before it, the nearest key first.

For a query i, with z_ij = scale · q_i·k_j over its visible keys j < i (Tan et al. 2024, arXiv 2410.17980, equation 4),

    A_ij = σ(z_ij) · Π_{j<l<i} (1 − σ(z_il))        o_i = Σ_j A_ij v_j

There is no softmax, and only the order of the keys matters, not their positions. "dense" is this formula; "blockwise",
in both passes, visits tiles of keys from the nearest to the farthest and carries the log of each stick's remainder.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Integer

from attnlab.ops import checks, context, counting, tiles
from attnlab.ops.attention import is_small, make_call
from attnlab.ops.blockwise.layout import joined_rows
from attnlab.ops.call import AttentionCall
from attnlab.ops.dense import hidden_keys, inert, per_query_head
from attnlab.ops.mask_algebra import Mask
from attnlab.ops.platforms import is_specified
from attnlab.types import Array

IMPLS = ("auto", "dense", "blockwise")
BLOCK = 128  # queries, and also keys, in a tile


@checks.known_keywords
def stick_breaking_attention(
    q: Float[Array, "*B Tq H D"],
    k: Float[Array, "*B Tk Hk D"],
    v: Float[Array, "*B Tk Hk Dv"],
    mask: Mask | Bool[Array, "..."] | None = None,
    *,
    scale: float | Float[Array, ""] | None = None,
    q_positions: Integer[Array, "..."] | None = None,
    kv_positions: Integer[Array, "..."] | None = None,
    impl: str = "auto",
    block_size: int | None = None,
) -> Float[Array, "*B Tq H Dv"]:
    """Stick-breaking attention (Tan et al. 2024, arXiv 2410.17980): σ(z_ij) · Π (1 − σ(z_il)) for l between j and i.

    A query attends to keys at positions before its own, so the first row is 0. A row sums to at most 1. Masked keys
    take nothing from the stick. Logits and sums are float32 (float64 for float64 inputs).

    Args:
      q: `[..., Tq, H, D]`.
      k: `[..., Tk, Hk, D]`; H must be a multiple of Hk.
      v: `[..., Tk, Hk, Dv]`.
      mask: which earlier keys each query may attend to, e.g. `masks.Segments(ids)`; None for all of them.
      scale: factor of the logits; None for 1/√D.
      q_positions, kv_positions: `[Tq]` or `[..., Tq]`, and `[Tk]` or `[..., Tk]`; `arange` when None. Needed when
        Tq ≠ Tk. With "blockwise", visible keys must be in the order of their positions.
      impl: "dense", memory O(Tq·Tk); "blockwise", memory O(Tq + Tk), only first derivatives in reverse mode; "auto".
      block_size: number of queries, and of keys, in a tile; None for 128.

    Returns:
      `[..., Tq, H, Dv]` in q's type.

    Raises:
      ValueError: shapes, types or values that do not fit, or a sequence that a `shard_map` splits.

    >>> q = k = jnp.zeros((4, 1, 2))  # every σ is ½
    >>> print(stick_breaking_attention(q, k, jnp.eye(4)[:, None])[-1, 0])  # of the last query
    [0.125 0.25  0.5   0.   ]
    """
    if is_specified():
        impl, block_size = "dense", None
    call = _call(q, k, v, mask, scale, q_positions, kv_positions)
    if impl not in IMPLS:
        raise ValueError(f"impl = {impl!r}: expected one of {', '.join(IMPLS)}")
    if block_size is not None and (impl == "dense" or isinstance(block_size, bool) or block_size < 1):
        raise ValueError(f"block_size = {block_size!r}: expected 1 or more, for impl='blockwise'")
    is_empty, is_free = 0 in (*call.batch, *call.lengths), impl == "auto" and block_size is None
    with counting.scope():
        if impl == "dense" or is_empty or (is_free and is_small(*call.lengths)):
            weights, hidden = _weights(call)
            v = inert(per_query_head(call.v, call.num_heads), hidden)
            out = jnp.einsum("...hqk,...khd->...qhd", weights.astype(v.dtype), v).astype(call.q.dtype)
        else:
            out = _blockwise(call, block_size or BLOCK)
    return counting.of_attention(out, call)


def stick_breaking_weights(
    q: Float[Array, "*B Tq H D"],
    k: Float[Array, "*B Tk Hk D"],
    mask: Mask | Bool[Array, "..."] | None = None,
    *,
    scale: float | Float[Array, ""] | None = None,
    q_positions: Integer[Array, "..."] | None = None,
    kv_positions: Integer[Array, "..."] | None = None,
) -> Float[Array, "*B H Tq Tk"]:
    """The weights A of `stick_breaking_attention`, with the same arguments and errors.

    >>> print(stick_breaking_weights(jnp.zeros((3, 1, 2)), jnp.zeros((3, 1, 2)))[0])
    [[0.   0.   0.  ]
     [0.5  0.   0.  ]
     [0.25 0.5  0.  ]]
    """
    return _weights(_call(q, k, k, mask, scale, q_positions, kv_positions))[0]


def _call(q, k, v, mask, scale, q_positions, kv_positions) -> AttentionCall:
    q, k, v = checks.queries_keys_values(q, k, v)
    split = context.current(q, k)
    if split is not None and split.is_manual:
        raise ValueError("stick_breaking_attention needs whole sequences: call it outside of shard_map")
    if q.shape[-3] != k.shape[-3] and (q_positions is None or kv_positions is None):
        raise ValueError(f"{q.shape[-3]} queries and {k.shape[-3]} keys: pass q_positions and kv_positions")
    return make_call(q, k, v, mask, None, None, scale, None, 0.0, None, q_positions, kv_positions)


def _visible(call: AttentionCall, tile: tiles.Tile):
    earlier = tile.kv_position < tile.q_position
    return earlier if call.mask is None else earlier & call.mask.visible(tile)


def _weights(call: AttentionCall):
    """Return (A `[..., H, Tq, Tk]` in float32 or float64, the keys hidden from all queries `[..., Tk, H or 1, 1]`)."""
    tile = tiles.whole(*call.lengths, call.num_heads, call.q_positions, call.kv_positions, call.batch)
    hidden = hidden_keys(_visible(call, tile))
    logits = _logits(call.q, inert(per_query_head(call.k, call.num_heads), hidden), call.scale)
    visible = jnp.broadcast_to(_visible(call, tile), logits.shape)
    if call.kv_positions is None:
        return _broken(logits, visible)[0], hidden
    # A cache that has wrapped around holds the newest keys before the oldest.
    order = jnp.argsort(jnp.broadcast_to(tile.kv_position, logits.shape), axis=-1)
    logits, visible = (jnp.take_along_axis(x, order, axis=-1) for x in (logits, visible))
    return jnp.take_along_axis(_broken(logits, visible)[0], jnp.argsort(order, axis=-1), axis=-1), hidden


def _logits(q, k, scale):
    """The logits z `[..., H, Tq, Tk]`."""
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    products = jnp.einsum("...qhd,...khd->...hqk", q, k, preferred_element_type=dtype)
    return products * jnp.asarray(q.shape[-1] ** -0.5 if scale is None else scale, dtype)


def _broken(logits, visible, left=0.0):
    """Return (weights, log remainder of each stick) for `[..., queries, keys]`; `left` is the log remainder before."""
    breaks = jnp.where(visible, -jax.nn.softplus(logits), 0)  # log(1 − σ); log σ is this plus the logit
    after = jnp.tri(logits.shape[-1], k=-1, dtype=logits.dtype)  # sums over keys l > j; rounds less often than a scan
    nearer = jnp.matmul(breaks, after, precision="highest")
    logs = logits + breaks + nearer + left
    return jnp.exp(jnp.where(visible, logs, -jnp.inf)), left + breaks.sum(axis=-1, keepdims=True)


# ---------------------------------------------------------------------------------------------------------- blockwise


def _blockwise(call: AttentionCall, size: int):
    k, v = (per_query_head(x, call.num_heads) for x in (call.k, call.v))
    q, scale = call.q, call.q.shape[-1] ** -0.5 if call.scale is None else call.scale
    if not isinstance(scale, float | int):  # may have a gradient
        q, scale = q * scale.astype(q.dtype), 1.0
    where = call.replace(q=None, k=None, v=None, scale=None)
    q, k, v = (tiles.padded(x, -(-x.shape[-3] // size) * size, axis=-3) for x in (q, k, v))
    out = _over_tiles(q, k, v, where, _Sizes(call.lengths, size, float(scale)))
    return jax.lax.slice_in_dim(out, 0, call.lengths[0], axis=-3).astype(call.q.dtype)


class _Sizes(NamedTuple):
    lengths: tuple[int, int]  # queries and keys without padding
    tile: int
    scale: float


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _over_tiles(q, k, v, where, sizes):
    return _forward(q, k, v, where, sizes)[0]


class _Tiles:
    """The tiles of a padded call."""

    def __init__(self, q, k, where: AttentionCall, sizes: _Sizes):
        self.where, (self.lengths, self.size, _) = where, sizes
        self.counts = tuple(x.shape[-3] // self.size for x in (q, k))
        batch, heads = q.shape[:-3], q.shape[-2]
        self.whole = tiles.whole(*self.lengths, heads, where.q_positions, where.kv_positions, batch)
        self.shape = (*batch, heads, self.size)

    def part(self, x, n):
        return jax.lax.dynamic_slice_in_dim(x, n * self.size, self.size, axis=-3)

    def keys(self, k, v, j, visible):
        """Keys and values of a tile, with zeros for keys hidden from all its queries, because these may hold NaN."""
        hidden = hidden_keys(visible)
        return inert(self.part(k, j), hidden), inert(self.part(v, j), hidden)

    def visible(self, i, j):
        """Visible pairs of a tile, bool, broadcastable to `[..., H, size, size]`."""
        tile = self.whole._replace(
            queries=self.whole.queries.block(i, self.size), keys=self.whole.keys.block(j, self.size)
        )
        inside = j * self.size + jnp.arange(self.size) < self.lengths[1]
        return _visible(self.where, tile) & inside

    def nearest_first(self, i, step, carry):
        """Run `step(carry, j, visible)` for each tile j of keys that tile i of queries attends to, last tile first."""

        def body(n, carry):
            j = self.counts[1] - 1 - n
            visible = self.visible(i, j)
            return jax.lax.cond(visible.any(), lambda carry: step(carry, j, visible), lambda carry: carry, carry)

        return jax.lax.fori_loop(0, self.counts[1], body, carry)


def _forward(q, k, v, where, sizes: _Sizes):
    tiling = _Tiles(q, k, where, sizes)
    dtype = jnp.promote_types(q.dtype, jnp.float32)

    def query_tile(i):
        rows = tiling.part(q, i)

        def step(carry, j, visible):
            left, out = carry
            columns, values = tiling.keys(k, v, j, visible)
            weights, left = _broken(_logits(rows, columns, sizes.scale), visible, left)
            return left, out + _sums(weights, values)

        empty = jnp.zeros((*tiling.shape, 1), dtype), jnp.zeros((*tiling.shape, v.shape[-1]), dtype)
        return tiling.nearest_first(i, step, empty)[1]

    out = joined_rows(jax.lax.map(query_tile, jnp.arange(tiling.counts[0])), q.shape[-3])
    return out, (q, k, v, where, out)


def _backward(sizes: _Sizes, residuals, d_out):
    """With L = log A: dL_ij = A_ij · (do_i·v_j), dz_ij = dL_ij · (1 − σ) − σ · Σ_{l<j} dL_il, Σ_l dL_il = do_i·o_i.

    The sum over farther keys is thus do·o minus the sum over the other keys, so tiles are visited in the same order.
    """
    q, k, v, where, out = residuals
    tiling, size = _Tiles(q, k, where, sizes), sizes.tile
    total = jnp.einsum("...qhd,...qhd->...hq", d_out, out)[..., None]

    def query_tile(grads, i):
        rows, d_rows_out = tiling.part(q, i), tiling.part(d_out, i)
        row_totals = jax.lax.dynamic_slice_in_dim(total, i * size, size, axis=-2)

        def step(carry, j, visible):
            left, farther, d_rows, d_k, d_v = carry
            columns, values = tiling.keys(k, v, j, visible)
            logits = _logits(rows, columns, sizes.scale)
            weights, left = _broken(logits, visible, left)
            d_logs = weights * jnp.einsum("...qhd,...khd->...hqk", d_rows_out, values.astype(d_out.dtype))
            nearer = jnp.matmul(d_logs, jnp.tri(size, dtype=d_logs.dtype), precision="highest")  # keys l ≥ j
            share = jax.nn.sigmoid(logits)
            d_logits = jnp.where(visible, d_logs * (1 - share) - share * (farther - nearer), 0) * sizes.scale
            d_rows = d_rows + _sums(d_logits, columns)
            d_k = _added(d_k, j, jnp.einsum("...hqk,...qhd->...khd", d_logits, rows.astype(d_logits.dtype)))
            d_v = _added(d_v, j, jnp.einsum("...hqk,...qhd->...khd", weights, d_rows_out))
            return left, farther - nearer[..., :1], d_rows, d_k, d_v

        empty = jnp.zeros_like(row_totals), row_totals, jnp.zeros((*tiling.shape, q.shape[-1]), out.dtype)
        *_, d_rows, d_k, d_v = tiling.nearest_first(i, step, (*empty, *grads))
        return (d_k, d_v), d_rows

    zeros = tuple(jnp.zeros(x.shape, out.dtype) for x in (k, v))
    (d_k, d_v), d_q = jax.lax.scan(query_tile, zeros, jnp.arange(tiling.counts[0]))
    d_q, d_k, d_v = (x.astype(like.dtype) for x, like in zip((joined_rows(d_q, q.shape[-3]), d_k, d_v), (q, k, v)))
    return d_q, d_k, d_v, None


_over_tiles.defvjp(_forward, _backward)


def _sums(weights, values):
    """Weighted sums of values, `[..., H, queries, D]`."""
    return jnp.einsum("...hqk,...khd->...hqd", weights, values.astype(weights.dtype))


def _added(x, n, part):
    size = part.shape[-3]
    at = jax.lax.dynamic_slice_in_dim(x, n * size, size, axis=-3)
    return jax.lax.dynamic_update_slice_in_dim(x, at + part, n * size, axis=-3)
