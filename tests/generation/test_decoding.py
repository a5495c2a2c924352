"""Texts side by side: each as if it were alone, at any length, with any draws; what ends them; log-probabilities."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.data.tokenizers import make
from attnlab.generation.decoding import decode, generate
from attnlab.generation.drawing import Draw
from attnlab.nn import GPT

PROMPTS = [np.array(prompt) for prompt in ([1], [1, 2, 3], np.arange(8) % 5, np.arange(13) % 11)]
TOKENIZER = make("char", "abcdefghij ")


@functools.cache
def gpt(positions="learned"):
    model = GPT(vocab_size=11, num_layers=2, num_heads=2, width=16, context=8, positions=positions)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    return model, jax.tree.map(lambda x: 5 * x if x.ndim > 1 else x, params)  # for clear differences of the logits


def tokens(positions, prompts, count, **options):
    """`[rows, count]`, −1 after the end of a text."""
    rows = np.stack(list(generate(*gpt(positions), prompts, count, **options)), axis=1)
    return np.pad(rows, ((0, 0), (0, count - rows.shape[1])), constant_values=-1)


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary", "alibi", "none"])
def test_texts_side_by_side_equal_each_alone(positions):
    """Greedy; with learned positions, the texts outgrow the context of 8 at different times."""
    together = tokens(positions, PROMPTS, 20, temperature=0.0)
    for row, prompt in zip(together, PROMPTS):
        np.testing.assert_array_equal(row, tokens(positions, prompt, 20, temperature=0.0)[0])


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_drawn_texts_side_by_side_equal_each_alone(positions):
    options = {"num_samples": 2, "repetition_penalty": 1.3, "min_p": 0.05, "top_p": 0.9, "seed": 5}
    together = tokens(positions, PROMPTS, 20, **options)
    for at, prompt in enumerate(PROMPTS):
        alone = tokens(positions, prompt, 20, **options)
        np.testing.assert_array_equal(together[2 * at : 2 * at + 2], alone)
        assert not np.array_equal(*alone)


def test_token_depends_on_seed_sample_and_place_alone():
    longer = tokens("learned", PROMPTS[1], 12, num_samples=3)
    np.testing.assert_array_equal(tokens("learned", PROMPTS[1], 5, num_samples=3), longer[:, :5])
    np.testing.assert_array_equal(tokens("learned", PROMPTS[1], 12), longer[:1])


def penalized(logits, text, penalty):
    """The repetition penalty, token by token."""
    logits = np.array(logits)
    for token in set(text):
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    return logits


def test_repetition_penalty_counts_prompt_and_output():
    model, params = gpt()
    full = jax.jit(model.apply)
    text = [1, 2, 3]
    for _ in range(5):
        logits = full(params, jnp.zeros((1, 8), jnp.int32).at[0, : len(text)].set(np.array(text)))[0, len(text) - 1]
        text.append(int(penalized(logits, text, 3.0).argmax()))
    assert tokens("learned", PROMPTS[1], 5, temperature=0.0, repetition_penalty=3.0)[0].tolist() == text[3:]


def test_log_probabilities_are_those_of_the_full_pass():
    """Of the raw logits, whatever the options of the draw; 1e-5: float32's, of logits of about 10."""
    model, params = gpt("rotary")
    draw = Draw(temperature=0.5, top_k=3, repetition_penalty=2.0)
    steps = list(decode(model, params, PROMPTS[:2], 5, draw=draw))
    for row, prompt in enumerate(PROMPTS[:2]):
        text = np.concatenate([prompt, [step.tokens[row] for step in steps]]).astype(np.int32)
        logp = jax.nn.log_softmax(model.apply(params, text[None])[0])
        expected = [logp[at - 1, text[at]] for at in range(len(prompt), len(text))]
        np.testing.assert_allclose([step.logprobs[row] for step in steps], expected, atol=1e-5)


def test_end_token_ends_a_text_and_the_others_go_on():
    free = tokens("rotary", PROMPTS, 20, temperature=0.0)
    end = int(free[0, 6])
    ended = tokens("rotary", PROMPTS, 20, temperature=0.0, end=[end])
    for row, other in zip(free, ended):
        last = row.tolist().index(end) if end in row else 19
        np.testing.assert_array_equal(other, [*row[: last + 1], *[-1] * (19 - last)])


def test_generation_ends_when_all_texts_have():
    drawn = list(generate(*gpt("rotary"), PROMPTS[1], 10**9, num_samples=2, end=range(11)))
    assert len(drawn) == 1


def test_stop_string_ends_a_text_with_the_token_that_completes_it():
    options = {"temperature": 0.0, "tokenizer": TOKENIZER}
    free = tokens("rotary", PROMPTS, 20, temperature=0.0)
    text = TOKENIZER.decode(free[0])
    stop = text[5:8]
    stopped = tokens("rotary", PROMPTS, 20, stop=[stop, "abcdefghij"], **options)
    for row, other in zip(free, stopped):
        at = TOKENIZER.decode(row).find(stop)
        kept = at + len(stop) if at >= 0 else 20
        np.testing.assert_array_equal(other, [*row[:kept], *[-1] * (20 - kept)])


def test_texts_of_any_length_are_generated_on_demand():
    assert len(list(itertools.islice(generate(*gpt(), PROMPTS, 10**9), 30))) == 30


@pytest.mark.parametrize(
    "prompt, message",
    [
        ([], "prompt 0 has shape"),
        ([np.array([1]), np.array([], int)], "prompt 1 has shape"),
        ([np.array([0.5])], "type float64, expected integers"),
        (np.ones((1, 2, 3), int), "expected integers \\[length\\]"),
    ],
)
def test_prompt_of_another_form_is_rejected(own_errors, prompt, message):
    with pytest.raises(ValueError, match=message):
        next(generate(*gpt(), prompt, 5))


def test_stop_string_without_tokenizer_is_rejected():
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        next(generate(*gpt(), PROMPTS, 5, stop=["a"]))
