"""The benchmark of seeds side by side. No test asserts a time."""

import json

import jax
import numpy as np
import pytest

from attnlab import bench
from attnlab._benchmarks import seeds

TINY = seeds.Size(layers=1, heads=1, width=8, batch_size=2, length=8, steps=2)


def run(*argv):
    return bench.main(["bench", "seeds", *map(str, argv)])


@pytest.mark.slow
def test_contenders_train_the_same_models():
    """Equal batches and updates, in another order of sums: 2 steps of Adam at 1e-3 stay within 1e-4."""
    results = {name: contender() for name, contender in seeds.contenders(TINY, seeds=2, calls=1).items()}
    (_, together), (_, by_vmap) = results["side by side"], results["vmap"]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), together, by_vmap)
    for at in range(2):
        own = jax.tree.map(lambda leaf, at=at: leaf[at], together)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), results["stepwise"][at], own)
        (_, alone) = results["one by one"][at]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a[0], b, atol=1e-4), alone, own)


@pytest.mark.slow
def test_seeds_writes_a_table_and_figures(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(seeds, "SIZES", {"tiny": TINY})
    path = tmp_path / "seeds.json"
    assert run("--sizes=tiny", "--seeds=2", "--rounds=1", f"--json={path}") == 0
    figures = json.loads(path.read_text())
    assert figures["speedup_tiny_one_by_one"] == 1 and figures["ms_tiny_side_by_side"] > 0
    assert "times as fast" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flag, message",
    [("--seeds=0", "--seeds=0"), ("--sizes=huge", "huge"), ("--rounds=-1", "--rounds=-1")],
    ids=["seeds", "sizes", "rounds"],
)
def test_wrong_flag_is_one_line(capsys, flag, message):
    assert run(flag) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
