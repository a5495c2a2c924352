"""The command: what it writes, what it refuses, and what each study finds out."""

import csv
import os
import subprocess
import sys

import numpy as np
import pytest

from attnlab.study import __main__ as study
from attnlab.study import report
from attnlab.study.report import Options, Verdict


def run(*argv):
    return study.main(["study", *argv])


def test_an_unknown_study_lists_those_there_are(capsys):
    assert run("scalling") == 2
    error = capsys.readouterr().err
    assert error == (
        "error: 'scalling' is no study (did you mean scaling?): there are alignment, complexity, heads, norms, "
        "positions, roles, scaling, training\n"
    )


@pytest.mark.parametrize("help_flag", [[], ["--help"], ["scaling", "--help"]])
def test_help_says_what_each_claims(capsys, help_flag):
    assert run(*help_flag) == 0
    assert "Dividing q·k by √d_k" in capsys.readouterr().out


def test_a_wrong_flag_is_one_line(capsys):
    assert run("scaling", "--fats") == 2
    assert capsys.readouterr().err == "error: --fats is no flag (did you mean fast?); see --help\n"


def test_a_study_leaves_a_table_a_figure_and_a_verdict(tmp_path, capsys):
    out = tmp_path / "new" / "folder"
    assert run("scaling", "--fast", "--out", str(out)) == 0
    assert sorted(path.name for path in out.iterdir()) == ["scaling.csv", "scaling.png", "verdict.txt"]
    with (out / "scaling.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 120 and set(rows[0]) == {"seed", "d_k", "scale", "variance", "jacobian_norm"}
    assert (out / "scaling.png").read_bytes().startswith(b"\x89PNG")
    assert "the claim holds" in (out / "verdict.txt").read_text() and "the claim holds" in capsys.readouterr().out

    before = (out / "scaling.csv").read_bytes()
    assert run("scaling", "--fast", "--out", str(out)) == 2
    assert "holds files already, which stay as they are: choose a new folder" in capsys.readouterr().err
    assert (out / "scaling.csv").read_bytes() == before


def test_a_file_in_the_place_of_the_folder_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert run("scaling", "--out", str(tmp_path / "file")) == 2
    assert capsys.readouterr().err == f"error: --out={tmp_path / 'file'} is a file: name a folder\n"


def test_a_folder_that_cannot_be_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert run("scaling", "--out", str(tmp_path / "file" / "out")) == 2
    assert "cannot be written (Not a directory): choose another folder" in capsys.readouterr().err


def test_a_text_for_a_study_that_reads_none_is_one_line(tmp_path, capsys):
    assert run("scaling", "--path", "quijote.txt", "--out", str(tmp_path / "out")) == 2
    assert capsys.readouterr().err == "error: --path=quijote.txt: scaling reads no text, leave it out\n"


def test_the_name_may_come_after_flags(tmp_path, capsys):
    assert run("--fast", "--out", str(tmp_path), "scalling") == 2
    assert "error: 'scalling' is no study" in capsys.readouterr().err


def test_a_text_that_is_not_there_is_one_line(tmp_path, capsys):
    assert run("heads", "--fast", "--out", str(tmp_path / "out"), "--path", "nowhere.txt") == 2
    assert "data.path = 'nowhere.txt': no such file" in capsys.readouterr().err


def test_without_matplotlib_it_says_what_to_install(tmp_path):
    hide = "lambda name, *rest: None if name == 'matplotlib' else found(name, *rest)"
    (tmp_path / "sitecustomize.py").write_text(
        f"import importlib.util as util; found = util.find_spec; util.find_spec = {hide}"
    )
    command = [sys.executable, "-m", "attnlab.study", "scaling"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(tmp_path)}, cwd=os.getcwd()
    )
    assert (done.returncode, done.stderr) == (2, "error: studies draw with matplotlib: pip install 'attnlab[plots]'\n")


def test_a_verdict_holds_only_if_all_of_it_does():
    assert Verdict.of((True, "a"), (np.True_, "b")).held
    assert str(Verdict.of((True, "a"), (False, "b"))) == "the claim does not hold\n  held    a\n  failed  b"
    assert Verdict.of((True, "a")).title("Found") == "Found"
    assert Verdict.of((True, "a"), (False, "b")).title("Found") == "Not as claimed: b"


@pytest.mark.parametrize("name", study.STUDIES)
def test_every_study_begins_with_its_claim(name):
    module = report.load(name)
    assert report.claim(module).endswith(".") and len(report.claim(module)) <= 120
    assert all(
        callable(getattr(module, part)) and getattr(module, part).__doc__ for part in ("measure", "judge", "draw")
    )


# What `heads` and `roles` find is the text's to decide: their verdicts are only to be had.
CERTAIN = ("alignment", "complexity", "norms", "positions", "scaling", "training")

# For each study what would refute its claim: rows as they would be if it were false.
COUNTEREXAMPLES = {
    "alignment": lambda row: row | {"aligned": 0.9 * row["aligned"]},
    "complexity": lambda row: row | {"flops": row.get("flops") and row["flops"] * row["n"] ** 0.2},
    "heads": lambda row: row | {"loss": 2.0},
    "norms": lambda row: row | {"hijacked": 0.03},
    "positions": lambda row: row | ({"loss": 2.0} if row["what"] == "extrapolation" else {}),
    "roles": lambda row: row | {"weight": row["control"], "lift": 1.0},
    "scaling": lambda row: row | {"scale": {"none": "√d_k", "√d_k": "none"}.get(row["scale"], row["scale"])},
    "training": lambda row: row | {"matrix": {"Q": "V", "V": "Q", "K": "W", "W": "K"}[row["matrix"]]},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", study.STUDIES)
def test_a_fast_study_says_whether_its_claim_held(name, tmp_path):
    module = report.load(name)
    rows = module.measure(Options(fast=True))
    verdict = module.judge(rows)
    assert verdict.parts and (verdict.held or name not in CERTAIN), str(verdict)
    refuted = [COUNTEREXAMPLES[name](row) for row in rows]
    assert not module.judge(refuted).held
    report.write_csv(tmp_path / "rows.csv", rows)
    figure = module.draw(rows)
    drawn = [axes for axes in figure.axes if axes.lines]
    assert figure.get_suptitle() and all(axes.get_xlabel() and axes.get_ylabel() for axes in drawn)
    figure.savefig(tmp_path / "figure.png")
