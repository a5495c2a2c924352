"""The race of sampling runs, and refuses what it cannot run."""

import json

import pytest

from attnlab.bench.__main__ import main


def test_the_race_prints_a_table_and_keeps_flat_figures(tiny, peer, tmp_path, capsys):
    options = [tiny, *peer(), "--tokens=12", "--num_samples=2", "--rounds=2", f"--json={tmp_path}/figures.json"]
    assert main(["bench", "decode", *options]) == 0
    out = capsys.readouterr().out
    assert "sampling, 2 × 12 tokens" in out and "first token, ms" in out
    figures = json.loads((tmp_path / "figures.json").read_text())
    rates = {"tokens_per_second_tiny_attnlab", "tokens_per_second_tiny_nanoGPT"}
    assert set(figures) == rates | {"ratio_decode_tiny", "first_token_ms_tiny"}
    assert figures["tokens_per_second_tiny_nanoGPT"] == 2 * 12 / 2
    first, all_of_them = figures["first_token_ms_tiny"], 2 * 12e3 / figures["tokens_per_second_tiny_attnlab"]
    assert 0 < first < all_of_them


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--sizes=medium"], "--sizes: 'medium' is unknown: use small, large"),
        (["--tokens=0"], "--tokens=0: expected 1 or more"),
        (["--num_samples=0"], "--num_samples=0: expected 1 or more"),
        (["--peer_path=/nowhere"], "--peer_path=/nowhere holds no model.py: name a checkout of nanoGPT"),
    ],
)
def test_a_mistake_is_one_line(capsys, arguments, message):
    assert main(["bench", "decode", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
