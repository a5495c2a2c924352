import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.nn.norms import LayerNorm


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
