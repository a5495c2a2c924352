"""Texts side by side: each as if it were alone, at any length, with any draws; how they end; log-probabilities."""

import functools
import itertools

import jax
import numpy as np
import pytest
from scipy.special import log_softmax

from attnlab.data.tokenizers import make
from attnlab.generation.decoding import decode, generate
from attnlab.generation.drawing import Draw
from attnlab.nn import GPT
from tests.parameters import parameters

# Prefilled with 1 or 8 tokens, because every other power of two would be another program.
PROMPTS = [np.array(prompt) for prompt in ([1], [1, 2, 3, 4, 5, 6], np.arange(8) % 5, np.arange(13) % 11)]
TOKENIZER = make("char", "abcdefghij ")

SIZES = {"vocab_size": 11, "num_heads": 2, "width": 16, "context": 8, "use_bias": True, "tie_embeddings": False}


@functools.cache
def gpt(positions="learned"):
    layers = 2 if positions == "learned" else 1
    model = GPT.of(**SIZES, num_layers=layers, positions=positions, attention={"qk_norm": False})
    return model, parameters(model, np.zeros((1, 1), np.int32), seed=3)  # a seed that gives varied texts


@functools.cache
def full(positions):
    """The compiled full pass over `[2, 8]` tokens."""
    return jax.jit(gpt(positions)[0].apply)


def drawn_by(model_and_params, prompts, count, **options):
    """`[rows, tokens]`, with as many tokens as the longest text."""
    return np.stack(list(generate(*model_and_params, prompts, count, **options)), axis=1)


def tokens(positions, prompts, count, **options):
    """`[rows, count]`, −1 after the end of a text."""
    rows = drawn_by(gpt(positions), prompts, count, **options)
    return np.pad(rows, ((0, 0), (0, count - rows.shape[1])), constant_values=-1)


def test_texts_side_by_side_equal_each_alone():
    """Texts are greedy with learned positions, and outgrow the context of 8 at different times."""
    together = tokens("learned", PROMPTS[1::2], 20, temperature=0.0)
    for row, prompt in zip(together, PROMPTS[1::2]):
        np.testing.assert_array_equal(row, tokens("learned", prompt, 20, temperature=0.0)[0])


def test_log_probabilities_of_equal_large_logits_are_exact():
    model = GPT.of(**SIZES, num_layers=1)
    params = jax.tree.map(np.zeros_like, parameters(model, np.zeros((1, 1), np.int32)))
    params["params"]["final_norm"]["bias"][0] = 128
    params["params"]["output"]["embedding"][:, 0] = 64  # each logit is 8192; adding log 11 in float32 is off by 3e-4
    (step,) = decode(model, params, [PROMPTS[0]], 1)
    np.testing.assert_allclose(step.logprobs, -np.log(11), rtol=1e-6)


def most_likely(model, params, size):
    """Maps a text to its most likely next token by the full pass, where zeros after the text are masked (causal)."""
    apply = jax.jit(lambda tokens: model.apply(params, tokens)[0].argmax(axis=-1))

    def following(text):
        return int(apply(np.array([[*text, *[0] * (size - len(text))]], np.int32))[len(text) - 1])

    return following


@pytest.mark.parametrize("kind", ["attention", pytest.param("gru", marks=pytest.mark.slow)])
def test_learned_positions_beyond_context_restart_from_the_last_half(kind):
    model, params = gpt() if kind == "attention" else recurrent("gru", "learned")
    text, window, following = [1, 2, 3], 3, most_likely(model, params, size=8)
    for _ in range(20):
        window = 4 if window > 8 else window
        text.append(following(text[-window:]))
        window += 1
    assert drawn_by((model, params), [np.array([1, 2, 3])], 20, temperature=0.0)[0].tolist() == text[3:]


@pytest.mark.parametrize("positions", ["alibi", pytest.param("rotary", marks=pytest.mark.slow)])
def test_other_positions_roll_beyond_the_context(positions):
    """In a single layer, a rolling cache is equivalent to a window of the context's size."""
    _, params = gpt(positions)
    window = {"context": 64, "num_layers": 1, "attention": {"window": 8, "qk_norm": False}}
    windowed = GPT.of(**SIZES | window, positions=positions)
    text, following = [1, 2, 3], most_likely(windowed, params, size=23)
    for _ in range(20):
        text.append(following(text))
    assert tokens(positions, np.array([1, 2, 3]), 20, temperature=0.0)[0].tolist() == text[3:]


DRAWN = {"repetition_penalty": 1.3, "min_p": 0.05, "top_p": 0.9, "seed": 5}


def each_alone(model_and_params, together):
    for at, prompt in enumerate(PROMPTS):
        alone = drawn_by(model_and_params, prompt, 20, num_samples=2, **DRAWN)
        np.testing.assert_array_equal(together[2 * at : 2 * at + 2], alone)
        assert not np.array_equal(*alone)


def test_drawn_texts_side_by_side_equal_each_alone():
    each_alone(gpt("rotary"), tokens("rotary", PROMPTS, 20, num_samples=2, **DRAWN))


def test_token_depends_only_on_seed_sample_and_place_also_in_64_bit_mode():
    longer = tokens("rotary", PROMPTS[1], 12, num_samples=2, **DRAWN)
    np.testing.assert_array_equal(tokens("rotary", PROMPTS[1], 5, num_samples=2, **DRAWN), longer[:, :5])
    np.testing.assert_array_equal(tokens("rotary", PROMPTS[1], 12, **DRAWN), longer[:1])
    assert not np.array_equal(tokens("rotary", PROMPTS[1], 12, **DRAWN | {"seed": 6}), longer[:1])
    with jax.enable_x64(True):
        np.testing.assert_array_equal(tokens("rotary", PROMPTS[1], 12, num_samples=2, **DRAWN), longer)


def test_repetition_penalty_counts_prompt_and_output():
    text = PROMPTS[0].tolist()
    for _ in range(5):
        logits = full("rotary")(gpt("rotary")[1], np.tile(np.pad(text, (0, 8 - len(text))), (2, 1)))
        logits = np.array(logits[0, len(text) - 1])
        for token in set(text):
            logits[token] *= 1 / 3 if logits[token] > 0 else 3
        text.append(int(logits.argmax()))
    assert tokens("rotary", PROMPTS[0], 5, temperature=0.0, repetition_penalty=3.0)[0].tolist() == text[1:]


def test_log_probabilities_match_the_full_pass():
    """They come from the raw logits, whatever the options of the draw; 1e-5 allows for float32 logits of about 10."""
    model, params = gpt("rotary")
    draw, prompts = Draw(temperature=0.5, top_k=3, repetition_penalty=2.0), (PROMPTS[0], np.array([1, 2, 3]))
    steps = list(decode(model, params, prompts, 5, draw=draw))
    drawn = np.array([step.tokens for step in steps]).T
    texts = np.stack([np.pad(np.append(prompt, row), (0, 3 - len(prompt))) for prompt, row in zip(prompts, drawn)])
    logp = log_softmax(np.asarray(full("rotary")(params, texts.astype(np.int32)), np.float64), axis=-1)
    for row, (prompt, text) in enumerate(zip(prompts, texts)):
        expected = [logp[row, at - 1, text[at]] for at in range(len(prompt), len(prompt) + 5)]
        np.testing.assert_allclose([step.logprobs[row] for step in steps], expected, atol=1e-5)


def test_end_token_ends_a_text_and_the_others_go_on():
    free = tokens("rotary", PROMPTS, 20, temperature=0.0)
    end = int(free[0, 6])
    steps = list(decode(*gpt("rotary"), PROMPTS, 20, draw=Draw(temperature=0.0), end=[end]))
    ended, scores = (np.stack([getattr(step, name) for step in steps], axis=1) for name in ("tokens", "logprobs"))
    for row, other in zip(free, ended):
        last = row.tolist().index(end) if end in row else 19
        np.testing.assert_array_equal(other, [*row[: last + 1], *[-1] * (19 - last)])
    assert (ended == -1).any() and ((scores == 0) == (ended == -1)).all()
    # Generation ends when all texts have ended.
    assert len(list(generate(*gpt("rotary"), PROMPTS[1], 10**9, num_samples=2, end=range(11)))) == 1


def test_stop_string_ends_a_text_with_the_token_that_completes_it():
    options = {"temperature": 0.0, "tokenizer": TOKENIZER}
    free = tokens("rotary", PROMPTS, 20, temperature=0.0)
    text = TOKENIZER.decode(free[0])
    stop = text[5:8]
    stopped = tokens("rotary", PROMPTS, 20, stop=[stop, "abcdefghij"], **options)
    for row, other in zip(free, stopped):
        at = TOKENIZER.decode(row).find(stop)
        length = at + len(stop) if at >= 0 else 20
        np.testing.assert_array_equal(other, [*row[:length], *[-1] * (20 - length)])


def test_texts_of_any_length_are_generated_on_demand():
    assert len(list(itertools.islice(generate(*gpt(), PROMPTS[1::2], 10**9, temperature=0.0), 30))) == 30


@pytest.mark.parametrize(
    "prompt, options, message",
    [
        ([], {}, "prompt 0 has shape"),
        ([np.array([1]), np.array([], int)], {}, "prompt 1 has shape"),
        ([np.array([0.5])], {}, "type float64"),
        (np.ones((1, 2, 3), int), {}, "expected integers \\[length\\]"),
        (PROMPTS, {"stop": ["a"]}, "stop strings need a tokenizer"),
    ],
)
def test_invalid_prompt_is_rejected(own_errors, prompt, options, message):
    with pytest.raises(ValueError, match=message):
        next(generate(*gpt(), prompt, 5, **options))


# ----------------------------------------------------------------------------------------------------- recurrent layers


@functools.cache
def recurrent(layers, positions="none"):
    """The window is the context, so that a hybrid's full pass attends to what its rolling cache holds."""
    local = {"local": {"window": 8}} if "local" in layers else {}
    model = GPT.of(**SIZES, num_layers=2, layers=layers, positions=positions, **local)
    return model, parameters(model, np.zeros((1, 1), np.int32), seed=3)


@pytest.mark.parametrize("layers", [pytest.param("gated_delta", marks=pytest.mark.slow), "gru local"])
def test_log_probabilities_of_recurrent_layers_match_the_full_pass(layers):
    """Prompts differ in length, and texts grow far beyond the context; only the end of a longer prompt is read."""
    model, params = recurrent(layers)
    steps = list(decode(model, params, PROMPTS, 20, seed=1))
    drawn, logprobs = (np.stack([getattr(step, name) for step in steps], axis=1) for name in ("tokens", "logprobs"))
    texts = [np.append(prompt[-8:], row) for prompt, row in zip(PROMPTS, drawn)]
    padded = np.array([np.pad(text, (0, 28 - len(text))) for text in texts], np.int32)
    logp = log_softmax(np.asarray(jax.jit(model.apply)(params, padded), np.float64), axis=-1)
    for row, text, scores in zip(logp, texts, logprobs):
        after = np.arange(len(text) - 21, len(text) - 1)
        np.testing.assert_allclose(scores, row[after, text[after + 1]], atol=1e-5)  # as above
    assert len(np.unique(drawn)) > 6


@pytest.mark.slow
def test_recurrent_drawn_texts_side_by_side_equal_each_alone():
    """They stay equal after other texts have ended."""
    together = drawn_by(recurrent("gru local"), PROMPTS, 20, num_samples=2, **DRAWN)
    end = int(together[0, 3])
    ended = drawn_by(recurrent("gru local"), PROMPTS, 20, num_samples=2, end=[end], **DRAWN)
    assert (ended == -1).any()
    np.testing.assert_array_equal(ended[ended >= 0], together[:, : ended.shape[1]][ended >= 0])
    each_alone(recurrent("gru local"), together)


def test_recurrent_state_size_does_not_depend_on_text_length():
    model, _ = recurrent("gated_delta")
    short, long = (jax.eval_shape(lambda n=n: model.init_caches(1, n)) for n in (8, 4096))
    assert short == long
