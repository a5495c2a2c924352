"""nanoGPT's worker, on a checkout whose model is a stand-in."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from attnlab._benchmarks.harness import nanogpt, workers

MODEL = """
import torch


class GPTConfig:
    def __init__(self, context, vocab_size, *sizes, **options):
        self.vocab_size = vocab_size


class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.table = torch.nn.Embedding(config.vocab_size, config.vocab_size)

    def configure_optimizers(self, decay, rate, betas, device):
        return torch.optim.SGD(self.parameters(), lr=rate)

    def forward(self, tokens, targets):
        logits = self.table(tokens)
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_nanogpt_trains_the_model_of_a_checkout(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    np.save(tmp_path / "tokens.npy", np.arange(200) % 50)
    sizes = {"num_layers": 1, "num_heads": 1, "width": 8, "context": 8, "batch_size": 2}
    worker = workers.Worker([sys.executable, str(Path(nanogpt.__file__)), str(tmp_path)], tmp_path / "log")
    try:
        tokens = str(tmp_path / "tokens.npy")
        schedule = {"warmup": 1, "steps": 3, "last": 1e-4}
        assert worker.ask("start", tokens=tokens, vocab_size=50, compiled=False, schedule=schedule, **sizes) == {}
        before = worker.ask("evaluate", tokens=tokens)
        trained = worker.ask("train", steps=2)
        assert trained["seconds"] > 0 and 0 < trained["loss"] < 10
        after = worker.ask("evaluate", tokens=tokens)
        assert after["loss"] < before["loss"] < 10 and after["parameters"] == 50 * 50
    finally:
        worker.close()
