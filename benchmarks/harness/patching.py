"""attnlab's own activation patching.

    python -m attnlab.bench.patching

A worker process: see `serving.py`, beside this file, for the protocol.
"""

import time

import numpy as np

from attnlab import see
from attnlab.loading import load

from . import serving


class Patching:
    """A GPT-2 on two prompts.

    Args:
      folder: a Hugging Face GPT-2.
      prompts: path of a `.npy` file, int `[2, T]`: the clean prompt, and the corrupt one.
      answers: two tokens, whose difference of logits at the last position is the metric.
      last: compute the logits of the last position alone.
    """

    def __init__(self, folder, prompts, answers, last=False):
        self.model, self.params, *_ = load(folder)
        self.clean, self.corrupt = np.load(prompts)[:, None]
        right, wrong = answers
        # One function for all calls, as a new one would be compiled again.
        self.metric = lambda logits: logits[0, -1, right] - logits[0, -1, wrong]
        self.positions = (-1,) if last else None

    def patch(self):
        """The metric with each head's z of the clean run, `[L, H]`."""
        start = time.perf_counter()
        effects = see.patch(self.model, self.params, self.clean, self.corrupt, self.metric, positions=self.positions)
        return {"seconds": time.perf_counter() - start, "values": effects.values.tolist()}


def work() -> None:
    """Answer requests."""
    serving.serve(Patching)
