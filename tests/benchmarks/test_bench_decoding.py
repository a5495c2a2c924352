"""The benchmark of generation. No test asserts a time."""

import json

import numpy as np
import pytest

from attnlab import bench
from attnlab._benchmarks import decoding
from attnlab.data.tokenizers import make
from attnlab.loading import Run
from attnlab.nn import GPT
from tests.parameters import parameters

TINY = ({"vocab_size": 256, "num_layers": 1, "num_heads": 2, "width": 8, "context": 16}, 6, 8)


def run(*argv):
    return bench.main(["bench", "decoding", *map(str, argv)])


def test_contenders_generate_what_they_are_named_after(monkeypatch):
    monkeypatch.setitem(decoding.SIZES, "tiny", TINY)
    contenders, tokens = decoding.batches("tiny")
    assert contenders["one"]().shape == (tokens, 1) and contenders["eight"]().shape == (tokens, 8)


@pytest.mark.slow
def test_contenders_with_and_without_drafts_generate_the_same(monkeypatch):
    monkeypatch.setattr(decoding, "PASSAGE", 10)
    model = GPT(**TINY[0])
    params = parameters(model, np.zeros((1, 1), np.int32))
    for contenders in decoding.drafts(Run(model, params, make("byte", ""), None), draft=3, tokens=20).values():
        np.testing.assert_array_equal(contenders["plain"](), contenders["draft"]())


@pytest.mark.slow
def test_decoding_writes_tables_and_figures(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(decoding, "SIZES", {"tiny": TINY})
    path = tmp_path / "decoding.json"
    assert run("--rounds=1", "--tokens=20", "--train_steps=3", f"--json={path}") == 0
    figures = json.loads(path.read_text())
    names = {f"ratio_{label}" for label in ("batch_tiny", "draft_repeating", "draft_ordinary")}
    assert {name for name in figures if name.startswith("ratio")} == names and min(figures.values()) > 0
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flag, message",
    [("--draft=0", "--draft=0"), ("--sizes=huge", "huge"), ("--workdir=/no/such/run", "holds no run")],
    ids=["draft", "sizes", "workdir"],
)
def test_wrong_flag_is_one_line(capsys, flag, message):
    assert run(flag) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
