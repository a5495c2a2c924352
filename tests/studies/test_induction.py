"""The study of induction heads: its scores, its verdict, and a run."""

import jax
import numpy as np

from attnlab import see
from attnlab._studies import induction
from attnlab._studies.induction import CONTROL, INTACT, ONE, SHUFFLED, TWO, WITHOUT
from tests.studies import claims

STEPS = tuple(range(0, 1100, 100))


def rows():
    """Two seeds that satisfy the claim: the loss falls and the score rises between steps 400 and 500."""
    made = []
    for seed in (0, 1):
        for model in (TWO, ONE):
            for step in STEPS:
                learned = model == TWO and step >= 500
                common = {"seed": seed, "model": model, "step": step, "loss first": 4.2, "accuracy first": 0.02}
                loss, accuracy, score = (0.2, 0.95, 0.9) if learned else (4.0, 0.05, 0.06)
                measured = {"loss repeated": loss, "accuracy repeated": accuracy, "induction score": score}
                made.append(common | measured | {"what": INTACT})
                made.append(common | {"what": SHUFFLED, "loss repeated": 8.0, "accuracy repeated": 0.02})
        for what, accuracy in ((WITHOUT, 0.05), (CONTROL, 0.8)):
            ablated = {"what": what, "heads": 2, "loss repeated": 3.0, "accuracy repeated": accuracy}
            made.append({"seed": seed, "model": TWO, "step": STEPS[-1]} | ablated)
    return made


def changed(match, **values):
    """The rows, with other values where they match; a tuple matches any of its numbers."""

    def matches(row):
        return all(row[key] in (one if isinstance(one, tuple) else (one,)) for key, one in match.items())

    return [row | values if matches(row) else row for row in rows()]


def test_induction_claim():
    two, late = {"model": TWO, "what": INTACT}, (500, 600)  # steps
    refuted = {
        "two layers fail": (0, changed(two | {"step": 1000}, **{"accuracy repeated": 0.8})),
        "one layer learns": (1, changed({"model": ONE, "what": INTACT}, **{"accuracy repeated": 0.4})),
        "shuffled text is learned": (2, changed({"what": SHUFFLED}, **{"loss repeated": 3.0})),
        "slow": (3, changed(two | {"step": late}, **{"accuracy repeated": 0.4})),
        "heads after the loss": (4, changed(two | {"step": late}, **{"induction score": 0.1})),
        "ablation costs little": (5, changed({"what": WITHOUT}, **{"accuracy repeated": 0.6})),
        "other heads cost as much": (6, changed({"what": CONTROL, "seed": 1}, **{"accuracy repeated": 0.05})),
    }
    claims.check(induction, rows(), refuted, "Two layers suddenly learn")


def test_induction_scores_equal_those_of_see():
    text = induction.held_out(8)
    draw = np.random.default_rng(0)
    patterns = np.tril(draw.random((2, 8, 3, 64, 64))).astype(np.float32)
    patterns /= patterns.sum(-1, keepdims=True)
    scored = see.scores(patterns, text.tokens, ("induction",)).values["induction"]
    wanted = see.head_scores.targets("induction", text.tokens)
    ours = jax.jit(lambda patterns: induction.induction_scores(patterns, wanted))(patterns)
    # Sums of up to 64 float32 weights, each rounded to 6e-8 of at most 1.
    np.testing.assert_allclose(ours, scored, atol=64 * 6e-8)


def test_induction_held_out_text_is_predictable_from_the_second_period_on():
    text = induction.held_out(8)
    for row, mixed, repeated in zip(text.tokens, text.shuffled, text.repeated):
        period = 1 + int(repeated.argmax())
        assert period in induction.PERIODS and repeated[period - 1 :].all()
        np.testing.assert_array_equal(row[1:][repeated], row[repeated.nonzero()[0] + 1 - period])
        np.testing.assert_array_equal(mixed[:period], row[:period])
        np.testing.assert_array_equal(np.sort(mixed), np.sort(row))


def test_induction_models_have_about_equal_parameters():
    def count(depth):
        shapes = jax.eval_shape(induction.gpt(depth).init, jax.random.key(0), np.zeros((1, 2), np.int32))
        return sum(leaf.size for leaf in jax.tree.leaves(shapes))

    assert count(TWO) == 37_760 and count(ONE) == 37_312
