"""Guarded log-sum-exp: fully masked rows, whose max is −inf, give 0 weights and lse −inf instead of NaN.

shift = finite_shift(max_j s_j)    denominator, lse = normalizer(shift, Σ_j exp(s_j − shift))
"""

import jax.numpy as jnp
from jaxtyping import Float

from attnlab.types import Array


def finite_shift(maximum: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The number to subtract from logits before `exp`: their max, or 0 where that is −inf.

    exp(−inf − 0) is 0, while exp(−inf − (−inf)) would be NaN.

    >>> finite_shift(jnp.array([2.0, -jnp.inf]))
    Array([2., 0.], dtype=float32)
    """
    return jnp.where(jnp.isneginf(maximum), 0, maximum)


def normalizer(
    shift: Float[Array, "*shape"], total: Float[Array, "*shape"]
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """(denominator, lse) of a softmax, from what was subtracted from the logits and the sum of their exponentials.

    A fully masked row, whose sum is 0, has denominator 1 and lse −inf.

    >>> normalizer(jnp.array([2.0, 0.0]), jnp.array([1.0, 0.0]))
    (Array([1., 1.], dtype=float32), Array([  2., -inf], dtype=float32))
    """
    visible = total > 0
    denominator = jnp.where(visible, total, 1)
    return denominator, jnp.where(visible, shift + jnp.log(denominator), -jnp.inf)
