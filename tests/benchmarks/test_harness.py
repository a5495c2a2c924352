"""Counts of the benchmarks, and their records."""

import importlib.util
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags

from attnlab._benchmarks.harness import gpu_operator, nanogpt, peers, recording, tables, workers
from attnlab._benchmarks.harness.matrix_products import of_program
from attnlab.ops.cpu import products
from attnlab.support.errors import UserError

REPOSITORY = Path(__file__).parents[2]


def test_ratio_is_the_median_of_ratios_within_rounds():
    assert tables.ratio({"a": [2.0, 30.0, 8.0], "b": [1.0, 10.0, 4.0]}, "a", "b") == 2


def test_flops_count_visible_pairs():
    task = gpu_operator.make_task("documents", 2, 50, 3, 4, "bfloat16", 7)
    visible = jax.jit(lambda: peers.mask_of(task, task.ids).dense(50, 50, batch=(2,), num_heads=3))()
    pairs = np.broadcast_to(visible, (2, 3, 50, 50)).sum()
    assert gpu_operator.flops_of(task, "forward") == pairs * 2 * 2 * 4
    assert gpu_operator.flops_of(task, "backward") == pairs * 7 * 2 * 4


def test_products_are_counted_in_loops_and_by_their_axes():
    def program(x, w):
        def layer(x, w):
            return products.dot_general(x, w, (((1,), (0,)), ((), ()))), None

        return jax.lax.scan(layer, x, w)[0].sum()

    x, w = jnp.ones((5, 4)), jnp.ones((3, 4, 4))
    tally = of_program(jax.make_jaxpr(jax.grad(program, argnums=1))(x, w))
    forward, for_x, for_w = (1, 0), (1, 1), (0, 0)
    counts = {axes: sum(n for product, n in tally.items() if product.axes == axes) for axes in (forward, for_x, for_w)}
    assert counts == {forward: 3, for_x: 3, for_w: 3}
    assert {product.flops for product in tally} == {2 * 5 * 4 * 4}


def record(folder, benchmark: str, cases: dict) -> dict:
    """Record cases in a folder, as a benchmark with --record does; returns the file's content."""
    values = flags.FlagValues()
    recording.define(values)
    values(["bench", f"--record={folder}"])
    recording.check(values)
    recording.add(values, benchmark, cases)
    return json.loads((folder / recording.file_name(recording.machine())).read_text())


def test_record_replaces_its_cases_and_keeps_the_others(tmp_path):
    record(tmp_path, "train", {"small": {"ms": 1.0, "mib": None}, "large": {"ms": 2.0}})
    record(tmp_path, "products", {"small": {"ms": 3.0}})
    results = record(tmp_path, "train", {"small": {"faster_ms": 1 / 3, "by": {"x": 2}}})
    assert results["machine"] == recording.machine()
    small, large = results["benchmarks"]["train"]["small"], results["benchmarks"]["train"]["large"]
    assert small["figures"] == {"faster_ms": 0.333333, "by": {"x": 2}} and large["figures"] == {"ms": 2.0}
    assert results["benchmarks"]["products"]["small"]["figures"] == {"ms": 3.0}
    assert set(small) == {"date", "versions", "idle", "busy_cores_before", "stolen_cores", "figures"}


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "is not a record of benchmarks"),
        (json.dumps({"machine": recording.machine() | {"cores": 999}, "benchmarks": {}}), "its cores is 999, not"),
    ],
    ids=["damaged", "another machine"],
)
def test_record_leaves_other_files_alone(tmp_path, content, message):
    file = tmp_path / recording.file_name(recording.machine())
    file.write_text(content)
    with pytest.raises(UserError, match=message):
        record(tmp_path, "products", {})
    assert file.read_text() == content


def test_documentation_page_shows_the_records(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "docs")
    import recorded

    text = recorded.PAGE.read_text(encoding="utf-8")
    assert recorded.START in text and recorded.END in text
    assert recorded.page(text, recorded.records(recorded.FOLDER)) == text, "run `python docs/recorded.py`"


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
