"""Attention, written out: the specification that every other backend is tested against.

For a query i and the keys j that it may attend to, with values v_j,

    s_ij = mods(scale · q_i·k_j + bias_ij)
    p_ij = exp(s_ij) / (Σ_j exp(s_ij) + exp(sink))       (softmax; the sink takes weight and has no value)
    o_i  = Σ_j dropout(p_ij) v_j
    lse_i = log(Σ_j exp(s_ij) + exp(sink))

This extends Vaswani et al. 2017, equation 1. Memory and time are O(Tq·Tk); all derivatives exist, forward mode
included. Logits, softmax and lse are float32 (float64 for float64); the operands of products have the input type.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Bool, Float

from attnlab.ops import dropout
from attnlab.ops.call import AttentionCall, Result
from attnlab.ops.logsumexp import finite_shift, normalizer
from attnlab.ops.meshes import like_queries, like_scores, on_auto_axes
from attnlab.ops.tiles import Side, Tile, whole
from attnlab.types import Array


def reason_against(call: AttentionCall) -> str | None:
    """The reason why this backend cannot run a call, or None."""
    return "it has no tiles to size: remove block_sizes" if call.block_sizes else None


@on_auto_axes(like_queries)
def attend(call: AttentionCall) -> Result:
    """Return (out in q's type, (max, log_sum))."""
    tile, visible = visibility(call)
    hidden = hidden_keys(visible)
    p, log_sums = softmax(_scores(call, hidden), call, tile, visible)
    if call.dropout_rate:
        keeps = dropout.keep(call.dropout_keys, call.dropout_rate, tile.head, tile.q_index, tile.kv_index)
        p = jnp.where(keeps, p / (1 - call.dropout_rate), 0)
    v = inert(per_query_head(call.v, call.num_heads), hidden)
    out = jnp.einsum("...hqk,...khd->...qhd", p.astype(v.dtype), v, preferred_element_type=p.dtype)
    out = checkpoint_name(out.astype(call.q.dtype), "attention")  # see GPT's remat
    return out, tuple(jnp.moveaxis(x, -2, -1) for x in log_sums)


@on_auto_axes(like_scores)
def weights(call: AttentionCall, rows=None) -> Float[Array, "*B H Rq Tk"]:
    """The softmax weights before dropout, for all queries or for `rows`."""
    tile, visible = visibility(call, rows)
    if rows is not None:
        bias = call.bias if call.bias is None or call.bias.shape[-2] == 1 else jnp.take(call.bias, rows, axis=-2)
        call = call.replace(q=jnp.take(call.q, rows, axis=-3), bias=bias)
    return softmax(_scores(call, hidden_keys(visible)), call, tile, visible)[0]


def _scores(call: AttentionCall, hidden: Bool[Array, "..."] | None) -> Float[Array, "*B H Rq Tk"]:
    """The products q_i·k_j."""
    q, k = call.q, inert(per_query_head(call.k, call.num_heads), hidden)
    return jnp.einsum("...qhd,...khd->...hqk", q, k, preferred_element_type=jnp.promote_types(q.dtype, jnp.float32))


def visibility(call: AttentionCall, rows=None) -> tuple[Tile, Bool[Array, "..."] | None]:
    """Return the coordinates of all scores, or of `rows`, in NumPy if known while tracing, and which are visible."""
    sides = (call.q_positions, call.kv_positions)
    xp = jnp if jax.tree.leaves((call.mask, sides, call.shard)) else np
    tile = whole(*call.lengths, call.num_heads, *sides, call.batch, xp, call.shard)
    if rows is not None:
        tile = tile._replace(queries=Side(rows, jnp.take(jnp.asarray(tile.queries.position), rows, axis=-1), axis=-2))
    return tile, None if call.mask is None else call.mask.visible(tile)


def softmax(
    s: Float[Array, "*B H Rq Tk"], call: AttentionCall, tile: Tile, visible: Bool[Array, "..."] | None
) -> tuple[Float[Array, "*B H Rq Tk"], tuple[Float[Array, "*B H Rq"], Float[Array, "*B H Rq"]]]:
    """Return (weights, (max, log_sum)) from the products q_i·k_j."""
    s = s * jnp.asarray(call.q.shape[-1] ** -0.5 if call.scale is None else call.scale, s.dtype)
    if call.bias is not None:
        s = s + call.bias.astype(s.dtype)
    for mod in call.score_mods:
        s = jnp.broadcast_to(mod.apply(s, tile), s.shape).astype(s.dtype)
    if visible is not None:
        s = jnp.where(visible, s, -jnp.inf)

    maximum = s.max(axis=-1, keepdims=True, initial=-jnp.inf)
    if call.sinks is not None:
        sinks = call.sinks.astype(s.dtype)[:, None, None]
        maximum = jnp.maximum(maximum, sinks)
    shift = jax.lax.stop_gradient(finite_shift(maximum))  # cancels out, so it needs no derivative
    p = jnp.exp(s - shift)
    total = p.sum(axis=-1, keepdims=True)
    if call.sinks is not None:
        total = total + jnp.exp(sinks - shift)
    denominator, log_sum = normalizer(total)
    return p / denominator, (shift[..., 0], log_sum[..., 0])


def per_query_head(x: Float[Array, "*B Tk Hk D"], num_heads: int) -> Float[Array, "*B Tk H D"]:
    """Repeat grouped heads (Ainslie et al. 2023): head h of q reads head h // (H / Hk) of k and v."""
    group = num_heads // x.shape[-2]
    return x if group == 1 else jnp.repeat(x, group, axis=-2)


def hidden_keys(visible: Bool[Array, "..."] | None) -> Bool[Array, "..."] | None:
    """Which keys are hidden from all queries, `[..., Tk, H or 1, 1]`; None if tracing shows none are, as for Causal."""
    if visible is None:
        return None
    hidden = ~visible.reshape((1,) * (3 - visible.ndim) + visible.shape).any(axis=-2)
    if isinstance(hidden, np.ndarray) and not hidden.any():
        return None
    return jnp.swapaxes(hidden, -1, -2)[..., None]


def inert(x: Float[Array, "*B Tk H D"], hidden: Bool[Array, "..."] | None) -> Float[Array, "*B Tk H D"]:
    """Zero the entries of keys that are masked for all queries: 0·NaN is NaN, in the sum and in its derivatives."""
    return x if hidden is None else jnp.where(hidden, 0, x)
