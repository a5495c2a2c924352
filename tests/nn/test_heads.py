"""A head equals its formula; stacked heads and multi-head attention equal their heads."""

import functools
import operator

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.masks import Padding
from attnlab.nn import Head, MultiHeadAttention, StackedHeads
from tests.parameters import parameters

X = np.random.default_rng(0).standard_normal((2, 6, 8)).astype(np.float32)
HEAD = Head(head_dim=3)
PARAMS = parameters(HEAD, X)
apply = jax.jit(HEAD.apply)
STACKED = StackedHeads(num_heads=3, head_dim=4)


def test_head_equals_formula_scaled_by_its_own_width():
    w = {name: np.asarray(leaf["kernel"], np.float64) for name, leaf in PARAMS["params"].items()}
    assert {name: kernel.shape for name, kernel in w.items()} == dict.fromkeys(("query", "key", "value"), (8, 3))
    for sequence, out in zip(np.asarray(X, np.float64), np.asarray(apply(PARAMS, X))):
        scores = (sequence @ w["query"]) @ (sequence @ w["key"]).T / np.sqrt(3)
        weights = np.exp(scores) * np.tri(6)
        expected = weights / weights.sum(1, keepdims=True) @ (sequence @ w["value"])
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_head_sows_weights_when_intermediates_mutable():
    out, state = jax.jit(functools.partial(HEAD.apply, mutable=["intermediates"]))({"params": PARAMS["params"]}, X)
    weights = np.asarray(*state["intermediates"]["attention_weights"])
    assert weights.shape == (2, 6, 6)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
    np.testing.assert_allclose(out, weights @ (X @ np.asarray(PARAMS["params"]["value"]["kernel"])), atol=1e-6)


def test_stacked_heads_equal_concatenated_heads():
    params = parameters(STACKED, X)
    assert params["params"]["heads"]["query"]["kernel"].shape == (3, 8, 4)
    one = [jax.tree.map(operator.itemgetter(h), params["params"]["heads"]) for h in range(3)]
    apply = jax.jit(Head(4).apply)
    each = [np.asarray(apply({"params": head}, X)) for head in one]
    np.testing.assert_allclose(jax.jit(STACKED.apply)(params, X), np.concatenate(each, axis=-1), atol=1e-6)


def test_stacked_heads_start_differently_take_masks_and_sow_weights():
    sowing = jax.jit(functools.partial(STACKED.init_with_output, mutable=["params", "intermediates"]))
    _, state = sowing(jax.random.key(1), X, mask=Padding(np.array([2, 6])))
    weights = np.asarray(*state["intermediates"]["heads"]["attention_weights"])
    assert weights.shape == (3, 2, 6, 6) and (weights[:, 0, :, 2:] == 0).all()
    kernels = state["params"]["heads"]["query"]["kernel"]
    assert len({float(np.abs(kernel).sum()) for kernel in np.asarray(kernels)}) == 3  # initialized independently


def heads_of(params, fields=("query", "key", "value")):
    """Parameters of the heads of a `MultiHeadAttention`, stacked on a leading axis for `vmap`."""
    axes = {"kernel": 1, "bias": 0}
    return {
        field: {name: jnp.moveaxis(leaf, axes[name], 0) for name, leaf in params[field].items()} for field in fields
    }


@pytest.mark.parametrize("use_bias", [True, False])
def test_multihead_slice_i_equals_head_i(use_bias):
    """Compare outputs and gradients with a `jax.vmap` over heads, followed by the output projection."""
    module = MultiHeadAttention(num_heads=4, use_bias=use_bias, mask=Head(2).mask)
    x, cotangent = np.random.default_rng(1).standard_normal((2, 2, 6, 8)).astype(np.float32)
    params = parameters(module, x)["params"]

    def multi(params, x):
        return module.apply({"params": params}, x)

    def by_heads(params, x):
        head = Head(head_dim=2, use_bias=use_bias)
        outputs = jax.vmap(lambda p: head.apply({"params": p}, x))(heads_of(params))  # [H, B, T, D]
        joined = jnp.einsum("hbtd,hdf->btf", outputs, params["out"]["kernel"])
        return joined + params["out"]["bias"] if use_bias else joined

    def with_gradients(function, params, x, cotangent):
        out, back = jax.vjp(function, params, x)
        return out, back(cotangent)

    run = jax.jit(lambda *args: (with_gradients(multi, *args), with_gradients(by_heads, *args)))
    ours, theirs = run(params, x, cotangent)

    # Both sum the same at most 8·6 products in another order: their errors are a few units of the largest term.
    def compare(a, b):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(np.abs(b).max()) + 1e-6)

    jax.tree.map(compare, ours, theirs)


@pytest.mark.parametrize("layer", [Head(4, dropout_rate=0.5), StackedHeads(2, 4, dropout_rate=0.5)], ids=repr)
def test_heads_drop_by_their_rng_only_if_not_deterministic(layer):
    params, run = parameters(layer, X), jax.jit(layer.apply, static_argnames="deterministic")
    a, b = (run(params, X, deterministic=False, rngs={"dropout": jax.random.key(k)}) for k in (0, 1))
    assert not np.allclose(a, b)
    np.testing.assert_array_equal(run(params, X), jax.jit(layer.clone(dropout_rate=0.0).apply)(params, X))
    with pytest.raises(flax.errors.InvalidRngError):
        jax.eval_shape(lambda params: layer.apply(params, X, deterministic=False), params)
