"""Attention functions of other libraries, and how to call each; `attnlab conform NAME` finds them here."""

import functools
import importlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnlab import masks
from attnlab.ops.call import AttentionCall
from attnlab.ops.dense import visibility
from attnlab.testing.subject import Unsupported, as_attnlab


class Peer(NamedTuple):
    """An attention function.

    Attributes:
      load: imports and returns the function.
      adapter: returns its keyword arguments for a call.
      package: the package whose version is reported.
    """

    load: Callable[[], Callable]
    adapter: Callable[[AttentionCall], dict]
    package: str


def pairs(call: AttentionCall):
    """The mask of a call as a bool array `[B, H, Tq, Tk]`, for functions that take one; None without a mask.

    >>> call = AttentionCall(*3 * [np.ones((1, 2, 1, 4), np.float32)], mask=masks.Causal())
    >>> pairs(call)[0, 0].astype(int)
    Array([[1, 0],
           [1, 1]], dtype=int32)
    """
    _, visible = visibility(call)
    return None if visible is None else jnp.broadcast_to(visible, (*call.batch, call.num_heads, *call.lengths))


def _refuse(call: AttentionCall, **offered) -> None:
    """Raise Unsupported if a call has a part that is not `offered`, because the function has no argument for it."""
    parts = {
        "score mods": bool(call.score_mods),
        "sinks": call.sinks is not None,
        "dropout": bool(call.dropout_rate),
        "bias": call.bias is not None,
        "scale": call.scale is not None,
        "grouped heads": call.k.shape[-2] != call.num_heads,
    }
    for name, is_used in parts.items():
        if is_used and not offered.get(name.split()[-1], False):
            raise Unsupported(f"it has no {name}")


def _is_plainly_causal(call: AttentionCall) -> bool:
    return isinstance(call.mask, masks.Causal) and call.q_positions is None and call.kv_positions is None


def _jax_nn(call: AttentionCall) -> dict:
    _refuse(call, bias=True, scale=True, heads=True)
    bias = call.bias if call.bias is None or call.bias.ndim == 4 else call.bias[None, None]
    kwargs = {"query": call.q, "key": call.k, "value": call.v, "bias": bias, "scale": call.scale}
    kwargs["return_residual"] = True  # the lse
    if _is_plainly_causal(call):
        return kwargs | {"is_causal": True}
    if isinstance(call.mask, masks.SlidingWindow) and call.q_positions is None:
        return kwargs | {"local_window_size": (call.mask.left, call.mask.right)}
    if isinstance(call.mask, masks.Padding):
        return kwargs | {"key_value_seq_lengths": call.mask.lengths}
    return kwargs | {"mask": pairs(call)}


def _linen(call: AttentionCall) -> dict:
    _refuse(call, bias=True, dropout=True)
    kwargs = {"query": call.q, "key": call.k, "value": call.v, "bias": call.bias, "mask": pairs(call)}
    if call.dropout_rate:
        key = jax.random.wrap_key_data(call.dropout_keys)
        kwargs |= {"dropout_rate": call.dropout_rate, "dropout_rng": key, "broadcast_dropout": False}
        kwargs["deterministic"] = False
    return kwargs


def _nnx(call: AttentionCall) -> dict:
    kwargs = _linen(call)
    return kwargs | {"mask": None, "is_causal": True} if _is_plainly_causal(call) else kwargs


def _tokamax(call: AttentionCall) -> dict:
    kwargs = _jax_nn(call.replace(score_mods=()))
    del kwargs["return_residual"]
    caps = [mod.cap for mod in call.score_mods if hasattr(mod, "cap")]
    if len(caps) != len(call.score_mods):
        raise Unsupported("the only score mod it has is the soft cap")
    return kwargs | ({"logits_soft_cap": caps[0]} if caps else {})


def _torch(call: AttentionCall) -> dict:
    _refuse(call, bias=True, scale=True, heads=True)
    if _is_plainly_causal(call) and call.bias is None:
        return {"q": call.q, "k": call.k, "v": call.v, "is_causal": True, "scale": call.scale}
    bias, mask = call.bias, pairs(call)
    if bias is not None and mask is not None:
        raise Unsupported("it takes a mask or a bias, not both")
    return {"q": call.q, "k": call.k, "v": call.v, "bias": bias, "mask": mask, "scale": call.scale}


def _torch_sdpa() -> Callable:
    """Wrap torch's function, on NumPy arrays, as a JAX function with torch's gradients."""
    torch = importlib.import_module("torch")
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def tensor(x, requires_grad=False):
        if x is None:
            return None
        x = np.asarray(x)
        if x.dtype.name == "bfloat16":
            result = torch.from_numpy(x.astype(np.float32)).to(torch.bfloat16)
        else:
            result = torch.from_numpy(x.copy())
        return result.requires_grad_(requires_grad) if result.is_floating_point() else result

    def numpy(x, like):
        return x.detach().to(torch.float32).numpy().astype(like.dtype)

    def run(options, arrays, mask, d_out=None):
        q, k, v, bias = (tensor(x, d_out is not None) for x in arrays)
        with torch.enable_grad():
            out = sdpa(
                *(x.transpose(1, 2) for x in (q, k, v)),
                attn_mask=tensor(mask) if bias is None else bias,
                enable_gqa=q.shape[2] != k.shape[2],
                **options,
            ).transpose(1, 2)
        if d_out is None:
            return numpy(out, arrays[0])
        out.backward(tensor(d_out))
        return tuple(None if x is None else numpy(t.grad, x) for x, t in zip(arrays, (q, k, v, bias)))

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def function(options, arrays, mask):
        q, _, v, _ = arrays
        shape = jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype)
        called = functools.partial(run, dict(options))
        return jax.pure_callback(called, shape, arrays, mask, vmap_method="sequential")

    def backward(options, saved, d_out):
        arrays, mask = saved
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
        called = functools.partial(run, dict(options))
        return jax.pure_callback(called, shapes, arrays, mask, d_out, vmap_method="sequential"), None

    function.defvjp(lambda options, arrays, mask: (function(options, arrays, mask), (arrays, mask)), backward)

    def attention(q, k, v, bias=None, mask=None, is_causal=False, scale=None):
        options = (("is_causal", is_causal), ("scale", None if scale is None else float(scale)))
        return function(options, (q, k, v, bias), mask)

    return attention


def _of(module: str, name: str) -> Callable[[], Callable]:
    return lambda: getattr(importlib.import_module(module), name)


PEERS = {
    "attnlab.attention": Peer(_of("attnlab", "attention"), as_attnlab, "attnlab"),
    "jax.nn.dot_product_attention": Peer(_of("jax.nn", "dot_product_attention"), _jax_nn, "jax"),
    "flax.linen.dot_product_attention": Peer(_of("flax.linen", "dot_product_attention"), _linen, "flax"),
    "flax.nnx.dot_product_attention": Peer(_of("flax.nnx", "dot_product_attention"), _nnx, "flax"),
    "tokamax.dot_product_attention": Peer(_of("tokamax", "dot_product_attention"), _tokamax, "tokamax"),
    "torch.nn.functional.scaled_dot_product_attention": Peer(_torch_sdpa, _torch, "torch"),
}
