"""User-defined studies in files: how they run, one-line errors, and results written whole or not at all."""

import errno
import io
import json
from unittest import mock

import pytest

from attnlab.study import __main__ as study
from attnlab.study.running import StudyProgress
from attnlab.support import paths
from tests.texts import STUDY

NO_STUDY = "mine.py is not a study: expected a Python file with a docstring"


@pytest.fixture
def mine(tmp_path):
    """The file of a study."""
    path = tmp_path / "mine.py"
    path.write_text(STUDY, encoding="utf-8")
    return path


def run(*argv):
    return study.main(["study", *map(str, argv)])


def test_user_study_runs_from_its_file(tmp_path, mine):
    out = tmp_path / "out"
    assert run(mine, "--fast", "--out", out) == 0
    assert sorted(path.name for path in out.iterdir()) == ["mine.csv", "mine.png", "result.json", "verdict.txt"]
    assert (out / "mine.csv").read_text() == "seed,square\n0,4\n1,9\n"
    result = json.loads((out / "result.json").read_text())
    assert result["claim"] == "Squares are larger than their roots." and result["held"] and result["seeds"] == 2
    assert result["setup"] == "For whole numbers from 2." and result["fast"] and "jax" in result["versions"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_user_study_shows_its_docstring_as_help(mine, capsys):
    assert run(mine, "--help") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Squares are larger than their roots.") and "--fast" in printed


@pytest.mark.parametrize(
    "content, message",
    [
        ("def measure(", "mine.py: SyntaxError: '(' was never closed (mine.py, line 1)"),
        ("import nowhere", "mine.py, line 1: ModuleNotFoundError: "),
        (STUDY.replace(STUDY[3 : STUDY.index("import")], '   """\n'), NO_STUDY),
        (STUDY.replace("rows = [", "raise SystemExit(0)\n    rows = ["), "line 13: SystemExit: 0"),
        ('"""A claim."""', NO_STUDY),
        (STUDY.replace("(seed + 2) ** 2", "1 // seed"), "line 13: ZeroDivisionError: integer"),
        (STUDY.replace("return plots", "plots"), "None: expected rows, a Verdict and a matplotlib figure"),
    ],
    ids=["syntax", "import", "blank docstring", "exit", "part", "measure", "no figure"],
)
def test_fault_in_a_user_study_prints_one_line(tmp_path, mine, mistake, content, message):
    mine.write_text(content, encoding="utf-8")
    assert message in mistake(study.main, mine, "--out", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["mine.py"]


def test_missing_file_prints_one_line(tmp_path, mistake):
    assert "none.py: no such file; expected a study" in mistake(study.main, tmp_path / "none.py")
    assert "'' is not a study: expected one of" in mistake(study.main, "")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"name": "mine"'])
def test_damaged_result_prints_one_line(tmp_path, mine, mistake, content):
    (tmp_path / "out" / "mine").mkdir(parents=True)
    (tmp_path / "out" / "mine" / "result.json").write_text(content)
    line = mistake(study.main, "all", f"--only={mine}", "--out", tmp_path / "out")
    assert "mine/result.json is not a study's result (" in line


def test_study_killed_while_writing_has_no_result_and_runs_again(tmp_path, mine, monkeypatch):
    def killed(path, text):
        if path.name == "result.json":
            raise KeyboardInterrupt
        path.write_text(text)

    with monkeypatch.context() as patch:
        patch.setattr(paths, "write_text", killed)
        assert run(mine, "--out", tmp_path / "out") == 130
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["mine.csv", "mine.png", "verdict.txt"]
    assert run(mine, "--out", tmp_path / "out") == 0 and (tmp_path / "out" / "result.json").exists()
    assert run(mine, "--out", tmp_path / "out") == 2  # is not empty


def test_study_writes_through_a_link(tmp_path, mine):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / ".hidden").touch()
    (tmp_path / "link").symlink_to("here")
    assert run(mine, "--out", tmp_path / "link") == 0
    names = sorted(path.name for path in (tmp_path / "here").iterdir())
    assert names == [".hidden", "mine.csv", "mine.png", "result.json", "verdict.txt"]


def test_full_disk_is_not_blamed_on_the_study(tmp_path, mine, monkeypatch, mistake):
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device", "out/mine.csv"))
    monkeypatch.setattr(paths, "write_csv", full)
    assert mistake(study.main, mine, "--out", tmp_path / "out").startswith("error: No space left on device: ")
    assert not (tmp_path / "out").exists()


def test_user_study_may_define_modules_with_postponed_annotations(tmp_path, mine):
    """Dataclasses, such as Flax modules, look up their annotations in `sys.modules`."""
    module = "import flax.linen as nn\n\n\nclass Layer(nn.Module):\n    width: int\n"
    imports = "from __future__ import annotations\n\nimport time\n" + module
    mine.write_text(STUDY.replace("import time\n", imports), encoding="utf-8")
    assert run(mine, "--out", tmp_path / "out") == 0


def test_progress_shows_the_share_done_and_the_time_left():
    now, printed = [0.0], io.StringIO()
    with StudyProgress(printed, lambda: now[0]) as progress:
        advance = progress.expect(10)
        for _ in range(10):
            now[0] += 12
            advance()
    lines = printed.getvalue().splitlines()
    assert lines[:3] == [
        f"{done} % done, about {left} left" for done, left in ((10, "2 min"), (20, "96 s"), (30, "84 s"))
    ]
    assert len(lines) == 9
