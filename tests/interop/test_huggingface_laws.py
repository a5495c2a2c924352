"""Families with other layers than softmax attention: padding, packing, decoding and gradients, here and there."""

import functools
import json

import jax
import numpy as np
import pytest

from attnlab.interop.huggingface import from_hf
from attnlab.nn import KVCache, LatentCache
from tests.interop.huggingface_peers import goldens, logits, peer, tokens, weights

FAMILIES = ("qwen3_next", "olmo_hybrid", "mamba2", "bamba", "diffllama", "deepseek_v3", "deepseek_v3-2")
FAST = ("qwen3_next", "bamba", "diffllama", "deepseek_v3")
EACH = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
CUT = 23  # tokens of a sequence before padding, or of the first document


def kept(name):
    """The state dict and the config of a kept model."""
    answers = goldens(name)
    return weights(json.loads(str(answers["shapes"]))), json.loads(str(answers["config"]))


@functools.cache
def ours(name):
    """Model, parameters, and a compiled call."""
    model, params = from_hf(*kept(name))
    return model, params, jax.jit(model.apply)


def assert_close(found, expected):
    """To 1e-5 of the largest logit: float32, in another order of sums."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", EACH)
def test_padding_equals_transformers_with_a_mask(name):
    """Theirs is at the left: at the right the logits of recurrent layers are the same, but their states are not."""
    torch, theirs = peer(name)
    _, params, apply = ours(name)
    text, size = tokens(name), tokens(name).shape[1]
    left = np.stack([np.concatenate([np.full(size - CUT, 5), text[0, :CUT]]), text[1]])
    right = np.stack([np.concatenate([text[0, :CUT], np.full(size - CUT, 5)]), text[1]])
    mask = (np.arange(size) >= [[size - CUT], [0]]).astype(np.int64)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(left), attention_mask=torch.from_numpy(mask)).logits.numpy()
    found = apply(params, right, lengths=np.array([CUT, size], np.int32))
    assert_close(found[1], expected[1])
    assert_close(found[0, :CUT], expected[0, size - CUT :])


@pytest.mark.parametrize("name", EACH)
def test_packed_documents_have_the_logits_that_transformers_gives_each(name):
    """Packed, theirs let states pass from a document to the next, or raise, where fla and mamba_ssm are missing."""
    torch, theirs = peer(name)
    _, params, apply = ours(name)
    text = tokens(name)
    with torch.no_grad():
        alone = [theirs(torch.from_numpy(part)).logits.numpy() for part in (text[:, :CUT], text[:, CUT:])]
    segments = np.broadcast_to(np.arange(text.shape[1]) >= CUT, text.shape).astype(np.int32)
    assert_close(apply(params, text, segments=segments), np.concatenate(alone, axis=1))


LONG = [pytest.param(name, 18, marks=pytest.mark.slow) for name in ("diffllama", "deepseek_v3", "deepseek_v3-2")]


@pytest.mark.parametrize(
    "name, first",
    [pytest.param(name, 1, marks=[] if name in FAST else pytest.mark.slow) for name in FAMILIES] + LONG,
)
def test_decoding_equals_one_pass_there(name, first):
    """A long first step expands a cache of latents, and single tokens do not."""
    peer(name)
    model, params, apply = ours(name)
    text, found = tokens(name)[:, :CUT], []
    caches = model.empty_caches(len(text), CUT)
    kinds = {"diffllama": KVCache, "deepseek_v3": LatentCache}
    assert all(isinstance(cache, kinds.get(name.partition("-")[0], tuple)) for cache in caches)
    for start, end in [(0, first), *((t, t + 1) for t in range(first, CUT))]:
        out, caches = apply(params, text[:, start:end], caches=caches)
        found.append(out)
    assert_close(np.concatenate(found, axis=1), logits(name)[:, :CUT])


@pytest.mark.parametrize("name", EACH)
def test_gradients_are_finite_and_reach_every_parameter(name):
    model, params, _ = ours(name)
    text = tokens(name)

    def loss(params):
        return model.apply(params, text[:, :-1], targets=text[:, 1:]).mean()

    before, gradients = jax.jit(jax.value_and_grad(loss))(params)
    assert all(np.isfinite(leaf).all() and np.any(leaf) for leaf in jax.tree.leaves(gradients))
    size = 0.1 / np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(gradients)))
    after = jax.jit(loss)(jax.tree.map(lambda x, g: x - size * g, params, gradients))
    assert after < before
