"""A tenth of each campaign of faults, with real processes; and that a campaign sees what it looks for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from attnlab.bench import faults
from attnlab.bench.__main__ import main
from attnlab.bench.watched import PHASES, Board

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("campaign, count", [("kills", 10), ("stops", 4), ("corruptions", 20), ("commands", 100)])
def test_a_tenth_of_a_campaign_finds_nothing_wrong(tmp_path, campaign, count):
    figures = tmp_path / "faults.json"
    command = [sys.executable, "-m", "attnlab.bench", "faults", f"--{campaign}={count}", f"--json={figures}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(figures.read_text())[campaign]
    assert found["wrong"] == []
    if campaign == "kills":
        assert sum(found["phases"].values()) == count and len([n for n in found["phases"].values() if n]) > 5


@pytest.mark.slow
def test_what_differs_between_two_runs_is_seen(tmp_path):
    fields = faults.SHORT | {"steps": 8, "checkpoint.every": 4, "eval.every": 4}
    for name, more in (("one", {}), ("same", {}), ("other", {"seed": 1})):
        code, _, error = faults._command(faults.train, faults._arguments(tmp_path / name, fields | more))
        assert code == 0, error
    assert faults._differences(tmp_path / "same", tmp_path / "one") == []
    assert any("metrics.jsonl differs" in line for line in faults._differences(tmp_path / "other", tmp_path / "one"))
    assert any("optimizer's state" in line for line in faults._differences(tmp_path / "other", tmp_path / "one"))


def test_a_board_is_seen_from_both_sides(tmp_path):
    here, there = Board(str(tmp_path / "board")), Board(str(tmp_path / "board"))
    with here.phase("evaluation"), here.phase("commit", slot=1):
        assert there.phases() == ["evaluation", "commit"]
    here.step = 12345
    assert there.step == 12345 and there.phases() == []
    there.clear()
    assert here.step == 0 and set(PHASES) >= {"start", "rename", "pruning"}


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "nothing to do: give --kills, --stops, --corruptions or --commands"),
        (["--kills=-1"], "--kills=-1: expected 0 or more"),
        (["--kills=x"], "flag --kills=x"),
        (["--json=README.md", "--kills=1"], "--json=README.md is there already"),
    ],
)
def test_a_mistake_is_one_line(capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(REPOSITORY)
    assert main(["bench", "faults", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
