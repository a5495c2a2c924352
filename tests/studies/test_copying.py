"""The study of copying beyond the trained length: exact match, verdict, and a run."""

import jax
import numpy as np
import pytest

from attnlab._studies import copying
from attnlab._studies.copying import Size
from attnlab.data.tasks import KINDS, copies
from attnlab.nn import GPT
from attnlab.nn.fields import POSITIONS
from attnlab.study.report import Options
from tests.parameters import parameters


def rows():
    """Three seeds, trained on lengths 1 and 2 and tested up to 4; without positions they do better beyond."""
    return [
        {
            "task": task,
            "positions": positions,
            "seed": seed,
            "length": length,
            "trained": length <= 2,
            "exact match": 1.0 if length <= 2 else (0.6 if positions == "none" else 0.2) + 0.01 * seed,
        }
        for task in KINDS
        for positions in POSITIONS
        for seed in range(3)
        for length in range(1, 5)
    ]


def test_copying_verdict_holds_on_rows_of_the_claim():
    verdict = copying.judge(rows())
    assert verdict.held and len(verdict.parts) == 4, str(verdict)


@pytest.mark.parametrize(
    "part, match, value",
    [
        (0, {"task": "copy", "positions": "rotary", "trained": True}, 0.8),
        (1, {"task": "copy", "positions": "alibi", "trained": False}, 0.7),
        (2, {"task": "reverse", "positions": "none", "trained": True}, 0.5),
        (3, {"task": "reverse", "positions": "none", "trained": False}, 0.1),
        (3, {"task": "reverse", "positions": "none", "trained": False, "seed": 1}, 0.0),
    ],
    ids=["copying untrained", "alibi ahead", "reversing untrained", "none behind", "lead within the spread"],
)
def test_copying_verdict_fails_where_one_part_is_refuted(part, match, value):
    refuted = [
        row | {"exact match": value} if all(row[key] == wanted for key, wanted in match.items()) else row
        for row in rows()
    ]
    verdict = copying.judge(refuted)
    assert [held for held, _ in verdict.parts] == [at != part for at in range(4)], str(verdict)


def test_copying_figure_has_a_title_and_labels():
    figure = copying.draw(rows())
    assert "without positions" in figure.get_suptitle()
    assert len(figure.axes) == 2 and all(axes.get_xlabel() and axes.get_ylabel() for axes in figure.axes)


@pytest.mark.parametrize("task", KINDS)
def test_copying_exact_match_equals_greedy_decoding(task):
    model = GPT(5, num_layers=1, num_heads=1, width=4, context=6, positions="learned", mlp_ratio=1)
    batch = jax.device_get(copies(task, 0, batch_size=64, lengths=[1, 2], vocab_size=5))
    # Sharper, so that different sequences get different tokens.
    params = jax.tree.map(lambda leaf: 3 * leaf, parameters(model, batch.tokens))
    apply = jax.jit(model.apply)
    targets, lengths = batch.targets, batch.lengths
    # A model that is right by a bias towards its first targets, in half of the sequences.
    one_hot = np.append(np.eye(5, dtype=np.float32), np.zeros((1, 5), np.float32), axis=0)  # of -1: zeros
    biased = np.asarray(apply(params, batch.tokens)) + 1e3 * one_hot[targets] * (np.arange(64) % 2)[:, None, None]
    exact = np.asarray(copying.exact(biased, batch))

    written = batch.tokens.copy()
    for row, n in enumerate(lengths):
        written[row, n + 2 :] = 0
    alive = np.ones(64, bool)
    for at in range(6):
        bias = 1e3 * one_hot[targets[:, at]] * (np.arange(64) % 2)[:, None]
        token = (np.asarray(apply(params, written))[:, at] + bias).argmax(-1)
        asked = targets[:, at] >= 0
        alive &= ~asked | (token == targets[:, at])
        if at + 1 < 6:
            written[:, at + 1] = np.where(asked, token, written[:, at + 1])
    np.testing.assert_array_equal(exact, alive)
    assert exact[1::2].all() and not exact.all()


@pytest.mark.slow
def test_copying_run_is_judged_drawn_and_repeatable(monkeypatch, run_fast):
    kinds = ("learned", "none")  # compiling takes long
    size = Size(("copy",), kinds, seeds=2, steps=2, longest=2, vocab_size=6, batch_size=2, examples=64)
    monkeypatch.setattr(copying, "FAST", size)
    monkeypatch.setattr(copying, "LAYERS", 1)
    measured = run_fast(copying)
    assert len(measured) == 2 * 2 * 4
    monkeypatch.setattr(copying, "FAST", size._replace(positions=("none",)))
    assert copying.measure(Options(fast=True)) == [row for row in measured if row["positions"] == "none"]


@pytest.mark.campaign
def test_copying_fast_run_fails_less_at_trained_lengths_than_beyond():
    # Which positions lead depends on size and seed, so the verdict is not asserted.
    measured = copying.measure(Options(fast=True))
    for positions in copying.FAST.positions:
        within, beyond = (np.mean(copying.beyond(measured, "copy", positions, trained)) for trained in (True, False))
        assert within > beyond
