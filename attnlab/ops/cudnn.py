"""Adapter to cuDNN's flash attention, through `jax.nn.dot_product_attention`.

The order of the sums in its backward pass varies unless `XLA_FLAGS=--xla_gpu_deterministic_ops=true` is set.
"""

import functools

import jax
import jax.numpy as jnp
from jax.extend.backend import get_backend

from attnlab.ops import checks
from attnlab.ops.call import AttentionCall
from attnlab.ops.dense import inert
from attnlab.ops.mask_algebra import And, conjuncts
from attnlab.ops.masks import Padding, as_band
from attnlab.ops.meshes import over_shards
from attnlab.ops.platforms import is_hopper
from attnlab.types import Array

PLATFORM = "gpu"
HAS_LSE = False  # JAX drops the gradient of its lse and rounds the lse to q's type


def reason_against(call: AttentionCall) -> str | None:
    """The reason why this backend cannot run a call, or None."""
    q, k, v, head_dim = call.q, call.k, call.v, call.q.shape[-1]
    largest = 256 if is_hopper(q, k, v) else 128
    band, paddings = _split(call.mask)
    has_window = band is not None and band.left is not None
    reasons = {
        "cuDNN was not found": not _is_there(),
        f"it has no {q.dtype}, only float16 and bfloat16": q.dtype not in (jnp.float16, jnp.bfloat16),
        "q, k and v must have one type": not q.dtype == k.dtype == v.dtype,
        f"heads of {head_dim} and {v.shape[-1]} features: it supports equal multiples of 8 up to {largest}": not (
            head_dim == v.shape[-1] and head_dim % 8 == 0 and head_dim <= largest
        ),
        "it has no score mods": bool(call.score_mods),
        "the gradient of a bias came out wrong on an H100, with JAX 0.11.2": call.bias is not None,
        "it has no sinks": call.sinks is not None,
        "its dropout differs from the other backends'": bool(call.dropout_rate),
        "it has no positions": call.q_positions is not None or call.kv_positions is not None,
        "it chooses its own tile sizes": call.block_sizes is not None,
        "it needs a static scale": isinstance(call.scale, jax.core.Tracer),
        "the masks it supports are Causal, with or without Padding or a SlidingWindow to the left": band is None
        or bool(band.segments)
        or (band.right, band.left is None) not in ((None, True), (0, True), (0, False)),
        # Gradients are unverified where padding fully masks a window.
        "it supports no SlidingWindow with Padding": has_window and bool(paddings),
        f"with Padding, lengths {call.lengths} must be even": bool(paddings) and any(n % 2 for n in call.lengths),
        "an axis has length 0": 0 in (*q.shape, *k.shape),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def untried(call: AttentionCall) -> str | None:
    """The reason why "auto" leaves a call to other backends, or None."""
    reasons = {"padding": bool(_split(call.mask)[1]), "heads of more than 128 features": call.q.shape[-1] > 128}
    return next(
        (f"no recorded GPU run covers {name}: it runs only if named" for name, holds in reasons.items() if holds), None
    )


def _is_there() -> bool:
    """Whether the GPU runs CUDA (AMD's platform is also "gpu"); True without a GPU, where it cannot be known."""
    return jax.default_backend() != "gpu" or "cuda" in get_backend().platform_version


def _split(mask):
    """Return the band formed by a mask's terms other than Padding, and the lengths of its Paddings."""
    terms = conjuncts(mask)
    others = [term for term in terms if not isinstance(term, Padding)]
    lengths = [term.lengths for term in terms if isinstance(term, Padding)]
    return as_band(functools.reduce(And, others) if others else None), lengths


def attend(call: AttentionCall) -> tuple[Array, None]:
    """Return (out, None)."""
    (band, paddings), scale, lengths = _split(call.mask), call.scale, None
    if paddings:
        paddings = [checks.clipped_to_int32(jnp.asarray(lengths)) for lengths in paddings]
        lengths = jnp.clip(functools.reduce(jnp.minimum, paddings), 0, call.lengths[1])
        lengths = jnp.broadcast_to(lengths, call.batch)[..., None]

    def kernel(q, k, v, lengths):
        options = {}
        if lengths is not None:
            k, v, options = _padded(q, k, v, lengths)
        out = jax.nn.dot_product_attention(
            *(x.reshape(-1, *x.shape[-3:]) for x in (q, k, v)),
            scale=None if scale is None else float(scale),
            is_causal=band.right == 0,
            local_window_size=None if band.left is None else (band.left, 0),
            implementation="cudnn",
            **options,
        )
        return out.reshape(q.shape)

    return over_shards(kernel, call.q, call.k, call.v, lengths), None


def _padded(q, k, v, lengths):
    """Return k and v with zeros for padding, and the lengths `[..., 1]` as arguments of JAX's attention function."""
    is_padding = jnp.arange(k.shape[-3])[:, None, None] >= lengths[..., None, None]
    # cuDNN before 9.25 returns NaN for a length of 0. One key and value of zeros give the expected 0 and no gradient.
    kv_lengths = jnp.maximum(lengths, 1).reshape(-1)
    named = {"query_seq_lengths": jnp.full_like(kv_lengths, q.shape[-3]), "key_value_seq_lengths": kv_lengths}
    return inert(k, is_padding), inert(v, is_padding), {name: _mapped_like(q, x) for name, x in named.items()}


def _mapped_like(q, x):
    """`x` mapped over the same axes of `vmap` and `shard_map` as q, as JAX's rule for this kernel expects."""
    return jax.lax.select(q[(0,) * q.ndim] == 0, x, x)
