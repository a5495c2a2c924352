"""Recurrent, convolutional and linear-attention layers can replace attention in a block."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import linear_attention
from attnlab.masks import Causal, SlidingWindow
from attnlab.nn import GRU, Block, CausalConv, LinearAttention, Mlp, MultiHeadAttention

X = np.random.default_rng(0).standard_normal((2, 9, 8)).astype(np.float32)
MIXERS = [
    GRU(),
    CausalConv(kernel_size=3),
    CausalConv(kernel_size=2, dilation=3),
    CausalConv(kernel_size=1),
    LinearAttention(num_heads=2),
]
EACH = pytest.mark.parametrize("mixer", MIXERS, ids=lambda m: f"{type(m).__name__}-{getattr(m, 'dilation', '')}")


def compiled(module):
    """Variables for X and compiled `apply`."""
    return jax.jit(module.init)(jax.random.key(1), X), jax.jit(module.apply)


@EACH
def test_mixer_replaces_attention_in_block(mixer):
    def shapes(mixer):
        return jax.eval_shape(lambda x: Block(mixer, Mlp()).init_with_output(jax.random.key(0), x)[0], X)

    assert shapes(mixer) == shapes(MultiHeadAttention(num_heads=2, mask=Causal()))


@EACH
@pytest.mark.parametrize("length", [1, 4])
def test_mixer_ignores_later_tokens(mixer, length):
    params, apply = compiled(mixer)
    np.testing.assert_allclose(np.asarray(apply(params, X))[:, :length], apply(params, X[:, :length]), atol=1e-6)


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
    mixer = mixer.clone(dtype=jnp.bfloat16)
    x = jnp.asarray(X, jnp.bfloat16)
    params = jax.jit(mixer.init)(jax.random.key(1), x)
    first, cache = mixer.apply(params, x[:, :5], cache=mixer.empty_cache(2, 8))
    then, _ = mixer.apply(params, x[:, 5:], cache=cache)
    whole = mixer.apply(params, x)
    assert whole.dtype == jnp.bfloat16
    np.testing.assert_array_equal(jnp.concatenate([first, then], axis=1), whole)


@EACH
def test_mixer_wrong_shape_raises_one_line(own_errors, mixer):
    with pytest.raises(
        ValueError, match=r"the inputs of \w+ have shape \(9, 8\), expected \[batch, length, features\]"
    ):
        mixer.init(jax.random.key(0), X[0])
    with pytest.raises(
        ValueError, match=r"the cache of \w+ has shape \(2, 99\), expected .*: make it with empty_cache"
    ):
        mixer.init(jax.random.key(0), X, cache=jnp.zeros((2, 99)))


def reach(module, length):
    """Receptive field of the last token, from its derivative."""
    x = np.random.default_rng(2).standard_normal((1, length, 4)).astype(np.float32)
    params = jax.jit(module.init)(jax.random.key(1), x)
    jacobian = np.asarray(jax.jit(jax.jacrev(lambda x: module.apply(params, x)[0, -1]))(x))
    dependence = np.abs(jacobian[:, 0]).sum((0, 2)) > 0
    return length - int(dependence.argmax())


def test_conv_receptive_field_follows_kernel_and_dilation():
    assert reach(CausalConv(kernel_size=3), 32) == 3
    assert reach(CausalConv(kernel_size=3, dilation=4), 32) == 9
    assert reach(GRU(), 32) == 32


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
    with pytest.raises(ValueError, match="mask is SlidingWindow, but .* is causal by construction: leave it out"):
        mixer.init(jax.random.key(0), X, mask=SlidingWindow(left=2))


def test_conv_kernel_size_zero_raises_one_line():
    with pytest.raises(ValueError, match="kernel_size, dilation = 0, 1: expected 1 or more of both"):
        CausalConv(kernel_size=0).init(jax.random.key(0), X)


@pytest.mark.parametrize("use_bias, normalize", [(True, True), (False, False)])
def test_linear_attention_module_equals_projections_and_operator(use_bias, normalize, float64):
    x = np.random.default_rng(3).standard_normal((2, 9, 8))
    module = LinearAttention(num_heads=2, head_dim=3, features=5, normalize=normalize, use_bias=use_bias)
    out, variables = module.init_with_output(jax.random.key(1), x)
    params = jax.tree.map(np.asarray, variables["params"])
    softmax = MultiHeadAttention(num_heads=2, head_dim=3, out_features=5, use_bias=use_bias)
    theirs = jax.eval_shape(softmax.init, jax.random.key(1), x)["params"]
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, dict(theirs))

    def projected(name):
        return np.einsum("btf,fhd->bthd", x, params[name]["kernel"]) + params[name].get("bias", 0)

    z = linear_attention(*map(projected, ("query", "key", "value")), normalize=normalize, impl="naive")
    expected = np.einsum("bthd,hdf->btf", z, params["out"]["kernel"]) + params["out"].get("bias", 0)
    np.testing.assert_allclose(out, expected, rtol=1e-10)


def test_linear_attention_module_takes_a_feature_map():
    def doubled(x):
        return jnp.concatenate([jax.nn.relu(x), jax.nn.relu(-x)], axis=-1)

    module = LinearAttention(num_heads=2, feature_map=doubled)
    assert module.empty_cache(batch=3, features=8).kv.shape == (3, 2, 8, 4)
    params, apply = compiled(module)
    first, cache = apply(params, X[:, :5], cache=module.empty_cache(2, 8))
    then, _ = apply(params, X[:, 5:], cache=cache)
    np.testing.assert_allclose(np.concatenate([first, then], axis=1), apply(params, X), atol=1e-5)


@pytest.mark.parametrize("num_heads", [0, 3])
def test_linear_attention_heads_that_do_not_fit_raise_one_line(own_errors, num_heads):
    with pytest.raises(
        ValueError, match=f"num_heads = {num_heads}: expected a divisor of the input width 8, or a head"
    ):
        LinearAttention(num_heads=num_heads).init(jax.random.key(0), X)
