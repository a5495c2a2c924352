"""GELU, layer norm and RMS norm in float32 (float64 for float64), which store little for the gradient.

For the backward pass, XLA's CPU backend does not recompute a tanh or a mean. It stores an array as large as the
activations for each step of the formula (seen in jaxlib 0.10.2; XLA's tracker has no issue for this).
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float

from attnlab.types import Array


@jax.custom_jvp
def gelu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """x·Φ(x) in its tanh form (Hendrycks and Gimpel 2016, section 2), in x's type; the gradient stores only x."""
    wide = _wide(x)
    return (0.5 * wide * (1 + jnp.tanh(_inner(wide)))).astype(x.dtype)


@gelu.defjvp
def _gelu_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    wide = _wide(lax.optimization_barrier(x))  # otherwise XLA would store the tanh of the forward pass
    tanh = jnp.tanh(_inner(wide))
    slope = 0.5 * (1 + tanh) + 0.5 * wide * (1 - tanh**2) * math.sqrt(2 / math.pi) * (1 + 3 * _CUBE * wide**2)
    return gelu(x), (slope * dx.astype(slope.dtype)).astype(x.dtype)


_CUBE = 0.044715


def _inner(x):
    return math.sqrt(2 / math.pi) * (x + _CUBE * x**3)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def standardize(x: Float[Array, "*B F"], epsilon: float = 1e-6) -> Float[Array, "*B F"]:
    """(x − mean) / √(variance + ε) of each row: a layer norm (Ba et al. 2016, equation 3) without gain and bias."""
    return _standardized(x, epsilon)[0]


def _standardized(x, epsilon):
    x = _wide(x)
    return _rms_normalized(x - x.mean(axis=-1, keepdims=True), epsilon)


@standardize.defjvp
def _standardize_jvp(epsilon, primals, tangents):
    y, scale = _standardized(primals[0], epsilon)
    dx = tangents[0].astype(y.dtype)
    return y, scale * (dx - dx.mean(axis=-1, keepdims=True) - y * (y * dx).mean(axis=-1, keepdims=True))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def rms_normalize(x: Float[Array, "*B F"], epsilon: float = 1e-6) -> Float[Array, "*B F"]:
    """x / √(mean(x²) + ε) of each row (Zhang and Sennrich 2019, equation 4, without its gain)."""
    return _rms_normalized(x, epsilon)[0]


def _rms_normalized(x, epsilon):
    x = _wide(x)
    scale = lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + epsilon)
    return x * scale, scale


@rms_normalize.defjvp
def _rms_normalize_jvp(epsilon, primals, tangents):
    y, scale = _rms_normalized(primals[0], epsilon)
    dx = tangents[0].astype(y.dtype)
    return y, scale * (dx - y * (y * dx).mean(axis=-1, keepdims=True))


def _wide(x):
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
