"""The benchmark of the linear recurrence. No test asserts a time."""

import json

import pytest

from attnlab import bench

TINY = ("--rounds=1", "--lengths=8,16", "--heads=1", "--head_dim=4", "--longest_softmax=8")


def run(*argv):
    return bench.main(["bench", "recurrence", *map(str, argv)])


@pytest.mark.slow
def test_recurrence_writes_tables_and_figures(tmp_path, capsys):
    path = tmp_path / "recurrence.json"
    assert run(*TINY, "--chunks=4,8", f"--json={path}") == 0
    figures = json.loads(path.read_text())["us_a_token"]
    assert list(figures) == [f"T = {n}, {which}" for n in (8, 16) for which in ("forward", "forward + backward")]
    assert "softmax" in figures["T = 8, forward"] and "softmax" not in figures["T = 16, forward"]
    assert len(figures["T = 16, forward"]) == 2 * 6 and min(figures["T = 16, forward"].values()) > 0
    assert "microseconds a token" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flag, message", [("--members=mamba", "mamba"), ("--lengths=0", "lengths"), ("--rounds=0", "--rounds=0")]
)
def test_wrong_flag_is_one_line(capsys, flag, message):
    assert run(flag) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
