"""A head equals its formula; stacked heads and multi-head attention equal their heads."""

import operator

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.masks import Padding
from attnlab.nn import Head, MultiHeadAttention, StackedHeads

X = jax.random.normal(jax.random.key(0), (2, 6, 8))


def test_head_equals_formula_scaled_by_its_own_width():
    head = Head(head_dim=3)
    params = head.init(jax.random.key(1), X)
    w = {name: np.asarray(leaf["kernel"], np.float64) for name, leaf in params["params"].items()}
    assert {name: kernel.shape for name, kernel in w.items()} == dict.fromkeys(("query", "key", "value"), (8, 3))
    for sequence, out in zip(np.asarray(X, np.float64), head.apply(params, X)):
        scores = (sequence @ w["query"]) @ (sequence @ w["key"]).T / np.sqrt(3)
        weights = np.exp(scores) * np.tri(6)
        expected = weights / weights.sum(1, keepdims=True) @ (sequence @ w["value"])
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("length", [1, 3, 6])
def test_head_ignores_later_tokens(length):
    head = Head(head_dim=3)
    params = head.init(jax.random.key(1), X)
    np.testing.assert_allclose(head.apply(params, X)[:, :length], head.apply(params, X[:, :length]), atol=1e-6)


def test_head_sows_weights_when_intermediates_mutable():
    head = Head(head_dim=3)
    params = head.init(jax.random.key(1), X)
    out, state = head.apply({"params": params["params"]}, X, mutable=["intermediates"])
    (weights,) = state["intermediates"]["attention_weights"]
    assert weights.shape == (2, 6, 6)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
    np.testing.assert_allclose(out, weights @ (X @ params["params"]["value"]["kernel"]), atol=1e-6)


def test_head_ands_masks_of_field_and_call():
    head = Head(head_dim=3)
    params = head.init(jax.random.key(1), X)
    padded = head.apply(params, X, mask=Padding(jnp.array([2, 6])))
    np.testing.assert_allclose(padded[1], head.apply(params, X)[1], atol=1e-6)
    np.testing.assert_allclose(padded[0, :2], head.apply(params, X)[0, :2], atol=1e-6)
    assert not np.allclose(padded[0, 2:], head.apply(params, X)[0, 2:])


def test_head_dropout_uses_dropout_rng():
    head = Head(head_dim=3, dropout_rate=0.5)
    params = head.init(jax.random.key(1), X)
    a, b = (head.apply(params, X, deterministic=False, rngs={"dropout": jax.random.key(k)}) for k in (0, 1))
    assert not np.allclose(a, b)
    np.testing.assert_array_equal(head.apply(params, X), Head(head_dim=3).apply(params, X))


def test_stacked_heads_equal_concatenated_heads():
    stacked = StackedHeads(num_heads=3, head_dim=4)
    params = stacked.init(jax.random.key(1), X)
    assert params["params"]["heads"]["query"]["kernel"].shape == (3, 8, 4)
    one = [jax.tree.map(operator.itemgetter(h), params["params"]["heads"]) for h in range(3)]
    each = [Head(4).apply({"params": head}, X) for head in one]
    np.testing.assert_allclose(jax.jit(stacked.apply)(params, X), jnp.concatenate(each, axis=-1), atol=1e-6)
    assert len({float(abs(head).sum()) for head in each}) == 3  # initialized independently


def test_stacked_heads_take_array_masks_and_sow_weights():
    stacked = StackedHeads(num_heads=3, head_dim=4)
    params = stacked.init(jax.random.key(1), X)["params"]
    _, state = stacked.apply({"params": params}, X, mask=Padding(jnp.array([2, 6])), mutable=["intermediates"])
    (weights,) = state["intermediates"]["heads"]["attention_weights"]
    assert weights.shape == (3, 2, 6, 6) and (weights[:, 0, :, 2:] == 0).all()


def heads_of(params, fields=("query", "key", "value")):
    """Parameters of the heads of a `MultiHeadAttention`, stacked on a leading axis for `vmap`."""
    axes = {"kernel": 1, "bias": 0}
    return {
        field: {name: jnp.moveaxis(leaf, axes[name], 0) for name, leaf in params[field].items()} for field in fields
    }


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_multihead_slice_i_equals_head_i(use_bias, seed):
    """Compare outputs and gradients with a `jax.vmap` over heads, followed by the output projection."""
    module = MultiHeadAttention(
        num_heads=4, use_bias=use_bias, mask=Head(2).mask, kernel_init=flax.linen.initializers.normal(1.0)
    )
    x = jax.random.normal(jax.random.key(seed), (2, 6, 8))
    params = module.init(jax.random.key(seed + 1), x)["params"]
    if use_bias:
        params = jax.tree.map(lambda leaf: leaf + 0.1, params)
    cotangent = jax.random.normal(jax.random.key(seed + 2), (2, 6, 8))

    def multi(params, x):
        return module.apply({"params": params}, x)

    def by_heads(params, x):
        head = Head(head_dim=2, use_bias=use_bias)
        outputs = jax.vmap(lambda p: head.apply({"params": p}, x))(heads_of(params))  # [H, B, T, D]
        joined = jnp.einsum("hbtd,hdf->btf", outputs, params["out"]["kernel"])
        return joined + params["out"]["bias"] if use_bias else joined

    ours, ours_back = jax.vjp(multi, params, x)
    theirs, theirs_back = jax.vjp(by_heads, params, x)

    # Both sum the same at most 8·6 products in another order: their errors are a few units of the largest term.
    def compare(a, b):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(jnp.abs(b).max()) + 1e-6)

    compare(ours, theirs)
    jax.tree.map(compare, ours_back(cotangent), theirs_back(cotangent))
