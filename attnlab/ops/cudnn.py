"""Adapter to cuDNN's flash attention, through `jax.nn.dot_product_attention`.

Its backward pass sums in no fixed order unless `XLA_FLAGS=--xla_gpu_deterministic_ops=true` is set.
"""

import jax
import jax.numpy as jnp
from jax.extend.backend import get_backend

from attnlab.ops.call import AttentionCall
from attnlab.ops.masks import as_band
from attnlab.ops.meshes import over_shards
from attnlab.types import Array

PLATFORM = "gpu"
HAS_LSE = False  # its lse has no gradient


def reason_against(call: AttentionCall) -> str | None:
    """The reason why this backend cannot run a call, or None."""
    q, k, v, head_dim, band = call.q, call.k, call.v, call.q.shape[-1], as_band(call.mask)
    reasons = {
        "cuDNN was not found": not _is_there(),
        f"it has no {q.dtype}, only float16 and bfloat16": q.dtype not in (jnp.float16, jnp.bfloat16),
        "q, k and v must have one type": not q.dtype == k.dtype == v.dtype,
        f"heads of {head_dim} and {v.shape[-1]} features: it supports equal ones, multiples of 8 up to 128": not (
            head_dim == v.shape[-1] and head_dim % 8 == 0 and head_dim <= 128
        ),
        "it has no score mods": bool(call.score_mods),
        "it has no bias whose gradient was checked": call.bias is not None,
        "it has no sinks": call.sinks is not None,
        "it has another dropout than the other backends": bool(call.dropout_rate),
        "it has no positions": call.q_positions is not None or call.kv_positions is not None,
        "it chooses its own tile sizes": call.block_sizes is not None,
        "it needs a static scale": isinstance(call.scale, jax.core.Tracer),
        "of masks it supports Causal, with or without a SlidingWindow to the left": band is None
        or bool(band.segments)
        or (band.right, band.left is None) not in ((None, True), (0, True), (0, False)),
        "an axis has length 0": 0 in (*q.shape, *k.shape),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _is_there() -> bool:
    """Whether the GPU runs CUDA: AMD's platform is also "gpu", and without a GPU nothing tells."""
    return jax.default_backend() != "gpu" or "cuda" in get_backend().platform_version


def attend(call: AttentionCall) -> tuple[Array, None]:
    """(out, None)."""
    band, scale = as_band(call.mask), call.scale

    def kernel(q, k, v, *_):
        batch = q.shape[:-3]
        flat = (x.reshape(-1, *x.shape[-3:]) for x in (q, k, v))
        out = jax.nn.dot_product_attention(
            *flat,
            scale=None if scale is None else float(scale),
            is_causal=band.right == 0,
            local_window_size=None if band.left is None else (band.left, 0),
            implementation="cudnn",
        )
        return out.reshape(*batch, *out.shape[1:])

    return over_shards(kernel, call.q, call.k, call.v), None
