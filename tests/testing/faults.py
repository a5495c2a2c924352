"""Implementations of attention with one fault each, and the feature that reveals the fault."""

import functools

import jax
import jax.numpy as jnp

from attnlab import masks, score_mods
from attnlab.ops.tiles import whole


def attention(
    q, k, v, mask=None, score_mod=(), bias=None, scale=None, sinks=None, dropout_rate=0.0, dropout_key=None,
    q_positions=None, kv_positions=None, *, fault="",
):  # fmt: skip
    """(out, lse) of attention with the named fault; "" means no fault."""
    mods = (score_mod,) if not isinstance(score_mod, tuple) else score_mod
    group = q.shape[-2] // k.shape[-2]
    k = k + 0.01 * (k - jax.lax.stop_gradient(k)) if fault == "gradient of k off by 1 %" else k
    k_heads, v_heads = (
        jnp.tile(x, (1, 1, group, 1)) if fault == "grouped heads in turn" else jnp.repeat(x, group, axis=-2)
        for x in (k, v)
    )
    if fault == "last of eight heads":
        k_heads = k_heads.at[:, :, 7:].multiply(1.01)
    if fault == "layout swapped":
        q = q.swapaxes(-2, -3).reshape(q.shape)
    scale = q.shape[-1] ** -0.5 if scale is None or fault == "no scale" else scale
    if fault == "queries counted from 0":
        q_positions = kv_positions = None
    tile = whole(q.shape[1], k.shape[1], q.shape[2], q_positions, kv_positions, batch=q.shape[:1])
    visible = None if mask is None else _faulty(mask, fault).visible(tile)
    if visible is not None:
        visible = jnp.broadcast_to(visible, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
        if fault != "NaN reaches the result":
            hidden = ~visible.any(axis=-2).swapaxes(-1, -2)[..., None]
            k_heads, v_heads = (jnp.where(hidden, 0, x) for x in (k_heads, v_heads))
    raw_type = jnp.float32 if fault != "scores in the input type" else q.dtype
    s = scale * jnp.einsum("bqhd,bkhd->bhqk", q, k_heads, preferred_element_type=raw_type).astype(jnp.float32)
    if bias is not None and fault != "bias dropped":
        bias = jax.lax.stop_gradient(bias) if fault == "bias without gradient" else bias
        s = s + (bias[:, :1] if fault == "bias of the first head" and bias.ndim > 2 else bias)
    capped_late = fault == "cap after the mask" and mods and visible is not None
    for mod in () if capped_late else mods:
        slopes_shared = fault == "slope of the first head" and isinstance(mod, score_mods.ALiBi)
        mod = score_mods.ALiBi(jnp.full_like(mod.slopes, mod.slopes[0])) if slopes_shared else mod
        mod = jax.lax.stop_gradient(mod) if fault in ("gates without gradient", "slopes without gradient") else mod
        s = mod.apply(s, tile)
    if visible is not None:
        s = jnp.where(visible, s, -jnp.inf)
    if capped_late:
        s = mods[0].apply(jnp.maximum(s, -1e9), tile)
    if fault == "softmax in bfloat16":
        s = s.astype(jnp.bfloat16)
    maximum = s.max(axis=-1, keepdims=True)
    if fault == "accumulator not rescaled":  # for rows with a larger max in the second tile of 128 keys
        last = jnp.minimum(jnp.arange(k.shape[1]) // 128 * 128 + 127, k.shape[1] - 1)
        maximum = jax.lax.cummax(s, axis=3)[..., last]
    shift = jax.lax.stop_gradient(jnp.where(jnp.isneginf(maximum), 0, maximum)) if fault != "no shift" else 0.0
    e = jnp.exp(s - shift)
    total = e.sum(axis=-1, keepdims=True)
    sink = 0 if sinks is None or fault == "sinks dropped" else jnp.exp(sinks[:, None, None] - shift)
    p = e / jnp.where(total + sink == 0, 1, total + sink)
    lse = jnp.log(total + sink) + shift
    if dropout_rate and fault != "dropout ignored":
        dropout_key = jax.random.key(0) if fault == "one draw for all keys" else dropout_key
        shape = p.shape if fault != "one draw for all examples" else (1, *p.shape[1:])
        keep = jax.random.bernoulli(dropout_key, 1 - dropout_rate, shape)
        p = jnp.where(keep, p if fault == "kept weights not scaled" else p / (1 - dropout_rate), 0)
    out = jnp.einsum("bhqk,bkhd->bqhd", p.astype(v.dtype), v_heads)
    out = out.astype(jnp.bfloat16).astype(q.dtype) if fault == "output in bfloat16" else out.astype(q.dtype)
    if fault == "zeros":
        out = jnp.zeros_like(out)
    if fault == "gradient of v halved":
        out = (out + jax.lax.stop_gradient(out)) / 2
    return out, lse[..., 0].swapaxes(-1, -2)


def _faulty(mask, fault):
    match mask:
        case masks.SlidingWindow(left, right):
            if fault == "window one key too wide":
                return masks.SlidingWindow(left + 1, right)
            if fault == "window of four keys at most":
                return masks.SlidingWindow(min(left, 4), right)
            if fault == "window without causality":
                return masks.SlidingWindow(left, right + left)
        case masks.Segments():
            if fault == "segments ignored":
                return masks.SlidingWindow(2**20, 2**20)
            if fault == "segments also causal":
                return mask & masks.Causal()
        case masks.Padding(lengths):
            if fault == "padding of the first example":
                return masks.Padding(jnp.broadcast_to(lengths[:1], lengths.shape))
        case masks.PrefixLM():
            if fault == "prefix as causal":
                return masks.Causal()
    return mask


OF_FEATURES = {
    "plain": ["zeros", "layout swapped", "last of eight heads", "accumulator not rescaled", "gradient of v halved"],
    "scale": ["no scale"],
    "window": [
        *("window one key too wide", "window without causality", "window of four keys at most"),
        "gradient of k off by 1 %",
    ],
    "padding": ["padding of the first example"],
    "segments": ["segments ignored", "segments also causal"],
    "prefix": ["prefix as causal"],
    "bias": ["bias dropped", "bias of the first head", "bias without gradient"],
    "ALiBi": ["slope of the first head", "slopes without gradient"],
    "forget gate": ["gates without gradient"],
    "causal soft cap": ["cap after the mask"],
    "sinks": ["sinks dropped"],
    "grouped heads": ["grouped heads in turn"],
    "late queries": ["queries counted from 0"],
    "dropout": ["dropout ignored", "one draw for all examples", "one draw for all keys", "kept weights not scaled"],
    "NaN behind the mask": ["NaN reaches the result"],
    "large scores": ["no shift"],
    "bfloat16": ["scores in the input type"],
}
FAULTS = {fault: feature for feature, faults in OF_FEATURES.items() for fault in faults}
FAULTS |= {"softmax in bfloat16": "plain", "output in bfloat16": "plain"}


def with_fault(fault: str):
    """`attention` with a fault."""
    return functools.partial(attention, fault=fault)
