import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.test_util import check_grads

from attnlab.ops import pointwise

FUNCTIONS = {"gelu": pointwise.gelu, "standardize": pointwise.standardize}


def test_gelu_matches_jax_tanh_form(float64):
    x = jnp.linspace(-8.0, 8.0, 101)
    np.testing.assert_allclose(pointwise.gelu(x), jax.nn.gelu(x, approximate=True), rtol=1e-12, atol=1e-14)
    ours, theirs = (jax.vmap(jax.grad(f))(x) for f in (pointwise.gelu, jax.nn.gelu))
    np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-12)


@given(
    st.sampled_from([1, 5]),
    st.sampled_from([2, 7, 33]),
    st.integers(0, 2**31),
    st.floats(0.1, 1e3),
    st.floats(-1e3, 1e3),
)
def test_standardize_matches_numpy(rows, width, seed, deviation, mean):
    x = np.random.default_rng(seed).normal(mean, deviation, (rows, width)).astype(np.float32)
    wide = x.astype(np.float64)
    expected = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    # The mean errs by width roundings of numbers as large as |mean| + deviation, and is divided by the deviation found.
    bound = width * 2.0**-23 * (np.abs(x).max() / np.sqrt(wide.var(-1, keepdims=True) + 1e-5) + np.abs(expected) + 1)
    assert (np.abs(np.asarray(pointwise.standardize(jnp.asarray(x), 1e-5)) - expected) <= bound).all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_match_finite_differences(name, float64):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 7)))
    check_grads(FUNCTIONS[name], (x,), order=2, modes=("fwd", "rev"), rtol=1e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_bfloat16_is_computed_in_float32(name):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 64)), jnp.bfloat16)
    exact = np.asarray(FUNCTIONS[name](x.astype(jnp.float32)))
    result = FUNCTIONS[name](x)
    assert result.dtype == (jnp.bfloat16 if name == "gelu" else jnp.float32)
    # At most one rounding to 8 bits, of the result.
    np.testing.assert_allclose(np.asarray(result, np.float32), exact, rtol=2.0**-8, atol=1e-30)
    tangent = jax.jvp(FUNCTIONS[name], (x,), (jnp.ones_like(x),))[1]
    assert tangent.dtype == result.dtype


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradient_keeps_the_input_alone(name):
    """A chain whose gradient would keep a value of the input's size for each step of the formula besides."""
    x = jnp.ones((256, 1024))

    def chain(x):
        for _ in range(4):
            x = FUNCTIONS[name](x) * 0.9
        return x.sum()

    temporary = jax.jit(jax.grad(chain)).lower(x).compile().memory_analysis().temp_size_in_bytes
    assert temporary <= 8 * x.nbytes
