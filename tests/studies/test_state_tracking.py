"""The study of state tracking."""

from attnlab._studies import state_tracking
from attnlab._studies.state_tracking import MIXERS, NEGATIVE, POSITIVE, SOFTMAX, TIMES
from tests.studies import claims

SOLVED = {SOFTMAX: 0.5, POSITIVE: 0.55, NEGATIVE: 0.98}


def rows(solved=SOLVED):
    """Three seeds of each mixer, all right at the trained length."""
    return [
        {"mixer": mixer, "seed": seed, "times": times, "right": 1.0 if times == 1 else solved[mixer] + 0.004 * seed}
        for mixer in MIXERS
        for seed in range(3)
        for times in TIMES
    ]


def test_state_tracking_claim():
    changes = {
        NEGATIVE: (0, {NEGATIVE: 0.8}),
        POSITIVE: (1, {POSITIVE: 0.9}),
        SOFTMAX: (2, {SOFTMAX: 0.9}),
    }
    refuted = {name: (part, rows(SOLVED | solved)) for name, (part, solved) in changes.items()}
    claims.check(state_tracking, rows(), refuted, "β ≤ 2")


def test_state_tracking_verdict_is_of_the_best_seed_and_tells_how_many():
    late = [row | {"right": 0.5} if row["mixer"] == NEGATIVE and row["seed"] else row for row in rows()]
    verdict = state_tracking.judge(late)
    assert verdict.held and "1 of 3 seeds" in verdict.parts[0][1], str(verdict)
