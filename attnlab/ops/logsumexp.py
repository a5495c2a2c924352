"""Guarded log-sum-exp: fully masked rows, whose max is −inf, give weights 0 and lse −inf instead of NaN.

    shift = finite_shift(max_j s_j)    denominator, log_sum = normalizer(Σ_j exp(s_j − shift))    lse = shift + log_sum

Backends return the pair (shift, log_sum), not the sum: if all logits of a row are large, as after a bias of −1e9, the
float32 sum loses log_sum, and exp(s − lse) is wrong by a factor of up to the number of keys.
"""

import jax.numpy as jnp
from jaxtyping import Float

from attnlab.types import Array


def finite_shift(maximum: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The max, or 0 where it is −inf: exp(−inf − 0) is 0, while exp(−inf − (−inf)) is NaN."""
    return jnp.where(jnp.isneginf(maximum), 0, maximum)


def normalizer(total: Float[Array, "*shape"]) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """Return (denominator, log_sum) from the sum of exponentials; (1, −inf) for a fully masked row, whose sum is 0."""
    visible = total > 0
    denominator = jnp.where(visible, total, 1)
    return denominator, jnp.where(visible, jnp.log(denominator), -jnp.inf)
