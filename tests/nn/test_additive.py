"""Additive attention equals its formula and honors masks."""

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.masks import Causal, Padding
from attnlab.nn import AdditiveAttention

Q = jax.random.normal(jax.random.key(0), (2, 4, 8))
MEMORY = jax.random.normal(jax.random.key(1), (2, 6, 5))
MODULE = AdditiveAttention(features=3)
PARAMS = MODULE.init(jax.random.key(2), Q, MEMORY)


def test_additive_attention_equals_formula():
    w = {name: np.asarray(leaf["kernel"], np.float64) for name, leaf in PARAMS["params"].items()}
    assert {name: kernel.shape for name, kernel in w.items()} == {"query": (8, 3), "key": (5, 3), "score": (3, 1)}
    for b in range(2):
        q, memory = np.asarray(Q[b], np.float64), np.asarray(MEMORY[b], np.float64)
        scores = np.array([[(np.tanh(s @ w["query"] + h @ w["key"]) @ w["score"])[0] for h in memory] for s in q])
        weights = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
        np.testing.assert_allclose(MODULE.apply(PARAMS, Q, MEMORY)[b], weights @ memory, rtol=1e-5, atol=1e-6)


def test_padding_is_inert_and_empty_memory_returns_zeros():
    padded = MODULE.apply(PARAMS, Q, MEMORY, mask=Padding(jnp.array([4, 0])))
    np.testing.assert_allclose(padded[0], MODULE.apply(PARAMS, Q[:1], MEMORY[:1, :4])[0], atol=1e-6)
    assert not padded[1].any()


def test_sown_weights_times_memory_equal_output():
    out, sown = MODULE.apply(PARAMS, Q, MEMORY, mask=Padding(jnp.array([4, 6])), mutable=["intermediates"])
    (weights,) = sown["intermediates"]["attention_weights"]
    assert weights.shape == (2, 4, 6) and not weights[0, :, 4:].any()
    np.testing.assert_allclose(out, weights @ MEMORY, atol=1e-6)


def test_causal_self_attention_ignores_later_tokens():
    module = AdditiveAttention(mask=Causal())
    params = module.init(jax.random.key(0), Q)
    np.testing.assert_allclose(module.apply(params, Q)[:, :2], module.apply(params, Q[:, :2]), atol=1e-6)


def test_gradient_of_every_parameter_is_nonzero():
    gradient = jax.grad(lambda params: (MODULE.apply(params, Q, MEMORY) ** 2).sum())(PARAMS)
    assert all(jnp.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient))
