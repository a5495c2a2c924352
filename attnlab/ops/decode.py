"""Attention of few queries to many keys, for a decoding step on CPUs, without copying the cache.

Products head by head would first transpose the keys, copying them in each step. Here a key is one row with the features
of all heads, [Tk, Hk·D] as in memory, and a query is a row that is zero outside its head's features. A non-finite key
then reaches all heads, even if masked. So if the output is not finite, the step is repeated with zeros for keys masked
for all queries, whose content then changes no bit. If the output is still not finite, `dense` computes it.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from attnlab.ops import dense
from attnlab.ops.call import AttentionCall, Result
from attnlab.ops.meshes import like_queries, on_auto_axes
from attnlab.ops.nodes import combine, partition
from attnlab.types import Array

PLATFORM = "cpu"
_QUERIES = 16  # per example; more are faster tile by tile
_ROWS = 64  # H·Tq, beyond which the zeros cost more than the copy


def reason_against(call: AttentionCall) -> str | None:
    """The reason why this backend cannot run a call, or None."""
    queries, keys = call.lengths
    if call.block_sizes:
        return "it has no tiles to size: remove block_sizes"
    if call.dropout_rate:
        return "it is for decoding and has no dropout"
    if queries > _QUERIES or queries * call.num_heads > _ROWS or keys < 4 * queries:
        return f"it is for up to {_QUERIES} queries, {_ROWS} queries × heads, and at least 4 times as many keys"
    return None


@on_auto_axes(like_queries)
def attend(call: AttentionCall) -> Result:
    """Return (out in q's type, (max, log_sum)), like `dense.attend`, which also defines the derivatives."""
    is_known = jax.tree.map(lambda x: not isinstance(x, jax.Array), call)  # NumPy arrays of a mask stay NumPy
    known, traced = partition(call, is_known)

    def by_head(traced):
        return dense.attend(combine(known, traced))

    @jax.custom_jvp
    def run(traced):
        call = combine(known, traced)

        def finite_or(result, otherwise):
            return jax.lax.cond(jnp.isfinite(result[0]).all(), lambda: result, otherwise)

        def again():
            return finite_or(_by_rows(_without_hidden(call)), lambda: by_head(traced))

        return finite_or(_by_rows(call), again)

    run.defjvp(lambda primals, tangents: jax.jvp(by_head, primals, tangents))
    return run(traced)


def _by_rows(call: AttentionCall) -> Result:
    q, v = call.q, call.v
    tile, visible = dense.visibility(call)
    p, pair = dense.softmax(_scores(q, call.k, jnp.promote_types(q.dtype, jnp.float32)), call, tile, visible)
    out = _sums(p.astype(v.dtype), v, p.dtype).astype(q.dtype)
    return out, tuple(jnp.moveaxis(x, -2, -1) for x in pair)


def _without_hidden(call: AttentionCall) -> AttentionCall:
    """The call with zeros for keys and values that are masked for all queries of all heads that read them."""
    hidden = dense.hidden_keys(dense.visibility(call)[1])
    if hidden is not None and hidden.shape[-2] > 1:
        kv_heads = call.k.shape[-2]
        hidden = hidden.reshape(*hidden.shape[:-2], kv_heads, call.num_heads // kv_heads).all(axis=-1, keepdims=True)
    return call.replace(k=dense.inert(call.k, hidden), v=dense.inert(call.v, hidden))


def _scores(q: Float[Array, "*B Tq H D"], k: Float[Array, "*B Tk Hk D"], dtype) -> Float[Array, "*B H Tq Tk"]:
    """q·k in type `dtype`; query head h reads head h // (H / Hk) of k."""
    *batch, queries, heads, features = q.shape
    keys, kv_heads = k.shape[-3:-1]
    q = q.reshape(*batch, queries, kv_heads, heads // kv_heads, features)
    rows = jnp.einsum("...qngd,nm->...ngqmd", q, jnp.eye(kv_heads, dtype=q.dtype))
    rows = rows.reshape(*batch, heads * queries, kv_heads * features)
    k = k.reshape(*batch, keys, kv_heads * features)
    # rows·kᵀ would need no transposition of the result, but takes 50 % longer.
    s = jnp.einsum("...kf,...rf->...kr", k, rows, preferred_element_type=dtype)
    return jnp.swapaxes(s, -1, -2).reshape(*batch, heads, queries, keys)


def _sums(p: Float[Array, "*B H Tq Tk"], v: Float[Array, "*B Tk Hk Dv"], dtype) -> Float[Array, "*B Tq H Dv"]:
    """p·v in type `dtype`; a non-finite value makes all sums over its example, head and feature non-finite."""
    *batch, heads, queries, keys = p.shape
    kv_heads, features = v.shape[-2:]
    rows, v = p.reshape(*batch, heads * queries, keys), v.reshape(*batch, keys, kv_heads * features)
    out = jnp.einsum("...rk,...kf->...rf", rows, v, preferred_element_type=dtype)
    out = out.reshape(*batch, kv_heads, heads // kv_heads, queries, kv_heads, features)
    return jnp.einsum("...ngqnd->...qngd", out).reshape(*batch, queries, heads, features)
