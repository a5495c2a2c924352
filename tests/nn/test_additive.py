"""Additive attention equals its formula and honors masks."""

import functools

import jax
import numpy as np

from attnlab.masks import Padding
from attnlab.nn import AdditiveAttention
from tests.parameters import parameters

rng = np.random.default_rng(0)
Q = rng.standard_normal((2, 4, 8)).astype(np.float32)
MEMORY = rng.standard_normal((2, 6, 5)).astype(np.float32)
MODULE = AdditiveAttention(features=3)
PARAMS = parameters(MODULE, Q, MEMORY)
apply = jax.jit(MODULE.apply)


def test_additive_attention_equals_formula():
    w = {name: np.asarray(leaf["kernel"], np.float64) for name, leaf in PARAMS["params"].items()}
    assert {name: kernel.shape for name, kernel in w.items()} == {"query": (8, 3), "key": (5, 3), "score": (3, 1)}
    out = np.asarray(apply(PARAMS, Q, MEMORY))
    for b in range(2):
        q, memory = np.asarray(Q[b], np.float64), np.asarray(MEMORY[b], np.float64)
        scores = np.array([[(np.tanh(s @ w["query"] + h @ w["key"]) @ w["score"])[0] for h in memory] for s in q])
        weights = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
        np.testing.assert_allclose(out[b], weights @ memory, rtol=1e-5, atol=1e-6)


def test_padding_is_inert_and_empty_memory_returns_zeros():
    padded = np.asarray(apply(PARAMS, Q, MEMORY, mask=Padding(np.array([4, 0]))))
    np.testing.assert_allclose(padded[:1], apply(PARAMS, Q[:1], MEMORY[:1, :4]), atol=1e-6)
    assert not padded[1].any()


def test_sown_weights_times_memory_equal_output():
    sowing = jax.jit(functools.partial(MODULE.apply, mutable=["intermediates"]))
    out, sown = sowing(PARAMS, Q, MEMORY, mask=Padding(np.array([4, 6])))
    weights = np.asarray(*sown["intermediates"]["attention_weights"])
    assert weights.shape == (2, 4, 6) and not weights[0, :, 4:].any()
    np.testing.assert_allclose(out, weights @ MEMORY, atol=1e-6)


def test_gradient_of_every_parameter_is_nonzero():
    gradient = jax.jit(jax.grad(lambda params: (MODULE.apply(params, Q, MEMORY) ** 2).sum()))(PARAMS)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient))
