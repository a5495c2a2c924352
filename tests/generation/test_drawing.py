"""Draws of the next token: their distribution under each option, and the repetition penalty."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.generation.drawing import Draw

PROBABILITIES = np.array([0.1, 0.5, 0.15, 0.25])


def frequencies(**options):
    """Relative frequencies of the tokens in 4,000 draws, at evenly spaced numbers: exact up to one draw at each end."""
    uniform = (np.arange(4000, dtype=np.float32) + 0.5) / 4000
    drawn = jax.jit(Draw(**options).__call__)(np.tile(np.log(PROBABILITIES, dtype=np.float32), (4000, 1)), uniform)
    return np.bincount(drawn, minlength=4) / 4000


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, PROBABILITIES),
        ({"temperature": 0.5}, PROBABILITIES**2),
        ({"top_k": 2}, [0, 0.5, 0, 0.25]),
        ({"top_p": 0.7}, [0, 0.5, 0, 0.25]),
        ({"top_p": 1e-50}, [0, 1, 0, 0]),
        ({"temperature": 0.0}, [0, 1, 0, 0]),
        ({"temperature": 1e-40}, [0, 1, 0, 0]),
        ({"top_k": 3, "top_p": 0.5}, [0, 1, 0, 0]),
        ({"min_p": 0.4}, [0, 0.5, 0, 0.25]),
        ({"min_p": 0.4, "temperature": 2.0}, np.sqrt([0.1, 0.5, 0.15, 0.25])),  # the smallest is 0.447 of the largest
        ({"min_p": 0.4, "top_p": 0.4}, [0, 1, 0, 0]),
        ({"min_p": 0.25, "top_k": 2}, [0, 0.5, 0, 0.25]),
    ],
    ids=str,
)
def test_draw_follows_the_expected_probabilities(options, expected):
    np.testing.assert_allclose(frequencies(**options), np.array(expected) / np.sum(expected), atol=5e-4)


def test_penalty_divides_positive_and_multiplies_negative_logits():
    logits = np.array([[2.0, 1.5, -1.0, -1.5]] * 3 + [[-1.0, -1.5, -3.0, -4.0]], np.float32)
    seen = np.array([[True, False, False, False], [True, True, True, False], [False] * 4, [True] + [False] * 3])
    greedy = Draw(temperature=0.0, repetition_penalty=2.0)
    assert greedy(logits, np.zeros(4), seen).tolist() == [1, 0, 0, 1]
    flipped = Draw(temperature=0.0, repetition_penalty=0.5)(-logits, np.zeros(4), seen)
    assert flipped.tolist() == [3, 2, 3, 3]  # a penalty below 1 favours what was seen


def test_draw_equals_transformers_processors():
    """Which tokens can be drawn, and from which probabilities: those left by transformers' processors, in its order."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    rng = np.random.default_rng(0)
    logits, text = rng.normal(size=(3, 40)).astype(np.float32) * 3, rng.integers(0, 40, (3, 9))
    options = {"temperature": 0.7, "top_k": 25, "top_p": 0.95, "min_p": 0.02}
    scores = transformers.RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor(text), torch.tensor(logits))
    for name, value in zip(("Temperature", "TopK", "TopP", "MinP"), options.values()):
        scores = getattr(transformers, f"{name}LogitsWarper")(value)(torch.tensor(text), scores)
    expected = torch.softmax(scores, -1).numpy()
    seen = np.zeros((3, 40), bool)
    np.put_along_axis(seen, text, True, axis=1)
    count = 20_000
    for row in range(3):
        drawn = Draw(**options, repetition_penalty=1.4)(
            jnp.tile(logits[row], (count, 1)), (jnp.arange(count) + 0.5) / count, jnp.tile(seen[row], (count, 1))
        )
        # One draw at each end of a token's interval.
        np.testing.assert_allclose(np.bincount(drawn, minlength=40) / count, expected[row], atol=2 / count)
