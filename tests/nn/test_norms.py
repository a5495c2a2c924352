import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.nn.norms import LayerNorm, RMSNorm, make_norm


@pytest.mark.parametrize("use_bias", [True, False])
def test_layer_norm_equals_flax(use_bias, float64):
    x = jnp.asarray(np.random.default_rng(0).normal(3.0, 2.0, (2, 5, 8)))
    ours, theirs = LayerNorm(1e-5, use_bias), flax.linen.LayerNorm(epsilon=1e-5, use_bias=use_bias)
    params = jax.tree.map(lambda p: p + 0.3, theirs.init(jax.random.key(0), x))
    assert jax.tree.map(jnp.shape, ours.init(jax.random.key(0), x)) == jax.tree.map(jnp.shape, params)
    np.testing.assert_allclose(ours.apply(params, x), theirs.apply(params, x), rtol=1e-10, atol=1e-12)

    def loss(module):
        return lambda params, x: jnp.sum(module.apply(params, x) ** 3)

    gradients = [jax.grad(loss(module), (0, 1))(params, x) for module in (ours, theirs)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-9), *gradients)


def test_layer_norm_dtype_is_requested_or_wider():
    x = jnp.ones((2, 4), jnp.bfloat16)
    assert LayerNorm(dtype=jnp.bfloat16).init_with_output(jax.random.key(0), x)[0].dtype == jnp.bfloat16
    assert LayerNorm().init_with_output(jax.random.key(0), x)[0].dtype == jnp.float32


@pytest.mark.parametrize("plus_one", [True, False])
def test_rms_norm_equals_flax(plus_one, float64):
    x = jnp.asarray(np.random.default_rng(0).normal(3.0, 2.0, (2, 5, 8)))
    ours, theirs = RMSNorm(1e-5, plus_one), flax.linen.RMSNorm(epsilon=1e-5)
    variables = theirs.init(jax.random.key(0), x)
    assert jax.tree.map(jnp.shape, ours.init(jax.random.key(0), x)) == jax.tree.map(jnp.shape, variables)
    their_params = jax.tree.map(lambda p: p + jnp.linspace(0, 1, 8), variables)
    own_params = jax.tree.map(lambda p: p - 1, their_params) if plus_one else their_params

    def loss(module):
        return lambda params, x: jnp.sum(module.apply(params, x) ** 3)

    values = [jax.value_and_grad(loss(m), (0, 1))(p, x) for m, p in ((ours, own_params), (theirs, their_params))]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-9), *values)


def test_new_norms_change_no_scale():
    x = jnp.array([[3.0, -4.0, 0.0]])
    expected = np.array(x) / np.sqrt(25 / 3)
    for kind in ("rms", "rms_plus_one"):
        norm = make_norm(kind, 0.0)
        np.testing.assert_allclose(norm.init_with_output(jax.random.key(0), x)[0], expected, rtol=1e-6)


def test_unknown_norm_raises_one_line():
    with pytest.raises(ValueError, match="norm = 'batch': expected one of layer, rms, rms_plus_one"):
        make_norm("batch", 1e-6)
