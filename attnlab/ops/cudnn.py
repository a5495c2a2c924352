"""cuDNN's flash attention, through `jax.nn.dot_product_attention`, where it honours every argument.

Its backward pass adds in no fixed order unless XLA is told to be deterministic
(`XLA_FLAGS=--xla_gpu_deterministic_ops=true`).
"""

import jax
import jax.numpy as jnp
from jax.extend.backend import get_backend

from attnlab.ops.masks import as_band

PLATFORM = "gpu"


def reason_against(
    *,
    q,
    k,
    v,
    mask,
    score_mods,
    bias,
    sinks,
    dropout_rate,
    q_positions,
    kv_positions,
    return_lse,
    block_sizes,
    scale,
    **_,
) -> str | None:
    """Why cuDNN could not run a call, None if it can."""
    band = as_band(mask)
    head_dim = q.shape[-1]
    reasons = {
        "cuDNN was not found": not _is_there(),
        f"it has no {q.dtype}, only float16 and bfloat16": q.dtype not in (jnp.float16, jnp.bfloat16),
        "q, k and v must have one type": not q.dtype == k.dtype == v.dtype,
        f"heads of {head_dim} and {v.shape[-1]} features: it has equal ones, multiples of 8 up to 128": not (
            head_dim == v.shape[-1] and head_dim % 8 == 0 and head_dim <= 128
        ),
        "it has no score mods": bool(score_mods),
        "it has no bias whose gradient was checked": bias is not None,
        "it has no sinks": sinks is not None,
        "its dropout is not ours": bool(dropout_rate),
        "it has no positions": q_positions is not None or kv_positions is not None,
        "its lse has no gradient": return_lse,
        "its tiles have their own sizes": block_sizes is not None,
        "it needs a scale that is known": isinstance(scale, jax.core.Tracer),
        "of masks it has Causal and, with it, SlidingWindow to the left": band is None
        or bool(band.segments)
        or (band.right, band.left is None) not in ((None, True), (0, True), (0, False)),
        "an axis has length 0": 0 in (*q.shape, *k.shape),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _is_there() -> bool:
    """Whether the GPU is one of CUDA's: AMD's call themselves gpu too."""
    return "cuda" in get_backend().platform_version


def attend(q, k, v, *, mask, scale, **_):
    """(out, None): the lse is not to be had with a gradient."""
    band = as_band(mask)
    batch = q.shape[:-3]
    flat = (x.reshape(-1, *x.shape[-3:]) for x in (q, k, v))
    out = jax.nn.dot_product_attention(
        *flat,
        scale=None if scale is None else float(scale),
        is_causal=band.right == 0,
        local_window_size=None if band.left is None else (band.left, 0),
        implementation="cudnn",
    )
    return out.reshape(*batch, *out.shape[1:]), None
