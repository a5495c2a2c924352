"""Studies of users, in files: what runs, what is one line, and that results are written whole or not at all."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attnlab.study import __main__ as study

MINE = '''"""Squares are larger than their roots.

For whole numbers from 2.
"""

import time
from attnlab import plots
from attnlab.study.report import Verdict


def measure(options):
    advance = options.progress(2)
    rows = [{"seed": seed, "square": (seed + 2) ** 2} for seed in (0, 1)]
    advance(2)
    return rows


def judge(rows):
    return Verdict.of((all(row["square"] > row["seed"] + 2 for row in rows), "all are <larger>"))


def draw(rows):
    return plots.lines({"square": ([0, 1], [row["square"] for row in rows])}, "Larger", x="seed", y="square")
'''


@pytest.fixture
def mine(tmp_path):
    """The file of a study."""
    path = tmp_path / "mine.py"
    path.write_text(MINE, encoding="utf-8")
    return path


def run(*argv):
    return study.main(["study", *map(str, argv)])


def test_study_of_a_user_runs_from_its_file(tmp_path, mine):
    out = tmp_path / "out"
    assert run(mine, "--fast", "--out", out) == 0
    assert sorted(path.name for path in out.iterdir()) == ["mine.csv", "mine.png", "result.json", "verdict.txt"]
    assert (out / "mine.csv").read_text() == "seed,square\n0,4\n1,9\n"
    result = json.loads((out / "result.json").read_text())
    assert result["claim"] == "Squares are larger than their roots." and result["held"] and result["seeds"] == 2
    assert result["setup"] == "For whole numbers from 2." and result["fast"] and "jax" in result["versions"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_study_of_a_user_shows_its_docstring_as_help(mine, capsys):
    assert run(mine, "--help") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Squares are larger than their roots.") and "--fast" in printed


@pytest.mark.parametrize(
    "content, message",
    [
        ("def measure(", "mine.py, line 1: SyntaxError"),
        ("import nowhere", "mine.py, line 1: ModuleNotFoundError: "),
        ("x = 1", "mine.py has no docstring"),
        ('"""A claim."""', "mine.py has no function measure"),
        (MINE.replace("(seed + 2) ** 2", "1 // seed"), "line 13: ZeroDivisionError: integer"),
        (MINE.replace("return rows", "return []"), "mine: measure returned []"),
        (MINE.replace("return plots", "plots"), "mine: draw returned None"),
    ],
    ids=["syntax", "import", "docstring", "part", "measure", "no rows", "no figure"],
)
def test_fault_of_a_user_study_is_one_line(tmp_path, mine, capsys, content, message):
    mine.write_text(content, encoding="utf-8")
    assert run(mine, "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["mine.py"]


def test_missing_file_and_name_of_an_own_study_are_one_line(tmp_path, capsys):
    assert run(tmp_path / "none.py") == 2
    assert "none.py: no such file; expected a study" in capsys.readouterr().err
    (tmp_path / "scaling.py").write_text(MINE)
    assert run(tmp_path / "scaling.py") == 2
    assert "scaling is the name of one of attnlab's studies: rename the file" in capsys.readouterr().err


@pytest.mark.slow
def test_killed_study_leaves_no_result(tmp_path, mine):
    mine.write_text(MINE.replace("    advance(2)", "    time.sleep(60)\n    advance(2)"), encoding="utf-8")
    command = [sys.executable, "-m", "attnlab.study", str(mine), f"--out={tmp_path / 'out'}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "Squares are larger than their roots.\n"
        time.sleep(1)
        child.send_signal(signal.SIGKILL)
    assert list((tmp_path / "out").iterdir()) == []
    mine.write_text(MINE, encoding="utf-8")
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # an empty folder is no obstacle
    assert (tmp_path / "out" / "result.json").exists()


def test_result_is_the_last_file_to_appear(tmp_path, mine, monkeypatch):
    moved = []
    replace = os.replace

    def watched(source, target):
        if Path(target).parent == tmp_path / "out":
            moved.append(Path(target).name)
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    assert run(mine, "--out", tmp_path / "out") == 0
    assert sorted(moved) == ["mine.csv", "mine.png", "result.json", "verdict.txt"] and moved[-1] == "result.json"


def test_study_writes_through_a_link(tmp_path, mine):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / ".hidden").touch()
    (tmp_path / "link").symlink_to("here")
    assert run(mine, "--out", tmp_path / "link") == 0
    names = sorted(path.name for path in (tmp_path / "here").iterdir())
    assert names == [".hidden", "mine.csv", "mine.png", "result.json", "verdict.txt"]


def test_full_disk_is_not_the_fault_of_the_study(tmp_path, mine, monkeypatch, capsys):
    def full(path, rows):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("attnlab.study.running.write_csv", full)
    assert run(mine, "--out", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: No space left on device: ") and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_study_of_a_user_may_define_modules_with_postponed_annotations(tmp_path, mine):
    """Dataclasses, such as Flax modules, look up their annotations in `sys.modules`."""
    module = "import flax.linen as nn\n\n\nclass Layer(nn.Module):\n    width: int\n"
    imports = "from __future__ import annotations\n\nimport time\n" + module
    mine.write_text(MINE.replace("import time\n", imports), encoding="utf-8")
    assert run(mine, "--out", tmp_path / "out") == 0
