"""Additive attention is its formula, and masks mean what they mean everywhere."""

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.masks import Causal, Padding
from attnlab.nn import AdditiveAttention

Q = jax.random.normal(jax.random.key(0), (2, 4, 8))
MEMORY = jax.random.normal(jax.random.key(1), (2, 6, 5))
MODULE = AdditiveAttention(features=3)
PARAMS = MODULE.init(jax.random.key(2), Q, MEMORY)


def test_it_is_the_formula():
    w = {name: np.asarray(leaf["kernel"], np.float64) for name, leaf in PARAMS["params"].items()}
    assert {name: kernel.shape for name, kernel in w.items()} == {"query": (8, 3), "key": (5, 3), "score": (3, 1)}
    for b in range(2):
        q, memory = np.asarray(Q[b], np.float64), np.asarray(MEMORY[b], np.float64)
        scores = np.array([[(np.tanh(s @ w["query"] + h @ w["key"]) @ w["score"])[0] for h in memory] for s in q])
        weights = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
        np.testing.assert_allclose(MODULE.apply(PARAMS, Q, MEMORY)[b], weights @ memory, rtol=1e-5, atol=1e-6)


def test_padding_changes_nothing_and_a_row_without_memory_gets_zeros():
    padded = MODULE.apply(PARAMS, Q, MEMORY, mask=Padding(jnp.array([4, 0])))
    np.testing.assert_allclose(padded[0], MODULE.apply(PARAMS, Q[:1], MEMORY[:1, :4])[0], atol=1e-6)
    assert not padded[1].any()


def test_sown_weights_mix_the_memory():
    out, sown = MODULE.apply(PARAMS, Q, MEMORY, mask=Padding(jnp.array([4, 6])), mutable=["intermediates"])
    (weights,) = sown["intermediates"]["attention_weights"]
    assert weights.shape == (2, 4, 6) and not weights[0, :, 4:].any()
    np.testing.assert_allclose(out, weights @ MEMORY, atol=1e-6)


def test_within_one_sequence_the_causal_mask_hides_what_comes_later():
    module = AdditiveAttention(mask=Causal())
    params = module.init(jax.random.key(0), Q)
    np.testing.assert_allclose(module.apply(params, Q)[:, :2], module.apply(params, Q[:, :2]), atol=1e-6)


def test_gradients_reach_every_parameter():
    gradient = jax.grad(lambda params: (MODULE.apply(params, Q, MEMORY) ** 2).sum())(PARAMS)
    assert all(jnp.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient))
