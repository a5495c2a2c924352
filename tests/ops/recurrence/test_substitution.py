"""Unit triangular systems against NumPy, with entries on and above the diagonal that must not be read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.ops.recurrence.substitution import solve
from tests.ops.cases import slow


@pytest.mark.parametrize("size", [1, 20, slow(64)])
def test_substitution_equals_inverse_in_values_and_gradients(float64, size):
    rng = np.random.default_rng(size)
    a, b, cotangent = rng.standard_normal((3, size, size)) / 4, *rng.standard_normal((2, 3, size, 5))
    inverse = np.linalg.inv(np.eye(size) + np.tril(a, -1))

    @jax.jit
    def run(a, b):
        x, back = jax.vjp(solve, a, b)
        return x, *back(cotangent)

    x, d_a, d_b = run(jnp.where(np.tri(size, k=-1, dtype=bool), a, np.nan), b)
    np.testing.assert_allclose(x, inverse @ b, rtol=1e-10, atol=1e-12)
    expected = np.swapaxes(inverse, -1, -2) @ cotangent
    np.testing.assert_allclose(d_b, expected, rtol=1e-10, atol=1e-12)
    expected_a = -np.tril(expected @ np.swapaxes(inverse @ b, -1, -2), -1)
    np.testing.assert_allclose(d_a, expected_a, rtol=1e-10, atol=1e-12)


def test_equal_keys_with_beta_two_are_solved_exactly():
    """Powers of this matrix have entries of 10¹⁸ that cancel; its inverse has entries of at most 2."""
    a = 2 * np.tri(64, k=-1, dtype=np.float32)
    inverse = jax.jit(solve)(a, np.eye(64, dtype=np.float32))
    np.testing.assert_array_equal(inverse, np.rint(np.linalg.inv(np.eye(64) + np.float64(a))))
