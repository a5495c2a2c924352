"""Losses of short runs, recorded when these programs were last known to be right.

After an intended change of losses, record them again: python -m tests.training.test_golden_losses
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest

from attnlab import train
from attnlab.training import metrics

GOLDEN = Path(__file__).with_name("golden_losses.json")
QUICK = {"steps": 80, "eval.windows": 16, "sample.length": 0, "log.tensorboard": False, "log.peak_tflops": 1.0}
QUICK |= {"precision": "float32", "parallel.mesh.data": 1}
SMALL = QUICK | {"steps": 20, "model.num_layers": 2, "model.width": 32, "model.context": 32, "batch_size": 8}
SMALL |= {"model.dropout": 0.1, "optimizer.warmup_steps": 5, "model.scan": False}
LARGE = QUICK | {"steps": 2, "batch_size": 1, "optimizer.accumulation": 1, "eval.windows": 1, "precision": "bfloat16"}
LOCAL = {"model.local.window": 8, "model.local.kv_heads": 2, "model.local.qk_norm": False}
RUNS = {
    "quickstart": ("quickstart", QUICK),
    "llama_tiny": ("llama_tiny", QUICK),
    "gpt2_124m": ("gpt2_124m", LARGE),
    "accumulation": ("quickstart", SMALL | {"optimizer.accumulation": 4}),
    "documents": ("quickstart", SMALL | {"data.packing": "documents"}),
    "local": ("llama_tiny", SMALL | {"model.layers": "local attention", "model.num_layers": 5} | LOCAL),
    "loop": ("llama_tiny", SMALL | {"model.scan": True, "model.attention.value_residual": True, "model.num_layers": 5}),
}
# Rounding differs between processors and compilers, and training amplifies it. In float32, on JAX 0.10 and 0.12, with
# XLA's optimizations and without, losses differ by up to 2e-6 in twenty steps and up to 0.08 in two hundred, and the
# mean of fifty by up to 6e-3; in bfloat16 by 2e-4 in two steps. A wrong model is off by more at once.
EARLY, ROUNDING, ROUNDING_BFLOAT16, DRIFT_OF_MEAN = 20, 1e-5, 2e-3, 0.02


def losses(name: str, folder: Path) -> list[float]:
    """The training loss of each step of a run."""
    words = np.random.default_rng(0).integers(97, 123, (400, 6), np.uint8)
    drawn = np.random.default_rng(1).zipf(1.3, 40_000) % len(words)
    lines = np.array_split([bytes(words[word][: 2 + word % 5]).decode() for word in drawn], 2_000)
    (folder / "text.txt").write_text("\n".join(" ".join(line) for line in lines))
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": " ".join(line)}) for line in lines))
    experiment, fields = RUNS[name]
    text = "text.jsonl" if fields.get("data.packing") == "documents" else "text.txt"
    fields = {"log.every": 1, "data.path": folder / text} | fields
    flags = [f"--config.{field}={value}" for field, value in fields.items()]
    assert train.main(["train", f"--config={experiment}", f"--workdir={folder / name}", *flags]) == 0
    return [record["loss"] for record in metrics.read(folder / name / "metrics.jsonl") if record["split"] == "train"]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_losses_are_as_recorded(name, tmp_path):
    recorded, now = json.loads(GOLDEN.read_text())[name], losses(name, tmp_path)
    rounding = ROUNDING_BFLOAT16 if RUNS[name][1]["precision"] == "bfloat16" else ROUNDING
    np.testing.assert_allclose(now[:EARLY], recorded[:EARLY], rtol=0, atol=rounding)
    assert len(now) == len(recorded)
    assert np.mean(now[-50:]) == pytest.approx(np.mean(recorded[-50:]), abs=DRIFT_OF_MEAN)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        GOLDEN.write_text(json.dumps({name: losses(name, Path(folder)) for name in RUNS}, indent=1) + "\n")
