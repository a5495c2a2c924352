"""Recurrent, convolutional and linear-attention layers can replace attention in a block."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import linear_attention
from attnlab.masks import Causal, SlidingWindow
from attnlab.nn import GRU, Block, CausalConv, LinearAttention, Mlp, MultiHeadAttention
from tests.parameters import parameters

X = np.random.default_rng(0).standard_normal((2, 9, 8)).astype(np.float32)


def doubled(x):
    return jnp.concatenate([jax.nn.relu(x), jax.nn.relu(-x)], axis=-1)


EACH = pytest.mark.parametrize(
    "mixer",
    [
        GRU(),
        CausalConv(kernel_size=2, dilation=3),
        CausalConv(kernel_size=1),
        LinearAttention(num_heads=2, feature_map=doubled),
        pytest.param(CausalConv(kernel_size=3), marks=pytest.mark.slow),
        pytest.param(LinearAttention(num_heads=2), marks=pytest.mark.slow),
    ],
    ids=["GRU", "CausalConv-3", "CausalConv-1", "LinearAttention-doubled", "CausalConv", "LinearAttention"],
)


@functools.cache
def compiled(module):
    """Variables for X and compiled `apply`."""
    return parameters(module, X), jax.jit(module.apply)


@EACH
def test_mixer_replaces_attention_in_block(mixer):
    def shapes(mixer):
        return jax.eval_shape(lambda x: Block(mixer, Mlp()).init_with_output(jax.random.key(0), x)[0], X)

    assert shapes(mixer) == shapes(MultiHeadAttention(num_heads=2, mask=Causal()))


@EACH
@pytest.mark.parametrize("length", [1, 4])
def test_mixer_ignores_later_tokens(mixer, length):
    params, apply = compiled(Block(mixer, Mlp()))
    changed = np.where(np.arange(9)[:, None] < length, X, -X)
    before, after = np.asarray(apply(params, X)), np.asarray(apply(params, changed))
    np.testing.assert_allclose(before[:, :length], after[:, :length], atol=1e-6)
    assert not np.allclose(before[:, length:], after[:, length:], atol=1e-3)


@EACH
def test_mixer_decoding_with_cache_equals_full_pass(mixer):
    params, apply = compiled(Block(mixer, Mlp()))
    cache, steps = mixer.empty_cache(2, 8), []
    for part in (X[:, :4], *(X[:, i : i + 1] for i in range(4, 9))):
        out, cache = apply(params, part, cache=cache)
        steps.append(out)
    np.testing.assert_allclose(np.concatenate(steps, axis=1), apply(params, X), atol=1e-5)


@EACH
def test_mixer_bfloat16_cache_equals_full_pass(mixer):
    params, apply = compiled(mixer.clone(dtype=jnp.bfloat16))
    x = X.astype(jnp.bfloat16)
    cache, steps = mixer.clone(dtype=jnp.bfloat16).empty_cache(2, 8), []
    for part in (x[:, :3], x[:, 3:6], x[:, 6:]):
        out, cache = apply(params, part, cache=cache)
        steps.append(out)
    whole = apply(params, x)
    assert whole.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.concatenate(steps, axis=1), whole)


@EACH
def test_mixer_wrong_shape_raises_one_line(own_errors, mixer):
    with pytest.raises(ValueError, match=r"inputs of \w+ have shape \(9, 8\)"):
        jax.eval_shape(mixer.init, jax.random.key(0), X[0])
    with pytest.raises(ValueError, match=r"cache of \w+ has shape \(2, 99\).*empty_cache"):
        jax.eval_shape(lambda: mixer.init(jax.random.key(0), X, cache=np.zeros((2, 99), np.float32)))


def test_conv_receptive_field_follows_kernel_and_dilation():
    x = np.random.default_rng(2).standard_normal((1, 32, 4)).astype(np.float32)
    modules = [CausalConv(kernel_size=3), CausalConv(kernel_size=3, dilation=4), GRU()]

    def last(x, module):
        return module.apply(parameters(module, x[:, :1]), x)[0, -1] @ np.array([1, -2, 3, -5], np.float32)

    # The derivatives of the last token.
    slopes = jax.jit(lambda x: [jax.grad(last)(x, module)[0] for module in modules])(x)
    assert [32 - int(np.any(slope, axis=1).argmax()) for slope in slopes] == [3, 9, 32]


def test_conv_equals_its_kernel():
    conv = CausalConv(kernel_size=2, dilation=2)
    params, apply = compiled(conv)
    params = jax.tree.map(np.asarray, params["params"]["conv"])
    before = np.pad(X, ((0, 0), (2, 0), (0, 0)))[:, :9]
    expected = before @ params["kernel"][0] + X @ params["kernel"][1] + params["bias"]
    np.testing.assert_allclose(apply({"params": {"conv": params}}, X), expected, atol=1e-5)


@EACH
def test_mixer_rejects_unsupported_mask(mixer):
    jax.eval_shape(lambda: mixer.init(jax.random.key(0), X, mask=Causal()))
    with pytest.raises(ValueError, match="mask is SlidingWindow, .*causal"):
        jax.eval_shape(lambda: mixer.init(jax.random.key(0), X, mask=SlidingWindow(left=2)))


def test_conv_kernel_size_zero_raises_one_line():
    with pytest.raises(ValueError, match="kernel_size, dilation = 0, 1"):
        jax.eval_shape(CausalConv(kernel_size=0).init, jax.random.key(0), X)


@pytest.mark.parametrize("use_bias, normalize", [(True, True), (False, False)])
def test_linear_attention_module_equals_projections_and_operator(use_bias, normalize, float64):
    x = np.random.default_rng(3).standard_normal((2, 9, 8))
    module = LinearAttention(num_heads=2, head_dim=3, features=5, normalize=normalize, use_bias=use_bias)
    params = parameters(module, x)["params"]
    softmax = MultiHeadAttention(num_heads=2, head_dim=3, out_features=5, use_bias=use_bias)
    theirs = jax.eval_shape(softmax.init, jax.random.key(1), x)["params"]
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, dict(theirs))

    def projected(name):
        return np.einsum("btf,fhd->bthd", x, params[name]["kernel"]) + params[name].get("bias", 0)

    @jax.jit
    def run(params, *qkv):
        return module.apply({"params": params}, x), linear_attention(*qkv, normalize=normalize, impl="naive")

    out, z = run(params, *map(projected, ("query", "key", "value")))
    expected = np.einsum("bthd,hdf->btf", z, params["out"]["kernel"]) + params["out"].get("bias", 0)
    np.testing.assert_allclose(out, expected, rtol=1e-10)


def test_linear_attention_state_has_the_features_of_the_map():
    assert LinearAttention(num_heads=2, feature_map=doubled).empty_cache(batch=3, features=8).kv.shape == (3, 2, 8, 4)


@pytest.mark.parametrize("num_heads", [0, 3])
def test_linear_attention_heads_that_do_not_fit_raise_one_line(own_errors, num_heads):
    with pytest.raises(ValueError, match=f"num_heads = {num_heads}: .*width 8"):
        jax.eval_shape(LinearAttention(num_heads=num_heads).init, jax.random.key(0), X)
