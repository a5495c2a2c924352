import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.nn.norms import LayerNorm, RMSNorm, make_norm
from tests.parameters import parameters

X = np.random.default_rng(0).normal(3.0, 2.0, (2, 5, 8))


@pytest.mark.parametrize(
    "ours, theirs",
    [
        (LayerNorm(1e-5), flax.linen.LayerNorm(epsilon=1e-5)),
        (LayerNorm(1e-5, use_bias=False), flax.linen.LayerNorm(epsilon=1e-5, use_bias=False)),
        (RMSNorm(1e-5), flax.linen.RMSNorm(epsilon=1e-5)),
        (RMSNorm(1e-5, plus_one=True), flax.linen.RMSNorm(epsilon=1e-5)),
    ],
)
def test_norm_and_its_gradients_equal_flax(ours, theirs, float64):
    their_params = jax.tree.map(np.float64, parameters(theirs, X))
    own_params = jax.tree.map(lambda p: p - getattr(ours, "plus_one", 0), their_params)
    assert jax.tree.map(jnp.shape, parameters(ours, X)) == jax.tree.map(jnp.shape, their_params)

    def loss(params, x, module):
        out = module.apply(params, x)
        return (out**3).sum(), out

    run = jax.jit(jax.grad(loss, (0, 1), has_aux=True), static_argnums=2)
    (slopes, out), (expected_slopes, expected) = run(own_params, X, ours), run(their_params, X, theirs)
    np.testing.assert_allclose(out, expected, rtol=1e-10, atol=1e-12)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-9), slopes, expected_slopes)


def test_layer_norm_dtype_is_requested_or_wider():
    x = np.ones((2, 4), jnp.bfloat16)
    for dtype, expected in ((jnp.bfloat16, jnp.bfloat16), (None, jnp.float32)):
        out, _ = jax.eval_shape(LayerNorm(dtype=dtype).init_with_output, jax.random.key(0), x)
        assert out.dtype == expected


def test_initial_norm_scales_are_one():
    x = np.array([[3.0, -4.0, 0.0]], np.float32)
    norms = [make_norm(kind, 0.0) for kind in ("rms", "rms_plus_one")]
    for out in jax.jit(lambda key: [norm.init_with_output(key, x)[0] for norm in norms])(jax.random.key(0)):
        np.testing.assert_allclose(out, x / np.sqrt(25 / 3), rtol=1e-6)


def test_unknown_norm_raises_one_line():
    with pytest.raises(ValueError, match="norm = 'batch'"):
        make_norm("batch", 1e-6)
