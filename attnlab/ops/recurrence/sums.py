"""Sums of logs of decays over the tokens of a chunk, as products with matrices of 0 and 1.

XLA's cumulative sums are slow on CPUs. On accelerators the products must not round to TF32.
"""

import jax.numpy as jnp

from attnlab.types import Array


def over(tokens, g: Array) -> Array:
    """Sum the rows of g `[..., C, K]` that each row of `tokens`, `[N, C]` of 0 and 1, selects: `[..., N, K]`."""
    tokens = jnp.broadcast_to(jnp.asarray(tokens, g.dtype), (*g.shape[:-2], *tokens.shape))
    return jnp.matmul(tokens, g, precision="highest")
