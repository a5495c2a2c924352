"""GELU and norms against their formulas, and whether XLA still stores more for the plain formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlab.ops.cpu import pointwise
from tests.programs import optimized

FUNCTIONS = {"gelu": pointwise.gelu, "standardize": pointwise.standardize}
standardize = jax.jit(lambda x: pointwise.standardize(x, 1e-5))


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
    # The mean errs by width roundings of numbers as large as |mean| + deviation, divided by the computed deviation.
    bound = width * 2.0**-23 * (np.abs(x).max() / np.sqrt(wide.var(-1, keepdims=True) + 1e-5) + np.abs(expected) + 1)
    assert (np.abs(np.asarray(standardize(x)) - expected) <= bound).all()


def standardized(x):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6)


FORMULAS = {"gelu": jax.nn.gelu, "standardize": standardized}


@pytest.mark.parametrize("name, formula", FORMULAS.items())
def test_values_and_first_two_derivatives_equal_the_formula(name, formula, float64):
    rng = np.random.default_rng(0)

    @jax.jit
    def run(x, d1, d2, g):
        def derivatives(f):
            def push(x):
                return jax.jvp(f, (x,), (d1,))[1]

            def pull(x):
                return jax.vjp(f, x)[1](g)[0]

            second = [jax.jvp(push, (x,), (d2,))[1], jax.jvp(pull, (x,), (d1,))[1]]
            return [f(x), push(x), pull(x), *second, *(jax.vjp(one, x)[1](g)[0] for one in (push, pull))]

        return [derivatives(f) for f in (FUNCTIONS[name], formula)]

    (value, *actual), (exact, *expected) = run(*rng.normal(0, 3, (4, 3, 7)))
    np.testing.assert_allclose(value, exact, rtol=1e-12, atol=1e-14)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_bfloat16_is_computed_in_float32(name):
    x = np.random.default_rng(0).normal(size=(3, 64)).astype(jnp.bfloat16)
    run = jax.jit(lambda x: (FUNCTIONS[name](x), jax.jvp(FUNCTIONS[name], (x,), (jnp.ones_like(x),))[1]))
    exact, (result, tangent) = run(x.astype(np.float32))[0], run(x)
    assert result.dtype == (jnp.bfloat16 if name == "gelu" else jnp.float32)
    # At most one rounding to 8 bits, of the result.
    np.testing.assert_allclose(np.asarray(result, np.float32), exact, rtol=2.0**-8, atol=1e-30)
    assert tangent.dtype == result.dtype


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradient_stores_only_the_input(name):
    """The plain formula's gradient would also store an array of the input's size for each of its steps."""
    x = jax.ShapeDtypeStruct((256, 1024), jnp.float32)

    def chain(x):
        for _ in range(4):
            x = FUNCTIONS[name](x) * 0.9
        return x.sum()

    temporary = jax.jit(jax.grad(chain)).lower(x).compile().memory_analysis().temp_size_in_bytes
    assert temporary <= 8 * x.size * x.dtype.itemsize


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_xla_still_stores_more_for_gradient_of_plain_formula(name):
    x, kernels = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((256, 512), (4, 512, 512)))

    def temporaries(function):
        def layers(x, kernels):
            for kernel in kernels:
                x = function(x @ kernel)
            return x.sum()

        compiled = optimized(jax.grad(layers, argnums=(0, 1))).lower(x, kernels).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    ours, plain = temporaries(FUNCTIONS[name]), temporaries(FORMULAS[name])
    assert plain >= ours + x.size * x.dtype.itemsize, "ops/cpu/pointwise.py is not needed for memory any more"
