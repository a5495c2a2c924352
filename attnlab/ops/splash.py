"""Adapter to JAX's splash attention, a block-sparse kernel for TPUs."""

import numbers

import jax
import jax.numpy as jnp

from attnlab.ops.call import AttentionCall
from attnlab.ops.masks import as_band
from attnlab.ops.meshes import is_checked_manual, over_shards
from attnlab.ops.score_mods import SoftCap
from attnlab.types import Array

PLATFORM = "tpu"
HAS_LSE = False  # its lse has no gradient
_LANES = 128  # per vector register; lengths must be multiples of this


def reason_against(call: AttentionCall) -> str | None:
    """The reason why this backend cannot run a call, or None."""
    q, k, v, lengths, block_sizes = call.q, call.k, call.v, call.lengths, call.block_sizes
    score_mods, band = call.score_mods, as_band(call.mask)
    is_known = band is not None and len(band.segments) <= 1 and all(one.kv_ids is None for one in band.segments)
    reasons = {
        "within shard_map it needs check_vma=False": is_checked_manual(q, k, v),
        f"it has no {q.dtype}, only float32 and bfloat16": q.dtype not in (jnp.float32, jnp.bfloat16),
        "q, k and v must have one type": not q.dtype == k.dtype == v.dtype,
        f"lengths {lengths} are not multiples of {_LANES}": 0 in lengths or any(n % _LANES for n in lengths),
        f"tiles of {block_sizes} do not divide the lengths in multiples of {_LANES}": block_sizes is not None
        and any(size % _LANES or n % size for size, n in zip(block_sizes, lengths)),
        "the only score mod it supports is one SoftCap with a static cap": bool(score_mods)
        and not (
            len(score_mods) == 1
            and isinstance(score_mods[0], SoftCap)
            and isinstance(score_mods[0].cap, numbers.Number)
        ),
        "it has no bias": call.bias is not None,
        "it has no dropout": bool(call.dropout_rate),
        "it has no positions": call.q_positions is not None or call.kv_positions is not None,
        "the masks it supports are Causal, SlidingWindow and one Segments without kv_ids, joined by &": not is_known,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def attend(call: AttentionCall) -> tuple[Array, None]:
    """Return (out, None)."""
    q, k, v, band, score_mods, sinks = call.q, call.k, call.v, as_band(call.mask), call.score_mods, call.sinks
    ids = band.segments[0].q_ids if band.segments else None
    scale = q.shape[-1] ** -0.5 if call.scale is None else call.scale
    cap = float(score_mods[0].cap) if score_mods else None

    shared = (1,) * (q.ndim - 3)
    sinks = None if sinks is None else sinks.reshape(*shared, -1)
    ids = None if ids is None else ids.reshape(*(ids.shape[:-1] or shared), 1, -1)

    def run(q, k, v, others):
        from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import SegmentIds

        sinks, ids = others
        batch, lengths = q.shape[:-3], (q.shape[-3], k.shape[-3])
        ids = None if ids is None else jnp.broadcast_to(ids[..., 0, :], (*batch, lengths[0]))
        sinks = None if sinks is None else sinks.reshape(-1)
        kernel = _kernel(band, lengths, q.shape[-2], cap, call.block_sizes)

        def attend(q, k, v, ids):
            return kernel(q, k, v, None if ids is None else SegmentIds(ids, ids), sinks)

        for _ in batch:
            attend = jax.vmap(attend, in_axes=(0, 0, 0, None if ids is None else 0))
        q = (q * scale).astype(q.dtype)  # the kernel has no scale
        return attend(*(x.swapaxes(-2, -3) for x in (q, k, v)), ids).swapaxes(-2, -3)

    return over_shards(run, q, k, v, (sinks, ids)), None


def _kernel(band, lengths, num_heads, cap, block_sizes):
    # Imported here because Pallas is a large package, which this backend needs only on TPUs.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    if band.left is None and band.right is None:
        one = masks.FullMask(lengths)
    else:
        one = masks.LocalMask(lengths, (band.left, band.right), offset=0)
    q_size, kv_size = block_sizes or (max(size for size in (128, 256, 512) if n % size == 0) for n in lengths)
    sizes = {f"block_q{of}": q_size for of in ("", "_dkv", "_dq")}
    sizes |= {f"block_kv{of}": kv_size for of in ("", "_compute", "_dkv", "_dkv_compute", "_dq")}
    return kernels.make_splash_mha(
        masks.MultiHeadMask([one] * num_heads),
        block_sizes=kernels.BlockSizes(**sizes),
        attn_logits_soft_cap=cap,
        residual_checkpoint_name="attention",  # see GPT's remat
        head_shards=1,
        q_seq_shards=1,
    )
