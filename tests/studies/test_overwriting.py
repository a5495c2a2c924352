"""The study of overwritten keys: its verdict, and a run."""

import pytest

from attnlab._studies import overwriting
from attnlab._studies.overwriting import DELTA, LINEAR, MIXERS, Size
from attnlab.study.report import Options

SOLVED = {LINEAR: {0: 0.98, 8: 0.4}, DELTA: {0: 0.98, 8: 0.97}}


def rows(solved=SOLVED):
    return [
        {"mixer": mixer, "rewrites": rewrites, "seed": seed, "recalled": solved[mixer][rewrites] + 0.002 * seed}
        for mixer in MIXERS
        for rewrites in (0, 8)
        for seed in range(3)
    ]


def test_overwriting_verdict_holds_on_rows_of_the_claim():
    verdict = overwriting.judge(rows())
    assert verdict.held and len(verdict.parts) == 3, str(verdict)


@pytest.mark.parametrize(
    "part, solved",
    [
        (0, {DELTA: {0: 0.5, 8: 0.97}}),
        (1, {DELTA: {0: 0.98, 8: 0.85}}),
        (2, {LINEAR: {0: 0.98, 8: 0.9}}),
    ],
    ids=["control", DELTA, LINEAR],
)
def test_overwriting_verdict_fails_where_one_part_is_refuted(part, solved):
    verdict = overwriting.judge(rows(SOLVED | solved))
    assert [held for held, _ in verdict.parts] == [at != part for at in range(3)], str(verdict)


def test_overwriting_figure_has_a_title_and_labels():
    figure = overwriting.draw(rows())
    assert "delta rule" in figure.get_suptitle()
    assert len(figure.axes) == 1 and figure.axes[0].get_xlabel() and figure.axes[0].get_ylabel()


@pytest.mark.campaign
def test_overwriting_run_is_judged_drawn_and_repeatable(monkeypatch, run_fast):
    monkeypatch.setattr(overwriting, "FAST", Size(seeds=2, steps=2, rewrites=(0, 2), examples=8))
    measured = run_fast(overwriting)
    assert len(measured) == 2 * 2 * 2
    monkeypatch.setattr(overwriting, "MIXERS", {DELTA: MIXERS[DELTA]})
    assert overwriting.measure(Options(fast=True)) == [row for row in measured if row["mixer"] == DELTA]


@pytest.mark.campaign
def test_overwriting_fast_run_holds():
    verdict = overwriting.judge(overwriting.measure(Options(fast=True)))
    assert verdict.held, str(verdict)
