"""The study of state tracking: its verdict, and a run."""

import pytest

from attnlab._studies import state_tracking
from attnlab._studies.state_tracking import MIXERS, NEGATIVE, POSITIVE, SOFTMAX, TIMES, Size
from attnlab.study.report import Options

SOLVED = {SOFTMAX: 0.5, POSITIVE: 0.55, NEGATIVE: 0.98}


def rows(solved=SOLVED):
    """Three seeds of each mixer, all right at the trained length."""
    return [
        {"mixer": mixer, "seed": seed, "times": times, "right": 1.0 if times == 1 else solved[mixer] + 0.004 * seed}
        for mixer in MIXERS
        for seed in range(3)
        for times in TIMES
    ]


def test_state_tracking_verdict_holds_on_rows_of_the_claim():
    verdict = state_tracking.judge(rows())
    assert verdict.held and len(verdict.parts) == 3, str(verdict)


@pytest.mark.parametrize(
    "part, solved", [(0, {NEGATIVE: 0.8}), (1, {POSITIVE: 0.9}), (2, {SOFTMAX: 0.9})], ids=[NEGATIVE, POSITIVE, SOFTMAX]
)
def test_state_tracking_verdict_fails_where_one_part_is_refuted(part, solved):
    verdict = state_tracking.judge(rows(SOLVED | solved))
    assert [held for held, _ in verdict.parts] == [at != part for at in range(3)], str(verdict)


def test_state_tracking_verdict_is_of_the_best_seed_and_tells_how_many():
    late = [row | {"right": 0.5} if row["mixer"] == NEGATIVE and row["seed"] else row for row in rows()]
    verdict = state_tracking.judge(late)
    assert verdict.held and "1 of 3 seeds" in verdict.parts[0][1], str(verdict)


def test_state_tracking_figure_has_a_title_and_labels():
    figure = state_tracking.draw(rows())
    assert "β ≤ 2" in figure.get_suptitle()
    assert len(figure.axes) == 1 and figure.axes[0].get_xlabel() and figure.axes[0].get_ylabel()


@pytest.mark.campaign
def test_state_tracking_run_is_judged_drawn_and_repeatable(monkeypatch, run_fast):
    monkeypatch.setattr(state_tracking, "FAST", Size(seeds=2, steps=2, batch_size=2, examples=8))
    measured = run_fast(state_tracking)
    assert len(measured) == 3 * 2 * len(TIMES)
    monkeypatch.setattr(state_tracking, "MIXERS", {NEGATIVE: MIXERS[NEGATIVE]})
    assert state_tracking.measure(Options(fast=True)) == [row for row in measured if row["mixer"] == NEGATIVE]


@pytest.mark.campaign
def test_state_tracking_fast_run_holds():
    verdict = state_tracking.judge(state_tracking.measure(Options(fast=True)))
    assert verdict.held, str(verdict)
