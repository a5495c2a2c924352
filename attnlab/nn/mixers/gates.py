"""Initializers for decays g = −exp(A_log) · softplus(x + dt_bias), as in Mamba-2 and Gated DeltaNet, and unit norm."""

import jax
import jax.numpy as jnp
import numpy as np


def a_log(low: float, high: float):
    """Initializer of A_log: the log of a uniform number between two bounds (Dao and Gu 2024, section 9)."""

    def init(key, shape, dtype=jnp.float32):
        return jnp.log(jax.random.uniform(key, shape, dtype, low, high))

    return init


def dt_bias(key, shape, dtype=jnp.float32):
    """Initializer of dt_bias: softplus(dt_bias) is log-uniform between 0.001 and 0.1 (Gu and Dao 2023, section 3.6)."""
    low, high = np.log(1e-3), np.log(1e-1)
    dt = jnp.exp(jax.random.uniform(key, shape, dtype, low, high))
    return dt + jnp.log(-jnp.expm1(-dt))


def unit(x):
    """x divided by its Euclidean norm, with a finite gradient at 0: x / √(Σx² + 1e-6)."""
    return x * jax.lax.rsqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)
