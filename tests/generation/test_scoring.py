"""Scores of texts: by their definition, with windows beyond the context, and against transformers' loss."""

import functools
import math

import jax
import numpy as np
import pytest
from scipy.special import log_softmax

import attnlab
from attnlab.data.tokenizers import make
from attnlab.generation.scoring import logprobs
from attnlab.loading import Run
from attnlab.nn import GPT
from tests.parameters import parameters


@functools.cache
def gpt():
    model = GPT.of(vocab_size=256, num_layers=1, num_heads=2, width=16, context=8)
    return model, parameters(model, np.zeros((1, 1), np.int32))


@functools.cache
def full():
    """The compiled full pass over a window."""
    return jax.jit(gpt()[0].apply)


def run():
    return Run(*gpt(), make("byte", ""), None)


def expected_logprobs(ids, context):
    """Log-probabilities by the rule of `score`: one pass per token, over the tokens that predict it."""
    scores = []
    for at in range(1, len(ids)):
        start = 0
        while start + context < at:
            start += context // 2
        window = np.pad(ids[start:at], (0, context - (at - start)))
        logits = np.asarray(full()(gpt()[1], window[None])[0, at - start - 1])
        scores.append(log_softmax(logits)[ids[at]])
    return np.array(scores)


@pytest.mark.parametrize("length", [1, 2, 9, 13, 30])
def test_every_token_is_scored_once_by_the_rule_of_windows(length):
    ids = np.random.default_rng(length).integers(0, 256, length).astype(np.int32)
    (actual,) = logprobs(*gpt(), [ids], batch_size=2)
    # the last bits of float32 log-probabilities of about 10
    np.testing.assert_allclose(actual, expected_logprobs(ids, 8), atol=1e-5)


def test_texts_of_any_lengths_score_as_each_alone():
    texts = ["", "a", "two", "a text longer than the context of eight", "ñandú"]
    together = attnlab.score(run(), texts, batch_size=2)
    for text, one in zip(texts, together):
        (alone,) = attnlab.score(run(), [text], batch_size=2)
        assert one.tokens == alone.tokens == max(0, len(text.encode()) - 1)
        np.testing.assert_allclose(one.logprobs, alone.logprobs, atol=1e-5)
    assert attnlab.score(run(), []) == []


def test_score_adds_up():
    (score,) = attnlab.score(run(), ["ñandú y más"], batch_size=2)
    assert score.tokens == len(score.logprobs) == 13
    np.testing.assert_allclose(score.nats, -score.logprobs.sum(dtype=np.float64), rtol=1e-12)
    np.testing.assert_allclose(score.nats_per_token, score.nats / 13, rtol=1e-12)
    np.testing.assert_allclose(score.bits_per_byte, score.nats / 13 / math.log(2), rtol=1e-12)  # one token per byte
    (short,) = attnlab.score(run(), ["a"], batch_size=2)
    assert short.tokens == 0 and math.isnan(short.bits_per_byte)


def test_scores_equal_transformers_loss():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64, "vocab_size": 256}
    config = transformers.GPT2Config(**sizes, initializer_range=0.2, bos_token_id=0, eos_token_id=0)
    peer = transformers.GPT2LMHeadModel(config).eval()
    loaded = Run(*attnlab.interop.huggingface.from_hf(peer), make("byte", ""), None)
    texts = ["a text that fits the context", "and another, with an ñ"]
    for text, score in zip(texts, attnlab.score(loaded, texts)):
        ids = torch.tensor(loaded.tokenizer.encode(text).astype(np.int64))[None]
        with torch.no_grad():
            loss = peer(input_ids=ids, labels=ids).loss
        assert abs(score.nats_per_token - float(loss)) < 1e-5 and float(loss) > 5.6


def test_invalid_texts_or_run_are_rejected(own_errors):
    with pytest.raises(ValueError, match="texts is a string"):
        attnlab.score(run(), "a text")
    with pytest.raises(ValueError, match="run has no tokenizer"):
        attnlab.score(Run(*gpt(), None, None), ["a text"])
