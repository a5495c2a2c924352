"""nanoGPT's own model under its own training loop and sampler, for a Python that has torch; nothing of attnlab.

    python nanogpt.py CHECKOUT

A request a line on stdin and an answer a line on stdout, both JSON; see `attnlab.bench.workers`.
"""

import sys

if __name__ == "__main__":
    sys.path[0] = sys.argv[1]  # and not the folder of this file, whose profile.py would hide Python's
    import torch
    from model import GPT, GPTConfig

import contextlib
import json
import time

import numpy as np


class NanoGPT:
    """A model, its optimizer and its data, as `train.py` and `sample.py` of the checkout set them up."""

    def __init__(self, tokens, num_layers, num_heads, width, context, batch_size, vocab_size, compiled):
        torch.manual_seed(1337)
        self.tokens = np.load(tokens).astype(np.uint16)
        self.context, self.batch_size = context, batch_size
        config = GPTConfig(context, vocab_size, num_layers, num_heads, width, dropout=0.0, bias=False)
        self.raw = GPT(config)
        self.optimizer = self.raw.configure_optimizers(0.1, 1e-3, (0.9, 0.99), "cpu")
        self.model = torch.compile(self.raw) if compiled else self.raw
        self.next = self._batch()

    def _batch(self):
        starts = torch.randint(len(self.tokens) - self.context, (self.batch_size,))
        rows = [self.tokens[i : i + self.context + 1].astype(np.int64) for i in starts]
        rows = torch.from_numpy(np.stack(rows))
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def train(self, steps):
        start = time.perf_counter()
        for _ in range(steps):
            _, loss = self.model(*self.next)
            self.next = self._batch()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.raw.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            value = loss.item()
        return {"seconds": time.perf_counter() - start, "loss": value}

    def decode(self, tokens, samples):
        self.raw.eval()
        start = time.perf_counter()
        self.raw.generate(torch.zeros((samples, 1), dtype=torch.long), tokens, temperature=0.8, top_k=200)
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
