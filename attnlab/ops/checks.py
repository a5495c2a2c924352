"""Checks that the operators share: an error is one line that names the axis, the sizes and the remedy."""

import jax
import jax.numpy as jnp
import numpy as np


def queries_keys_values(q, k, v) -> tuple:
    """q, k, v as arrays.

    Raises:
      ValueError: they are not `[..., Tq, H, D]`, `[..., Tk, Hk, D]`, `[..., Tk, Hk, Dv]` of a floating type, H a
        multiple of Hk.
    """
    q, k, v = (floating(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    for name, x in (("q", q), ("k", k), ("v", v)):
        if jnp.ndim(x) < 3:
            raise ValueError(f"{name} has shape {jnp.shape(x)}, expected [..., length, heads, features]")
    batch, (_, num_heads, head_dim) = q.shape[:-3], q.shape[-3:]
    kv_length, kv_heads, _ = k.shape[-3:]
    for name, x in (("k", k), ("v", v)):
        if x.shape[:-3] != batch:
            raise ValueError(f"{name} has batch axes {x.shape[:-3]} and q has {batch}: give both the same")
    for name, x in (("q", q), ("k", k)):
        if 0 in x.shape[-2:]:
            raise ValueError(f"{name} has shape {x.shape}: expected one head and one feature, or more")
    if k.shape[-1] != head_dim:
        raise ValueError(
            f"k has {k.shape[-1]} features a head and q has {head_dim}: they are multiplied, so must agree"
        )
    if v.shape[-3:-1] != (kv_length, kv_heads):
        raise ValueError(
            f"v has (length, heads) {v.shape[-3:-1]} and k has {(kv_length, kv_heads)}: each key needs a value"
        )
    if num_heads % kv_heads:
        raise ValueError(f"q has {num_heads} heads and k has {kv_heads}: q's heads must be a multiple of k's")
    return q, k, v


def floating(name: str, x):
    """An array of a floating type, or None for None; ValueError for another type."""
    if x is None:
        return None
    x = x if isinstance(x, jax.Array | np.ndarray) else jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        remedy = "use mask= for what is seen or not" if x.dtype == bool else "use .astype(jnp.float32)"
        raise ValueError(f"{name} has type {x.dtype}, expected a floating type: {remedy}")
    return x


def whole(name: str, x):
    """Indices or positions as int32, or None for None: unsigned ones would wrap where they are subtracted."""
    if x is None:
        return None
    x = x if isinstance(x, jax.Array | np.ndarray) else jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} has type {x.dtype}, expected whole numbers")
    return x.astype(np.int32)
