"""nanoGPT's own model and training loop, run by any Python that has torch; imports nothing of attnlab.

    python nanogpt.py CHECKOUT

A worker process: see `serving.py`, beside this file, for the protocol.
"""

import sys

if __name__ == "__main__":
    from serving import serve

    sys.path[0] = sys.argv[1]  # in place of this file's folder, whose module names would shadow the checkout's
    import torch
    from model import GPT, GPTConfig

import contextlib
import math
import time

import numpy as np


class NanoGPT:
    """A model, its optimizer and its data, set up as `train.py` of the checkout does.

    On "cuda": TF32 for float32 products, fused AdamW, and batches from pinned memory.

    Args:
      tokens: path of a `.npy` file with the training text, `[length]`.
      num_layers, num_heads, width, context: sizes of the model.
      batch_size: sequences per step.
      vocab_size: vocabulary size of the tokenizer.
      compiled: train `torch.compile(model)`.
      device: "cpu" or "cuda".
      bfloat16: train and evaluate under `torch.amp.autocast`, as `train.py` does on GPUs, but not on CPUs.
      log_every: steps between two reads of the loss; each read waits for the device.
      schedule: `{"warmup": steps, "steps": steps in all, "last": rate}` of a learning rate that rises to 1e-3 and
        decays to `last` by half a cosine, as in `train.py`; None for 1e-3 throughout.
    """

    def __init__(
        self,
        tokens,
        num_layers,
        num_heads,
        width,
        context,
        batch_size,
        vocab_size,
        compiled,
        device="cpu",
        bfloat16=False,
        log_every=1,
        schedule=None,
    ):
        torch.manual_seed(1337)
        if device == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        self.device, self.log_every = device, log_every
        self.precision = torch.amp.autocast(device, torch.bfloat16) if bfloat16 else contextlib.nullcontext()
        self.tokens = np.load(tokens).astype(np.uint16)
        self.context, self.batch_size = context, batch_size
        config = GPTConfig(context, vocab_size, num_layers, num_heads, width, dropout=0.0, bias=False)
        self.raw = GPT(config).to(device)
        self.optimizer = self.raw.configure_optimizers(0.1, 1e-3, (0.9, 0.99), device)
        self.model = torch.compile(self.raw) if compiled else self.raw
        self.schedule, self.step = schedule, 0
        self.next = self._batch()

    def _batch(self):
        starts = torch.randint(len(self.tokens) - self.context, (self.batch_size,))
        windows = [self.tokens[i : i + self.context + 1].astype(np.int64) for i in starts]
        windows = torch.from_numpy(np.stack(windows))
        pair = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        if self.device == "cpu":
            return pair
        return tuple(x.pin_memory().to(self.device, non_blocking=True) for x in pair)

    def train(self, steps):
        """Take some steps."""
        start = time.perf_counter()
        for step in range(steps):
            self._set_rate()
            with self.precision:
                _, loss = self.model(*self.next)
            self.next = self._batch()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.raw.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            if (step + 1) % self.log_every == 0 or step + 1 == steps:
                value = loss.item()  # waits for the device
        if self.device == "cuda":
            torch.cuda.synchronize()  # the optimizer's kernels are still running when the loss is read
        return {"seconds": time.perf_counter() - start, "loss": value}

    def _set_rate(self):
        if self.schedule is None:
            return
        warmup, steps, last = (self.schedule[name] for name in ("warmup", "steps", "last"))
        if self.step < warmup:
            rate = 1e-3 * (self.step + 1) / (warmup + 1)
        else:
            share = min(1, (self.step - warmup) / (steps - warmup))
            rate = last + (1e-3 - last) * (1 + math.cos(math.pi * share)) / 2
        self.step += 1
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def evaluate(self, tokens):
        """The mean loss in nats per token on adjacent windows of a text in a `.npy` file, and the parameter count."""
        tokens = np.load(tokens).astype(np.int64)
        count = (len(tokens) - 1) // self.context
        self.raw.eval()
        total = 0.0
        with torch.no_grad():
            for first in range(0, count, 64):
                starts = range(first * self.context, min(count, first + 64) * self.context, self.context)
                windows = torch.from_numpy(np.stack([tokens[i : i + self.context + 1] for i in starts]))
                windows = windows.to(self.device)
                with self.precision:  # as `train.py` does
                    loss = self.raw(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())[1]
                total += loss.item() * len(windows)
        self.raw.train()
        return {"loss": total / count, "parameters": sum(p.numel() for p in self.raw.parameters())}


if __name__ == "__main__":
    serve(NanoGPT)
