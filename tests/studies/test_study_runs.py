"""Runs of the studies: small runs are repeatable, and runs with --fast show what they can at that size."""

import matplotlib.pyplot as plt
import pytest

from attnlab.study import registry
from attnlab.study.fitting import Size
from attnlab.study.report import Options
from attnlab.support.paths import write_csv

# By study: attributes that make it small. The other studies take minutes.
SMALL = {
    "gradient_step": {"BATCH": 8, "EVALUATED": 200},
    "norms": {"FAST": Size(seeds=1, steps=300)},
    "rank": {},
    "scaling": {},
    "training": {"FAST": Size(seeds=1, steps=300)},
}
SIZES = {  # of studies with their own `Size`
    "gradient_step": lambda size: size(2, 20),
    "rank": lambda size: size(2),
}
# The parts of a claim that hold with --fast, None for all; others need the full study.
HELD = dict.fromkeys(("alignment", "complexity", "norms", "positions", "scaling", "training"))
HELD |= dict.fromkeys(("copying", "heads", "pruning", "roles"), ())
HELD |= {name: range(4) for name in ("dispersion", "gradient_step", "grokking", "sinks")}
HELD |= {"induction": range(7), "markov": (0, 3), "overwriting": range(3), "rank": range(6), "recall": range(5)}
HELD |= {"state_tracking": range(3)}
COUNTEREXAMPLES = {  # changes of measured rows that refute a claim; `test_claims.py` has those of the other studies
    "alignment": lambda row: row | {"aligned": 0.9 * row["aligned"]},
    "complexity": lambda row: row | {"flops": row.get("flops") and row["flops"] * row["n"] ** 0.2},
    "heads": lambda row: row | {"loss": 2.0},
    "norms": lambda row: row | {"hijacked": 0.03},
    "positions": lambda row: row | ({"loss": 2.0} if row["what"] == "extrapolation" else {}),
    "scaling": lambda row: row | {"scale": {"none": "√d_k", "√d_k": "none"}.get(row["scale"], row["scale"])},
    "training": lambda row: row | {"matrix": {"Q": "V", "V": "Q", "K": "W", "W": "K"}[row["matrix"]]},
}


def run_fast(study, folder) -> list[dict]:
    """The rows of a run with --fast; its progress ends at its total, and its rows are judged, drawn and written."""
    totals, done = [], []

    def announce(total):
        totals.append(total)
        return lambda amount=1: done.append(amount)

    rows = study.measure(Options(fast=True, progress=announce))
    assert len(totals) == 1 and totals[0] > 0 and sum(done) == pytest.approx(totals[0])
    assert study.judge(rows).parts
    figure = study.draw(rows)
    drawn = [axes for axes in figure.axes if axes.lines]
    assert figure.get_suptitle() and all(axes.get_xlabel() and axes.get_ylabel() for axes in drawn)
    figure.savefig(folder / "figure.png")
    plt.close(figure)
    write_csv(folder / "rows.csv", rows)
    return rows


def check(study, rows, name):
    """Check that the expected parts hold, and that other rows refute the claim."""
    verdict = study.judge(rows)
    held = range(len(verdict.parts)) if HELD[name] is None else HELD[name]
    assert all(verdict.parts[part][0] for part in held), str(verdict)
    if name in COUNTEREXAMPLES:
        assert not study.judge([COUNTEREXAMPLES[name](row) for row in rows]).held


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_small_run_is_judged_drawn_and_repeatable(name, monkeypatch, tmp_path):
    study = registry.load(name)
    for part, smaller in SMALL[name].items():
        monkeypatch.setattr(study, part, smaller)
    if name not in SIZES:
        check(study, run_fast(study, tmp_path), name)
        return
    monkeypatch.setattr(study, "FAST", SIZES[name](study.Size))
    rows = run_fast(study, tmp_path)
    assert study.measure(Options(fast=True)) == rows


@pytest.mark.campaign
@pytest.mark.parametrize("name", HELD)
def test_fast_run_holds_the_parts_expected_at_its_size(name, tmp_path):
    study = registry.load(name)
    check(study, run_fast(study, tmp_path), name)
