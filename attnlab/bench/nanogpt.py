"""nanoGPT's own model under its own training loop and sampler, for a Python that has torch; nothing of attnlab.

    python nanogpt.py CHECKOUT

A request a line on stdin and an answer a line on stdout, both JSON; see `attnlab.bench.workers`.
"""

import sys

if __name__ == "__main__":
    sys.path[0] = sys.argv[1]  # and not the folder of this file
    import torch
    from model import GPT, GPTConfig

import contextlib
import json
import time

import numpy as np


class NanoGPT:
    """A model, its optimizer and its data, as `train.py` and `sample.py` of the checkout set them up.

    On "cuda" that is bfloat16 with TF32 where something is float32, fused AdamW, and batches from pinned memory.
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
        self.next = self._batch()

    def _batch(self):
        starts = torch.randint(len(self.tokens) - self.context, (self.batch_size,))
        rows = [self.tokens[i : i + self.context + 1].astype(np.int64) for i in starts]
        rows = torch.from_numpy(np.stack(rows))
        pair = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        if self.device == "cpu":
            return pair
        return tuple(x.pin_memory().to(self.device, non_blocking=True) for x in pair)

    def train(self, steps):
        start = time.perf_counter()
        for step in range(steps):
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
            torch.cuda.synchronize()  # the optimizer works on after the loss
        return {"seconds": time.perf_counter() - start, "loss": value}

    def decode(self, tokens, samples):
        self.raw.eval()
        start = time.perf_counter()
        prompt = torch.zeros((samples, 1), dtype=torch.long, device=self.device)
        self.raw.generate(prompt, tokens, temperature=0.8, top_k=200)
        if self.device == "cuda":
            torch.cuda.synchronize()
        self.raw.train()
        return {"seconds": time.perf_counter() - start}


def main():
    """Answers until its input ends."""
    answers, sys.stdout = sys.stdout, sys.stderr  # the model prints
    contender = None
    for line in sys.stdin:
        request = json.loads(line)
        what = request.pop("do")
        with contextlib.redirect_stdout(sys.stderr):
            if what == "start":
                contender = NanoGPT(**request)
                answer = {"parameters": sum(p.numel() for p in contender.raw.parameters())}
            else:
                answer = getattr(contender, what)(**request)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
