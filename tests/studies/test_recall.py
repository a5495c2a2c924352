"""The study of associative recall: its mixer, its verdict, and a run."""

import jax
import numpy as np
import pytest

from attnlab._studies import recall
from attnlab._studies.recall import CONVOLUTION, LINEAR, MIXERS, RECURRENT, SOFTMAX, Size
from attnlab.study.report import Options

SOLVED = {SOFTMAX: {4: 16, 8: 16, 16: 16}, LINEAR: {4: 32, 8: 32, 16: 64}, RECURRENT: {}, CONVOLUTION: {4: 64}}


def rows(solved=SOLVED):
    """Two seeds of each mixer that recall from the given width on, and below it the less the more pairs there are."""
    return [
        {
            "mixer": mixer,
            "width": width,
            "seed": seed,
            "pairs": pairs,
            "recalled": 0.95 if width >= solved[mixer].get(pairs, 1000) else 1 / pairs + 0.01 * seed,
        }
        for mixer in MIXERS
        for width in (16, 32, 64)
        for seed in (0, 1)
        for pairs in (4, 8, 16)
    ]


def test_recall_verdict_holds_on_rows_of_the_claim():
    verdict = recall.judge(rows())
    assert verdict.held and len(verdict.parts) == 5, str(verdict)


REFUTED = {
    "softmax needs to grow": (0, {SOFTMAX: {4: 16, 8: 16, 16: 32}}),
    "linear does not grow": (1, {LINEAR: {4: 32, 8: 32, 16: 32}}),
    "GRU recalls all": (3, {RECURRENT: {4: 16, 8: 16, 16: 16}}),
    "convolution recalls all": (4, {CONVOLUTION: {4: 16, 8: 16, 16: 16}}),
}


@pytest.mark.parametrize("name", REFUTED)
def test_recall_verdict_fails_where_one_part_is_refuted(name):
    part, solved = REFUTED[name]
    verdict = recall.judge(rows(SOLVED | solved))
    assert [held for held, _ in verdict.parts] == [at != part for at in range(5)], str(verdict)


def test_recall_verdict_fails_where_more_pairs_are_no_harder():
    same = [row | {"recalled": 0.5} if row["mixer"] == LINEAR and row["width"] == 16 else row for row in rows()]
    assert [held for held, _ in recall.judge(same).parts] == [True, True, False, True, True]


def test_recall_verdict_needs_other_mixers_as_wide_as_softmax():
    solved = SOLVED | {SOFTMAX: {4: 32, 8: 32, 16: 32}}
    narrow = [row for row in rows(solved) if row["mixer"] != RECURRENT or row["width"] == 16]
    assert [held for held, _ in recall.judge(narrow).parts] == [True, True, True, False, True]


def test_recall_figure_has_a_title_and_labels():
    figure = recall.draw(rows())
    assert "The more pairs" in figure.get_suptitle()
    assert len(figure.axes) == 3 and all(axes.get_xlabel() and axes.get_ylabel() for axes in figure.axes)


def test_recall_gated_convolution_equals_formula(float64):
    x = np.random.default_rng(0).standard_normal((2, 7, 4))
    out, variables = jax.jit(recall.GatedConv().init_with_output)(jax.random.key(0), x)
    params = jax.tree.map(np.asarray, variables["params"])
    convolved = np.zeros_like(x)
    for i in range(7):
        for j in range(i + 1):
            convolved[:, i] += params["kernel"][i - j] * x[:, j]
    gated = convolved * (x @ params["gate"]["kernel"] + params["gate"]["bias"])
    np.testing.assert_allclose(out, gated @ params["out"]["kernel"] + params["out"]["bias"], rtol=1e-10)


@pytest.mark.campaign
def test_recall_run_is_judged_drawn_and_repeatable(monkeypatch, run_fast):
    size = Size(seeds=2, steps=2, widths=(4,), widths_of_others=(4,), batch_size=2, examples=32)
    monkeypatch.setattr(recall, "FAST", size)
    monkeypatch.setattr(recall, "MIXERS", {name: MIXERS[name] for name in (SOFTMAX, LINEAR)})  # compiling takes long
    measured = run_fast(recall)
    assert len(measured) == 2 * 2 * 3
    monkeypatch.setattr(recall, "MIXERS", {LINEAR: MIXERS[LINEAR]})
    assert recall.measure(Options(fast=True)) == [row for row in measured if row["mixer"] == LINEAR]


@pytest.mark.campaign
def test_recall_fast_run_shows_that_linear_attention_needs_width():
    verdict = recall.judge(recall.measure(Options(fast=True)))
    assert verdict.held, str(verdict)
