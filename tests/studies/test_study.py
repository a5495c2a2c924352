"""The study command: output files, error messages, and the verdict of each study."""

import csv
import re

import jax.numpy as jnp
import numpy as np
import pytest

from attnlab._studies import scaling
from attnlab.results.statistics import Interval
from attnlab.study import __main__ as study
from attnlab.study import registry
from attnlab.study.report import Verdict
from attnlab.support import progress


def run(*argv):
    return study.main(["study", *argv])


def test_unknown_study_suggests_and_lists_names(mistake):
    line = mistake(study.main, "scalling")
    assert "'scalling' is not a study (did you mean scaling?)" in line and all(
        name in line for name in registry.STUDIES
    )


def test_help_lists_every_claim(capsys):
    assert run() == 0
    assert "Dividing q·k by √d_k" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["scaling", "--fats"], "Unknown command line flag 'fats'. Did you mean: fast ? (see --help)\n"),
        (["scaling", "--path=quijote.txt"], "--path=quijote.txt: scaling does not train on a text: remove this flag\n"),
        (["heads", "--fast", "--out={}/new", "--path=nowhere.txt"], "data.path = 'nowhere.txt': no such file"),
    ],
)
def test_bad_option_prints_one_line(tmp_path, mistake, options, message):
    assert message in mistake(study.main, *(option.format(tmp_path) for option in options))


def test_study_writes_table_figure_and_verdict_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE_INTERVAL", 0)
    monkeypatch.setattr(scaling, "WIDTHS", scaling.WIDTHS[scaling.WIDTHS <= 1000])  # the largest are slow
    out = tmp_path / "new" / "folder"
    assert run("scaling", "--fast", "--out", str(out)) == 0
    assert sorted(path.name for path in out.iterdir()) == ["result.json", "scaling.csv", "scaling.png", "verdict.txt"]
    with (out / "scaling.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 90 and set(rows[0]) == {"seed", "d_k", "scale", "variance", "jacobian_norm"}
    assert (out / "scaling.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr()
    assert "the claim holds" in (out / "verdict.txt").read_text() and "the claim holds" in printed.out
    assert re.match(r"\d+ % done, .* left\n", printed.err) and " left" not in printed.out

    before = (out / "scaling.csv").read_bytes()
    assert run("scaling", "--fast", "--out", str(out)) == 2
    assert "is not empty" in capsys.readouterr().err
    assert (out / "scaling.csv").read_bytes() == before


@pytest.mark.parametrize("name, tokens", [("heads", 65), ("pruning", 130)])
def test_short_text_prints_one_line_before_any_training(tmp_path, mistake, name, tokens):
    (tmp_path / "short.txt").write_text("the cat sat. " * 40, encoding="utf-8")
    line = mistake(study.main, name, "--fast", f"--path={tmp_path}/short.txt", f"--out={tmp_path}/out")
    assert f"is shorter than {tokens} tokens" in line


def test_verdict_holds_only_if_every_part_does():
    assert Verdict.of((True, "a"), (np.True_, "b")).held
    assert str(Verdict.of((True, "a"), (False, "b"))) == "the claim does not hold\n  held    a\n  failed  b"
    assert Verdict.of((True, "a")).title("Found") == "Found"
    assert Verdict.of((True, "a"), (False, "b")).title("Found") == "Not as claimed: b"


def test_interval_uses_students_t():
    interval = Interval.of(jnp.array([1.0, 2.0, 4.0]))
    # The quantile for 2 degrees of freedom is 4.302653 (tables); three values have a variance of 7/3.
    margin = 4.302653 * (7 / 9) ** 0.5
    assert interval == pytest.approx((7 / 3, 7 / 3 - margin, 7 / 3 + margin, 3), rel=1e-6)
    assert str(Interval.of([2.0])) == "2.000 (one seed)"


def test_interval_of_no_values_or_a_matrix_raises_one_line():
    for values in ([], np.ones((2, 3))):
        with pytest.raises(ValueError, match="values have shape"):
            Interval.of(values)


def test_every_study_states_a_claim_and_has_all_parts():
    for module in map(registry.load, registry.STUDIES):
        claim = registry.claim(module)
        assert claim.endswith(".") and len(claim) <= 120
        assert all(getattr(module, part).__doc__ for part in ("measure", "judge", "draw"))
