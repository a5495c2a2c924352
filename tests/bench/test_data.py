"""The measure of how fast batches come runs, and refuses what it cannot run."""

import json

import pytest

from attnlab.bench.__main__ import main


def test_it_prints_a_table_and_keeps_flat_figures(tiny, tmp_path, capsys):
    options = [tiny, "--rounds=2", "--seconds=1", "--batches=50", f"--json={tmp_path}/figures.json"]
    assert main(["bench", "data", *options]) == 0
    assert "waiting" in capsys.readouterr().out
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert set(figures) == {f"{name}_tiny" for name in ("ratio_data", "data_wait_share", "step_ms", "batch_ms")}
    assert 0 < figures["data_wait_share_tiny"] < 1 and min(figures.values()) > 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--sizes=medium"], "--sizes: 'medium' is unknown: use small, large"),
        (["--batches=0"], "--batches=0: expected 1 or more"),
    ],
)
def test_a_mistake_is_one_line(capsys, arguments, message):
    assert main(["bench", "data", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
