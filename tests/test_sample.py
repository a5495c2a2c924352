"""Sampling: the distribution of tokens, reproducibility by seed, and texts longer than the context."""

import functools

import jax
import numpy as np
import pytest

from attnlab import sample
from attnlab.nn import GPT
from attnlab.sample import generate
from tests.parameters import parameters

PROMPT = np.array([1, 2, 3])


@functools.cache
def gpt(positions="learned", num_layers=2):
    """A model and its parameters, with which greedy texts do not repeat one token."""
    model = GPT(11, num_layers, num_heads=2, width=16, context=8, positions=positions, tie_embeddings=False)
    return model, parameters(model, np.zeros((1, 1), np.int32), seed=4)


def draw(*model_and_params, prompt=PROMPT, max_tokens=5, **options):
    """`[num_samples, max_tokens]`."""
    return np.stack(list(generate(*model_and_params, prompt, max_tokens, **options)), axis=1)


def most_likely(model, params, size):
    """Maps a text to its most likely next token by the full pass, where zeros after the text are masked (causal)."""
    apply = jax.jit(lambda tokens: model.apply(params, tokens)[0].argmax(axis=-1))

    def following(text):
        return int(apply(np.array([[*text, *[0] * (size - len(text))]], np.int32))[len(text) - 1])

    return following


def test_greedy_text_is_argmax_of_the_full_pass_of_the_last_half_beyond_context():
    """With learned positions."""
    model, params = gpt()
    text, window, following = list(PROMPT), 3, most_likely(model, params, size=8)
    for _ in range(20):
        if window > 8:
            window = 4
        text.append(following(text[-window:]))
        window += 1
    assert draw(model, params, max_tokens=20, temperature=0.0)[0].tolist() == text[3:]


@pytest.mark.parametrize("positions", ["rotary", "alibi", pytest.param("none", marks=pytest.mark.slow)])
def test_other_positions_beyond_context_roll(positions):
    """In one layer, rolling is attention to a window of the context's size."""
    model, params = gpt(positions, num_layers=1)
    windowed = model.clone(context=64, window=8)
    text, following = list(PROMPT), most_likely(windowed, params, size=23)
    for _ in range(20):
        text.append(following(text))
    assert draw(model, params, max_tokens=20, temperature=0.0)[0].tolist() == text[3:]


LENGTHS = [("sinusoidal", 1), ("learned", 8), ("rotary", 30)]
OTHERS = [("learned", 1), ("rotary", 1), ("sinusoidal", 8), ("rotary", 8), ("learned", 30), ("sinusoidal", 30)]


@pytest.mark.parametrize("positions, length", [*LENGTHS, *(pytest.param(*o, marks=pytest.mark.slow) for o in OTHERS)])
def test_prompt_of_any_length_is_accepted(positions, length):
    layers = 2 if positions == "learned" else 1
    drawn = draw(*gpt(positions, layers), prompt=np.arange(length) % 11, max_tokens=12, temperature=0.0)
    assert drawn.shape == (1, 12) and (drawn >= 0).all() and (drawn < 11).all()


def test_same_seed_gives_the_same_text_beside_others():
    model, params = gpt()
    one, three = draw(model, params, num_samples=1), draw(model, params, num_samples=3)
    np.testing.assert_array_equal(one, three[:1])
    assert len({tuple(row) for row in three}) > 1
    assert not np.array_equal(draw(model, params, seed=1), one)


PROBABILITIES = np.array([0.1, 0.5, 0.15, 0.25])
DRAWS = [
    ({}, PROBABILITIES),
    ({"temperature": 0.5}, PROBABILITIES**2 / (PROBABILITIES**2).sum()),
    ({"top_k": 2}, np.array([0, 0.5, 0, 0.25]) / 0.75),
    ({"top_p": 0.7}, np.array([0, 0.5, 0, 0.25]) / 0.75),
    ({"top_p": 0.01}, np.array([0, 1, 0, 0])),
    ({"temperature": 0.0}, np.array([0, 1, 0, 0])),
    ({"temperature": 1e-40}, np.array([0, 1, 0, 0])),
    ({"top_p": 1e-50}, np.array([0, 1, 0, 0])),
    ({"top_k": 3, "top_p": 0.5}, np.array([0, 1, 0, 0])),
]


@functools.cache
def frequencies():
    """Relative frequencies of the tokens in 4,000 draws from the same logits, by the options of `DRAWS`."""
    logits = np.tile(np.log(PROBABILITIES).astype(np.float32), (4000, 1))
    uniform = (np.arange(4000, dtype=np.float32) + 0.5) / 4000
    drawn = jax.jit(lambda *given: [sample.Draw(**options)(*given) for options, _ in DRAWS])(logits, uniform)
    return [np.bincount(tokens, minlength=4) / 4000 for tokens in drawn]


@pytest.mark.parametrize("case", range(len(DRAWS)), ids=lambda case: str(DRAWS[case][0]))
def test_draw_follows_the_expected_probabilities(case):
    # 4,000 evenly spaced numbers give every frequency up to one draw, at either end of a token's interval.
    np.testing.assert_allclose(frequencies()[case], DRAWS[case][1], atol=0.04)
