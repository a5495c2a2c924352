"""torch's attention, asked in torch's words; nothing of attnlab, so that any Python that has torch can run it.

    python torchattention.py

A request a line on stdin and an answer a line on stdout, both JSON; see `attnlab.bench.workers`.
"""

import contextlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch


class Task(NamedTuple):
    """What is to be computed.

    Attributes:
      mask: "causal", "window" or "documents", as in `attnlab.bench.peers`.
      q, k, v, d_out: `[B, H, T, D]`, inputs and the gradient of the output.
      window: keys before a query, for "window".
      ids: `[B, T]`, the document of each row, for "documents".
    """

    mask: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    d_out: torch.Tensor
    window: int
    ids: torch.Tensor


def task(mask: str, arrays, window: int, ids, device: str = "cpu", dtype: str = "float32") -> Task:
    """A task of arrays q, k, v and d_out `[B, T, H, D]`, and ids `[B, T]`."""
    place = {"device": device, "dtype": getattr(torch, dtype)}
    tensors = [torch.tensor(np.asarray(x)).to(**place).transpose(1, 2).contiguous() for x in arrays]
    return Task(mask, *tensors, window, torch.tensor(np.asarray(ids), device=device))


def sdpa(task: Task) -> tuple[Callable, Callable]:
    """(forward, forward and backward): `[B, T, H, D]`, and the gradients of q, k and v `[B, H, T, D]`."""
    batch, _, length, _ = task.q.shape
    at = {"device": task.q.device}
    if task.mask == "causal":
        mask = {"is_causal": True}
    else:
        b, i = torch.arange(batch, **at)[:, None, None, None], torch.arange(length, **at)
        mask = {"attn_mask": _rule(task)(b, None, i[:, None], i)}
    return _passes(task, lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, **mask))


def flex(task: Task) -> tuple[Callable, Callable | None]:
    """As `sdpa`; on CPUs FlexAttention has no backward."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    batch, _, length, _ = task.q.shape
    lead = batch if task.mask == "documents" else None
    block_mask = create_block_mask(_rule(task), lead, None, length, length, device=task.q.device)
    torch._dynamo.reset()  # after eight shapes it would compile no more, and run eagerly
    compiled = torch.compile(flex_attention, dynamic=False)
    forward, backward = _passes(task, lambda q, k, v: compiled(q, k, v, block_mask=block_mask))
    return forward, None if task.q.device.type == "cpu" else backward


def _rule(task):
    return {
        "causal": lambda b, h, i, j: j <= i,
        "window": lambda b, h, i, j: (j <= i) & (i - j <= task.window),
        "documents": lambda b, h, i, j: (j <= i) & (task.ids[b, i] == task.ids[b, j]),
    }[task.mask]


def _passes(task, attend):
    @torch.no_grad()
    def forward():
        return attend(task.q, task.k, task.v).transpose(1, 2)

    def backward():
        inputs = [x.detach().requires_grad_() for x in (task.q, task.k, task.v)]
        return torch.autograd.grad(attend(*inputs), inputs, task.d_out)

    return forward, backward


class Contenders:
    """Those of a task, by name."""

    ENTER = {"torch SDPA": sdpa, "torch FlexAttention": flex}  # noqa: RUF012

    def start(self, device):
        if device == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("its torch sees no GPU")
        self.device, self.entered = device, {}
        name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        return {"torch": torch.__version__, "device": name}

    def take(self, folder, mask, window, dtype):
        """The arrays of a folder, q.npy and so on, become the task."""
        self.entered.clear()
        if self.device == "cuda":
            torch.cuda.empty_cache()  # what torch keeps, JAX cannot have
        *arrays, ids = (np.load(Path(folder) / f"{name}.npy") for name in ("q", "k", "v", "d_out", "ids"))
        self.task = task(mask, arrays, window, ids, self.device, dtype)
        return {}

    def enter(self, name, folder):
        """Writes 0.npy, the output, and 1.npy to 3.npy, the gradients where there are any, float32 `[B, T, H, D]`."""
        forward, backward = self.ENTER[name](self.task)
        answers = [forward()] + ([x.transpose(1, 2) for x in backward()] if backward else [])
        for at, answer in enumerate(answers):
            np.save(Path(folder) / f"{at}.npy", answer.float().cpu().numpy())
        self.entered[name] = {"forward": forward, "backward": backward}
        return {"answers": len(answers)}

    def seconds(self, name, which, calls):
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


def main():
    """Answers until its input ends; {"error": why} to what cannot be done."""
    answers, contenders = sys.stdout, Contenders()
    for line in sys.stdin:
        request = json.loads(line)
        with contextlib.redirect_stdout(sys.stderr):
            try:
                answer = getattr(contenders, request.pop("do"))(**request)
            except Exception as error:  # whatever torch fails with, the other contenders are to go on
                said = str(error).strip().splitlines() or [""]
                answer = {"error": f"{type(error).__name__}: {said[0]}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
