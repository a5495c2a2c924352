"""The benchmark of mixers. No test asserts a time."""

import json

import numpy as np
import pytest

from attnlab import bench
from attnlab._benchmarks.harness import workers


def run(*argv):
    return bench.main(["bench", "mixers", *map(str, argv)])


@pytest.mark.slow
def test_mixers_write_a_table_and_figures(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(workers, "quickstart_text", lambda: (np.arange(2_000) % 9, 9))
    path = tmp_path / "mixers.json"
    assert run("--rounds=1", "--seconds=1", "--mixers=attention,gru", f"--json={path}") == 0
    figures = json.loads(path.read_text())
    assert min(figures.values()) > 0 and len(figures) == 2 * 4
    assert figures["state_bytes_gru"] < figures["state_bytes_attention"]
    assert "compile_seconds" in capsys.readouterr().out


@pytest.mark.parametrize("flag, message", [("--mixers=mamba", "mamba"), ("--rounds=0", "--rounds=0")])
def test_wrong_flag_is_one_line(capsys, flag, message):
    assert run(flag) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
