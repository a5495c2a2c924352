"""Products of few queries with many keys, for a decoding step on CPUs, without a copy of the cache.

Products head by head first transpose the keys, which copies them in each step. Here all heads' features of a key are
one row, [Tk, Hk·D] as they lie in memory, and each query is a row that is zero outside its head's features.
"""

import jax.numpy as jnp
from jaxtyping import Float

from attnlab.ops.platforms import platform_of
from attnlab.types import Array

_MOST_ROWS = 64  # H·Tq, beyond which the zeros cost more than the copy


def pays(q: Float[Array, "*B Tq H D"], k: Float[Array, "*B Tk Hk D"]) -> bool:
    """Whether these products are faster than products head by head."""
    queries, heads = q.shape[-3:-1]
    return queries * heads <= _MOST_ROWS and k.shape[-3] >= 4 * queries and platform_of(q, k) == "cpu"


def scores(q: Float[Array, "*B Tq H D"], k: Float[Array, "*B Tk Hk D"], dtype) -> Float[Array, "*B H Tq Tk"]:
    """q·k in type `dtype`; query head h reads head h // (H / Hk) of k."""
    *batch, queries, heads, features = q.shape
    keys, kv_heads = k.shape[-3:-1]
    q = q.reshape(*batch, queries, kv_heads, heads // kv_heads, features)
    rows = jnp.einsum("...qngd,nm->...ngqmd", q, jnp.eye(kv_heads, dtype=q.dtype))
    rows = rows.reshape(*batch, heads * queries, kv_heads * features)
    k = k.reshape(*batch, keys, kv_heads * features)
    # rows·kᵀ, without the transposition of the result, takes half as long again.
    s = jnp.einsum("...kf,...rf->...kr", k, rows, preferred_element_type=dtype)
    return jnp.swapaxes(s, -1, -2).reshape(*batch, heads, queries, keys)


def sums(p: Float[Array, "*B H Tq Tk"], v: Float[Array, "*B Tk Hk Dv"], dtype) -> Float[Array, "*B Tq H Dv"]:
    """p·v in type `dtype`; a value that is not finite makes all sums of its example and feature NaN."""
    *batch, heads, queries, keys = p.shape
    kv_heads, features = v.shape[-2:]
    rows, v = p.reshape(*batch, heads * queries, keys), v.reshape(*batch, keys, kv_heads * features)
    out = jnp.einsum("...rk,...kf->...rf", rows, v, preferred_element_type=dtype)
    out = out.reshape(*batch, kv_heads, heads // kv_heads, queries, kv_heads, features)
    return jnp.einsum("...ngqnd->...qngd", out).reshape(*batch, queries, heads, features)
