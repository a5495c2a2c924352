"""Attention, written out: the specification that every other backend is tested against.

For a query i, the keys j that it sees and their values,

    s_ij = mods(scale · q_i·k_j + bias_ij)
    p_ij = exp(s_ij) / (Σ_j exp(s_ij) + exp(sink))       (softmax; the sink takes weight and has no value)
    o_i  = Σ_j dropout(p_ij) v_j
    lse_i = log(Σ_j exp(s_ij) + exp(sink))

(Vaswani et al. 2017, equation 1). Memory and time are O(Tq·Tk); every derivative exists, forward mode too.
Scores, softmax and lse are float32 whatever the input (float64 stays float64); products take the input type.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from attnlab.ops import dropout
from attnlab.ops.masks import Mask
from attnlab.ops.tiles import Side, Tile, whole
from attnlab.types import Array


def reason_against(block_sizes=None, **arguments) -> str | None:
    """Why this backend could not run a call, None if it can."""
    return "it has no tiles to size: leave out block_sizes" if block_sizes else None


def attend(
    q: Float[Array, "*B Tq H D"],
    k: Float[Array, "*B Tk Hk D"],
    v: Float[Array, "*B Tk Hk Dv"],
    *,
    dropout_rate: float = 0.0,
    dropout_keys=None,
    mask: Mask | None = None,
    q_positions=None,
    kv_positions=None,
    block_sizes=None,
    **terms,
) -> tuple[Float[Array, "*B Tq H Dv"], Float[Array, "*B Tq H"]]:
    """Output in q's type and lse in float32 (float64 for float64); see `weights` for `**terms`."""
    p, lse = weights(q, k, mask=mask, q_positions=q_positions, kv_positions=kv_positions, **terms)
    if dropout_rate:
        heads, rows, columns = np.ogrid[: p.shape[-3], : p.shape[-2], : p.shape[-1]]
        stays = dropout.keep(dropout_keys, dropout_rate, heads, rows, columns)
        p = jnp.where(stays, p / (1 - dropout_rate), 0)
    v = _inert(_per_query_head(v, q.shape[-2]), _keys_seen(mask, _tile(q, k, mask, q_positions, kv_positions)))
    out = jnp.einsum("...hqk,...khd->...qhd", p.astype(v.dtype), v, preferred_element_type=p.dtype)
    return out.astype(q.dtype), jnp.moveaxis(lse, -2, -1)


def weights(
    q: Float[Array, "*B Tq H D"],
    k: Float[Array, "*B Tk Hk D"],
    *,
    mask: Mask | None = None,
    score_mods=(),
    bias: Float[Array, "..."] | None = None,
    scale: float | Float[Array, ""] | None = None,
    sinks: Float[Array, " H"] | None = None,
    q_positions=None,
    kv_positions=None,
    rows=None,
) -> tuple[Float[Array, "*B H Rq Tk"], Float[Array, "*B H Rq"]]:
    """The softmax weights before dropout and the lse, for all query rows or for the indices `rows` `[Rq]` alone."""
    num_heads, head_dim = q.shape[-2:]
    tile = _tile(q, k, mask, q_positions, kv_positions)
    if rows is not None:
        q = jnp.take(q, rows, axis=-3)
        tile = tile._replace(queries=Side(rows, jnp.take(jnp.asarray(tile.queries.position), rows, axis=-1), axis=-2))
        bias = bias if bias is None or bias.shape[-2] == 1 else jnp.take(bias, rows, axis=-2)

    k = _inert(_per_query_head(k, num_heads), _keys_seen(mask, tile))
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    s = jnp.einsum("...qhd,...khd->...hqk", q, k, preferred_element_type=dtype)
    s = s * jnp.asarray(head_dim**-0.5 if scale is None else scale, dtype)
    if bias is not None:
        s = s + bias.astype(dtype)
    for mod in score_mods:
        s = jnp.broadcast_to(mod.apply(s, tile), s.shape).astype(dtype)
    if mask is not None:
        s = jnp.where(mask.visible(tile), s, -jnp.inf)

    # The largest score cancels from the result; as a constant it needs no derivative. A row that sees nothing has
    # largest score −inf: subtract 0 there, so that the weights are exp(−inf) = 0 and not exp(nan).
    largest = s.max(axis=-1, keepdims=True, initial=-jnp.inf)
    if sinks is not None:
        sinks = sinks.astype(dtype)[:, None, None]
        largest = jnp.maximum(largest, sinks)
    largest = jax.lax.stop_gradient(jnp.where(jnp.isneginf(largest), 0, largest))
    p = jnp.exp(s - largest)
    total = p.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - largest)
    some = total > 0
    total = jnp.where(some, total, 1)
    lse = jnp.where(some, largest + jnp.log(total), -jnp.inf)
    return p / total, lse[..., 0]


def _per_query_head(x: Float[Array, "*B Tk Hk D"], num_heads: int) -> Float[Array, "*B Tk H D"]:
    """Grouped heads (Ainslie et al. 2023): head h of q reads head h // (H / Hk) of k and v."""
    group = num_heads // x.shape[-2]
    return x if group == 1 else jnp.repeat(x, group, axis=-2)


def _tile(q, k, mask, q_positions, kv_positions) -> Tile:
    """The tile of all queries and keys; in NumPy where nothing has to wait for the running program."""
    given = q_positions is not None or kv_positions is not None or jax.tree.leaves(mask)
    sizes = (q.shape[-3], k.shape[-3], q.shape[-2])
    return whole(*sizes, q_positions, kv_positions, q.shape[:-3], xp=jnp if given else np)


def _keys_seen(mask, tile) -> Bool[Array, "... Tk H 1"] | None:
    """Which keys some query sees; None when it is known before the program runs that all are, as for Causal."""
    if mask is None:
        return None
    visible = mask.visible(tile)
    seen = visible.reshape((1,) * (3 - visible.ndim) + visible.shape).any(axis=-2)
    if isinstance(seen, np.ndarray) and seen.all():
        return None
    return jnp.swapaxes(seen, -1, -2)[..., None]


def _inert(x: Float[Array, "*B Tk H D"], seen) -> Float[Array, "*B Tk H D"]:
    """Zeros for the keys that no query sees: 0·NaN is NaN, in the sum and in its derivatives."""
    return x if seen is None else jnp.where(seen, x, 0)
