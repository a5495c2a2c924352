"""Attention, written out: the specification that every other backend is tested against.

For a query i and the keys j that it may attend to, with values v_j,

    s_ij = mods(scale · q_i·k_j + bias_ij)
    p_ij = exp(s_ij) / (Σ_j exp(s_ij) + exp(sink))       (softmax; the sink takes weight and has no value)
    o_i  = Σ_j dropout(p_ij) v_j
    lse_i = log(Σ_j exp(s_ij) + exp(sink))

(Vaswani et al. 2017, equation 1). Memory and time are O(Tq·Tk); all derivatives exist, forward mode included.
Logits, softmax and lse are float32 whatever the input (float64 stays float64); products take the input type.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Bool, Float

from attnlab.ops import dropout, few_queries
from attnlab.ops.logsumexp import finite_shift, normalizer
from attnlab.ops.masks import Mask
from attnlab.ops.meshes import like_queries, like_scores, on_auto_axes
from attnlab.ops.tiles import WHOLE, Shard, Side, Tile, whole
from attnlab.types import Array


def reason_against(block_sizes=None, **arguments) -> str | None:
    """The reason why this backend cannot run a call, or None."""
    return "it has no tiles to size: leave out block_sizes" if block_sizes else None


@on_auto_axes(like_queries)
def attend(
    q: Float[Array, "*B Tq H D"],
    k: Float[Array, "*B Tk Hk D"],
    v: Float[Array, "*B Tk Hk Dv"],
    *,
    dropout_rate: float = 0.0,
    dropout_keys=None,
    block_sizes=None,
    shard: Shard = WHOLE,
    **terms,
) -> tuple[Float[Array, "*B Tq H Dv"], tuple[Float[Array, "*B Tq H"], Float[Array, "*B Tq H"]]]:
    """(out in q's type, (max, log_sum)); see `_softmax` for `**terms`."""
    p, pair, key_is_visible = _softmax(q, k, shard=shard, **terms)
    if dropout_rate:
        tile = whole(*p.shape[-2:], p.shape[-3], xp=np, shard=shard._replace(examples=None))
        keeps = dropout.keep(dropout_keys, dropout_rate, tile.head, tile.q_index, tile.kv_index)
        p = jnp.where(keeps, p / (1 - dropout_rate), 0)
    out = _sums(p, v, key_is_visible, few_queries.pays(q, k))
    out = checkpoint_name(out.astype(q.dtype), "attention")  # see GPT's remat
    return out, tuple(jnp.moveaxis(x, -2, -1) for x in pair)


@on_auto_axes(like_scores)
def weights(
    q: Float[Array, "*B Tq H D"], k: Float[Array, "*B Tk Hk D"], **terms
) -> tuple[Float[Array, "*B H Rq Tk"], Float[Array, "*B H Rq"]]:
    """The softmax weights before dropout and the lse; see `_softmax` for `**terms`."""
    p, (shift, log_sum), _ = _softmax(q, k, **terms)
    return p, shift + log_sum


def _softmax(
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
    shard: Shard = WHOLE,
    rows=None,
) -> tuple[
    Float[Array, "*B H Rq Tk"], tuple[Float[Array, "*B H Rq"], Float[Array, "*B H Rq"]], Bool[Array, "..."] | None
]:
    """(weights, (max, log_sum), keys visible to any query `[..., Tk, H or 1, 1]`) of all queries, or of `rows`."""
    head_dim = q.shape[-1]
    tile = _tile(q, k, mask, q_positions, kv_positions, shard)
    if rows is not None:
        q = jnp.take(q, rows, axis=-3)
        tile = tile._replace(queries=Side(rows, jnp.take(jnp.asarray(tile.queries.position), rows, axis=-1), axis=-2))
        bias = bias if bias is None or bias.shape[-2] == 1 else jnp.take(bias, rows, axis=-2)

    visible = None if mask is None else mask.visible(tile)
    key_is_visible = _key_is_visible(visible)
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    s = _products(q, k, key_is_visible, dtype)
    s = s * jnp.asarray(head_dim**-0.5 if scale is None else scale, dtype)
    if bias is not None:
        s = s + bias.astype(dtype)
    for mod in score_mods:
        s = jnp.broadcast_to(mod.apply(s, tile), s.shape).astype(dtype)
    if visible is not None:
        s = jnp.where(visible, s, -jnp.inf)

    maximum = s.max(axis=-1, keepdims=True, initial=-jnp.inf)
    if sinks is not None:
        sinks = sinks.astype(dtype)[:, None, None]
        maximum = jnp.maximum(maximum, sinks)
    shift = jax.lax.stop_gradient(finite_shift(maximum))  # cancels from the result, so it needs no derivative
    p = jnp.exp(s - shift)
    total = p.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - shift)
    denominator, log_sum = normalizer(total)
    return p / denominator, (shift[..., 0], log_sum[..., 0]), key_is_visible


def _products(q, k, key_is_visible, dtype) -> Float[Array, "*B H Tq Tk"]:
    """q_i·k_j, finite for keys that are masked for all queries."""

    def by_head(q, k, key_is_visible):
        k = _inert(_per_query_head(k, q.shape[-2]), key_is_visible)
        return jnp.einsum("...qhd,...khd->...hqk", q, k, preferred_element_type=dtype)

    if not few_queries.pays(q, k):
        return by_head(q, k, key_is_visible)
    return _if_finite(lambda q, k: few_queries.scores(q, k, dtype), by_head)(q, k, key_is_visible)


def _sums(p, v, key_is_visible, few: bool) -> Float[Array, "*B Tq H Dv"]:
    """Σ_j p_ij v_j over the keys visible to any query, in p's type."""

    def by_head(p, v, key_is_visible):
        v = _inert(_per_query_head(v, p.shape[-3]), key_is_visible)
        return jnp.einsum("...hqk,...khd->...qhd", p.astype(v.dtype), v, preferred_element_type=p.dtype)

    if not few:
        return by_head(p, v, key_is_visible)
    return _if_finite(lambda p, v: few_queries.sums(p.astype(v.dtype), v, p.dtype), by_head)(p, v, key_is_visible)


def _if_finite(fast, by_head):
    """The product `fast`, with hidden keys zeroed first only if one of them has made an element NaN.

    Zeroing writes a copy of all keys, for a rare case. Where visible keys are not finite, `by_head` keeps them in their
    head. Derivatives are always taken of `by_head`.
    """

    def if_finite(found, other):
        return jax.lax.cond(jnp.isfinite(found).all(), lambda: found, other)

    @jax.custom_jvp
    def product(x, keys, key_is_visible):
        def slow():
            return by_head(x, keys, key_is_visible)

        def without_hidden():
            of_any = _of_any_query_head(key_is_visible, keys.shape[-2])
            return if_finite(fast(x, _inert(keys, of_any)), slow)

        return if_finite(fast(x, keys), slow if key_is_visible is None else without_hidden)

    product.defjvp(lambda primals, tangents: jax.jvp(by_head, primals, tangents))
    return product


def _of_any_query_head(key_is_visible, kv_heads: int) -> Bool[Array, "..."]:
    """Whether a key is visible to any query head that reads it, `[..., Tk, Hk or 1, 1]`."""
    if key_is_visible.shape[-2] == 1:
        return key_is_visible
    return key_is_visible.reshape(*key_is_visible.shape[:-2], kv_heads, -1, 1).any(axis=-2)


def _per_query_head(x: Float[Array, "*B Tk Hk D"], num_heads: int) -> Float[Array, "*B Tk H D"]:
    """Grouped heads (Ainslie et al. 2023): head h of q reads head h // (H / Hk) of k and v."""
    group = num_heads // x.shape[-2]
    return x if group == 1 else jnp.repeat(x, group, axis=-2)


def _tile(q, k, mask, q_positions, kv_positions, shard) -> Tile:
    """The tile of all queries and keys, in NumPy when all its values are known while tracing."""
    given = jax.tree.leaves((mask, q_positions, kv_positions, shard))
    sizes = (q.shape[-3], k.shape[-3], q.shape[-2])
    return whole(*sizes, q_positions, kv_positions, q.shape[:-3], jnp if given else np, shard)


def _key_is_visible(visible) -> Bool[Array, "..."] | None:
    """The keys visible to any query, None when tracing shows that all are, as for Causal."""
    if visible is None:
        return None
    any_visible = visible.reshape((1,) * (3 - visible.ndim) + visible.shape).any(axis=-2)
    if isinstance(any_visible, np.ndarray) and any_visible.all():
        return None
    return jnp.swapaxes(any_visible, -1, -2)[..., None]


def _inert(x: Float[Array, "*B Tk H D"], key_is_visible) -> Float[Array, "*B Tk H D"]:
    """Zeros for keys that are masked for all queries: 0·NaN is NaN, in the sum and in its derivatives."""
    return x if key_is_visible is None else jnp.where(key_is_visible, x, 0)
