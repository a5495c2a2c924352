"""Other people's attention, each asked for the same in its own words."""

import functools
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

import attnlab
from attnlab.masks import Causal, Segments, SlidingWindow


class Task(NamedTuple):
    """What every contender is to compute.

    Attributes:
      mask: "causal"; "window", causal with `window` keys before a query; or "documents", causal within each document.
      q, k, v, d_out: `[B, T, H, D]`, inputs and the gradient of the output.
      window: keys before a query, for "window".
      ids: int32 `[B, T]`, the document of each row, for "documents".
    """

    mask: str
    q: jax.Array
    k: jax.Array
    v: jax.Array
    d_out: jax.Array
    window: int
    ids: jax.Array


class Contender(NamedTuple):
    """Functions without arguments.

    Attributes:
      forward: returns the output, `[B, T, H, D]`.
      backward: forward and backward; returns the gradients of q, k and v. None where there is none.
    """

    forward: Callable
    backward: Callable | None


def installed() -> list[str]:
    """The names of the contenders whose packages are installed, ours first."""
    return [name for name, (package, _) in PEERS.items() if importlib.util.find_spec(package) is not None]


def enter(name: str, task: Task) -> Contender:
    """The contender of that name, ready for the task."""
    return PEERS[name][1](task)


def _jax(attend, task, *data) -> Contender:
    """`attend(q, k, v, *data)`; what comes as data is not known to the compiler."""
    forward = jax.jit(attend)

    @jax.jit
    def backward(q, k, v, d_out, *data):
        return jax.vjp(lambda q, k, v: attend(q, k, v, *data), q, k, v)[1](d_out)

    return Contender(
        functools.partial(forward, task.q, task.k, task.v, *data),
        functools.partial(backward, task.q, task.k, task.v, task.d_out, *data),
    )


def _ours(impl, task):
    def attend(q, k, v, *ids):
        mask = {"causal": Causal(), "window": SlidingWindow(task.window)}.get(task.mask)
        mask = Causal() & Segments(*ids) if mask is None else mask
        return attnlab.attention(q, k, v, mask, impl=impl)

    return _jax(attend, task, *((task.ids,) if task.mask == "documents" else ()))


def _jax_nn(task, attend=jax.nn.dot_product_attention):
    if task.mask == "documents":
        same = lambda ids: ids[:, None, :, None] == ids[:, None, None, :]  # noqa: E731
        return _jax(lambda q, k, v, ids: attend(q, k, v, mask=same(ids), is_causal=True), task, task.ids)
    window = (task.window, 0) if task.mask == "window" else None
    return _jax(functools.partial(attend, is_causal=True, local_window_size=window), task)


def _tokamax(task):
    import tokamax
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # or tokamax reads this command's flags as its own
    return _jax_nn(task, functools.partial(tokamax.dot_product_attention, implementation="xla_chunked"))


def _attnax(task):
    import attnax

    def attend(q, k, v, *ids):
        mods = [attnax.causal_mod()]
        if task.mask == "window":
            mods = [attnax.sliding_window_mod(task.window + 1)]
        mods += [attnax.document_mask_mod(*ids)] if ids else []
        mod = attnax.compose_score_mods(*mods)
        out = attnax.flash_attention(*(x.swapaxes(1, 2) for x in (q, k, v)), score_mod=mod)
        return out.swapaxes(1, 2)

    return _jax(attend, task, *((task.ids,) if task.mask == "documents" else ()))


def _torch_tensors(task):
    import torch

    return [torch.tensor(np.asarray(x)).transpose(1, 2).contiguous() for x in task[1:5]]


def _torch_visible(task):
    import torch

    i, j = torch.arange(task.q.shape[1])[:, None], torch.arange(task.q.shape[1])[None]
    ids = torch.tensor(np.asarray(task.ids))
    seen = {
        "causal": lambda: j <= i,
        "window": lambda: (j <= i) & (i - j <= task.window),
        "documents": lambda: (j <= i) & (ids[:, None, :, None] == ids[:, None, None, :]),
    }
    return seen[task.mask]()


def _torch_sdpa(task):
    import torch

    q, k, v, d_out = _torch_tensors(task)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    mask = {"is_causal": True} if task.mask == "causal" else {"attn_mask": _torch_visible(task)}

    @torch.no_grad()
    def forward():
        return sdpa(q, k, v, **mask).transpose(1, 2)

    def backward():
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(sdpa(*inputs, **mask), inputs, d_out)

    return Contender(forward, backward)


def _torch_flex(task):
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v, _ = _torch_tensors(task)
    batch, _, length, _ = q.shape
    ids = torch.tensor(np.asarray(task.ids))
    rules = {
        "causal": lambda b, h, i, j: j <= i,
        "window": lambda b, h, i, j: (j <= i) & (i - j <= task.window),
        "documents": lambda b, h, i, j: (j <= i) & (ids[b, i] == ids[b, j]),
    }
    lead = batch if task.mask == "documents" else None
    block_mask = create_block_mask(rules[task.mask], lead, None, length, length, device="cpu")
    compiled = torch.compile(flex_attention)

    @torch.no_grad()
    def forward():
        return compiled(q, k, v, block_mask=block_mask).transpose(1, 2)

    return Contender(forward, None)  # on CPUs it has no backward


# By name: the package it needs, and how it enters.
PEERS = {
    "attnlab": ("attnlab", functools.partial(_ours, "auto")),
    "attnlab dense": ("attnlab", functools.partial(_ours, "dense")),
    "jax.nn": ("jax", _jax_nn),
    "torch SDPA": ("torch", _torch_sdpa),
    "torch FlexAttention": ("torch", _torch_flex),
    "tokamax": ("tokamax", _tokamax),
    "attnax": ("attnax", _attnax),
}


def output(contender: Contender) -> np.ndarray:
    """What it computes, `[B, T, H, D]`; compiles on the way."""
    return np.asarray(contender.forward())
