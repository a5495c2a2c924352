"""torch's attention: SDPA and FlexAttention. Imports nothing of attnlab, so that any Python that has torch can run it.

    python torchattention.py

A worker process: see `serving.py`, beside this file, for the protocol.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch


class Task(NamedTuple):
    """The inputs of one benchmark, as tensors.

    Attributes:
      mask: as in `peers.py`, beside this file.
      q, k, v, d_out: `[B, H, T, D]`, inputs and the gradient of the output.
      window: how many keys before each query are visible, if `mask` is "window".
      ids: `[B, T]`, the document of each token, for "documents".
    """

    mask: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    d_out: torch.Tensor
    window: int
    ids: torch.Tensor


def task(mask: str, arrays, window: int, ids, device: str = "cpu", dtype: str = "float32") -> Task:
    """Make a task from arrays q, k, v and d_out `[B, T, H, D]`, and ids `[B, T]`."""
    place = {"device": device, "dtype": getattr(torch, dtype)}
    tensors = [torch.tensor(np.asarray(x)).to(**place).transpose(1, 2).contiguous() for x in arrays]
    return Task(mask, *tensors, window, torch.tensor(np.asarray(ids), device=device))


def sdpa(task: Task) -> tuple[Callable, Callable]:
    """scaled_dot_product_attention as two functions without arguments.

    Returns:
      (forward, backward): the first returns the output, `[B, T, H, D]`; the second runs forward and backward, and
      returns the gradients of q, k and v, `[B, H, T, D]`.
    """
    batch, _, length, _ = task.q.shape
    at = {"device": task.q.device}
    if _mod(task):
        raise ValueError("it has no score mods")
    if task.mask == "causal":
        mask = {"is_causal": True}
    else:
        b, i = torch.arange(batch, **at)[:, None, None, None], torch.arange(length, **at)
        mask = {"attn_mask": _rule(task)(b, None, i[:, None], i)}
    return _passes(task, lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, **mask))


def flex(task: Task) -> tuple[Callable, Callable | None]:
    """Like `sdpa`, for FlexAttention; backward is None on CPUs, where torch does not implement it."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    batch, _, length, _ = task.q.shape
    lead = batch if task.mask == "documents" else None
    block_mask = create_block_mask(_rule(task), lead, None, length, length, device=task.q.device)
    torch._dynamo.reset()  # after eight shapes torch stops compiling and runs eagerly
    compiled, mod = torch.compile(flex_attention, dynamic=False), _mod(task)
    forward, backward = _passes(task, lambda q, k, v: compiled(q, k, v, score_mod=mod, block_mask=block_mask))
    return forward, None if task.q.device.type == "cpu" else backward


def _rule(task):
    return {
        "window": lambda b, h, i, j: (j <= i) & (i - j <= task.window),
        "documents": lambda b, h, i, j: (j <= i) & (task.ids[b, i] == task.ids[b, j]),
    }.get(task.mask, lambda b, h, i, j: j <= i)


def _mod(task):
    slopes = 2.0 ** (-8 * torch.arange(1, task.q.shape[1] + 1, device=task.q.device) / task.q.shape[1])
    return {
        "soft cap": lambda score, b, h, i, j: 30.0 * torch.tanh(score / 30.0),
        "alibi": lambda score, b, h, i, j: score - slopes[h] * (i - j),
    }.get(task.mask)


def _passes(task, attend):
    @torch.no_grad()
    def forward():
        return attend(task.q, task.k, task.v).transpose(1, 2)

    def backward():
        inputs = [x.detach().requires_grad_() for x in (task.q, task.k, task.v)]
        return torch.autograd.grad(attend(*inputs), inputs, task.d_out)

    return forward, backward


class Contenders:
    """torch's contenders, by name; they take one task at a time.

    Args:
      device: "cpu" or "cuda".
    """

    ENTER = {"torch SDPA": sdpa, "torch FlexAttention": flex}  # noqa: RUF012

    def __init__(self, device):
        if device == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("torch finds no GPU: give a Python whose torch does with --peer_python")
        self.device, self.entered = device, {}

    def versions(self):
        """Versions of torch and of the device, for the report."""
        device = torch.cuda.get_device_name() if self.device == "cuda" else "cpu"
        return {"torch": torch.__version__, "device": device}

    def take(self, folder, mask, window, dtype, shape):
        """Load a task of shape `[B, T, H, D]` from a folder: q.npy, k.npy, v.npy, d_out.npy, and the ids in T.npy."""
        self.entered.clear()
        if self.device == "cuda":
            torch.cuda.empty_cache()  # JAX needs the memory that torch caches
        arrays = [np.load(Path(folder) / f"{name}.npy").reshape(shape) for name in ("q", "k", "v", "d_out")]
        ids = np.load(Path(folder) / f"{shape[1]}.npy")
        self.task = task(mask, arrays, window, ids, self.device, dtype)
        return {}

    def enter(self, name, folder):
        """Prepare a contender, and write its answers for one example and two heads as float32 `[1, T, 2, D]`.

        0.npy is the output; 1.npy to 3.npy are the gradients of q, k and v, where the contender has a backward pass.
        """
        forward, backward = self.ENTER[name](self.task)
        answers = [forward()] + ([x.transpose(1, 2) for x in backward()] if backward else [])
        for at, answer in enumerate(answers):
            np.save(Path(folder) / f"{at}.npy", answer[:1, :, :2].float().cpu().numpy())
        self.entered[name] = {"forward": forward, "backward": backward}
        return {"answers": len(answers)}

    def seconds(self, name, which, calls):
        """Time some calls of "forward" or "backward"."""
        call = self.entered[name][which]
        self._synchronise()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        self._synchronise()
        return {"seconds": time.perf_counter() - start}

    def _synchronise(self):
        if self.device == "cuda":
            torch.cuda.synchronize()


if __name__ == "__main__":
    from serving import serve

    serve(Contenders)
