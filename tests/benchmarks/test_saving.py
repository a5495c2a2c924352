"""The benchmark of saving. No test asserts a time."""

import re

import pytest

from attnlab.bench import main


@pytest.mark.slow
def test_saving_prints_the_cost_of_a_save(capsys):
    sizes = ["model.num_layers=1", "model.width=16", "model.context=16", "batch_size=4"]
    overrides = [f"--config.{size}" for size in sizes]
    assert main(["bench", "saving", "--config=quickstart", *overrides, "--rounds=1", "--seconds=1"]) == 0
    out = capsys.readouterr().out
    assert "saving: round 1 of 1" in out
    assert re.search(r"quickstart: a block takes .* s, with a save .* s: one save costs .* % of a minute", out)
