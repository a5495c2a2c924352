"""Layer and root-mean-square normalization."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Float

from attnlab.ops.cpu import pointwise
from attnlab.types import Array, DType

NORMS = ("layer", "rms", "rms_plus_one")
NORM_AT = ("before", "after", "both")  # where a norm is, relative to a layer of a block
NORM_EPSILON = 1e-5  # as in GPT-2


class LayerNorm(nn.Module):
    """Layer normalization over the last axis (Ba et al. 2016): scale·(x − mean)/√(variance + ε) + bias.

    Parameters have the names and shapes of `flax.linen.LayerNorm`: `scale` and `bias` `[F]`.

    Attributes:
      epsilon: ε.
      use_bias: whether there is a bias.
      dtype: type of the result; None for the wider type of input and parameters. Sums are float32.

    >>> LayerNorm().init_with_output(jax.random.key(0), jnp.array([[1.0, 2.0, 3.0]]))[0].round(4)
    Array([[-1.2247,  0.    ,  1.2247]], dtype=float32)
    """

    epsilon: float = 1e-6
    use_bias: bool = True
    dtype: DType | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "*B F"]) -> Float[Array, "*B F"]:
        """Normalize each vector of `[..., F]`."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        y = pointwise.standardize(x, self.epsilon) * scale
        if self.use_bias:
            y = y + self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        return y.astype(self.dtype or jnp.result_type(x, scale))


class RMSNorm(nn.Module):
    """Root-mean-square normalization over the last axis (Zhang and Sennrich 2019): scale·x/√(mean(x²) + ε).

    Parameters have the names and shapes of `flax.linen.RMSNorm`: `scale` `[F]`.

    Attributes:
      epsilon: ε.
      plus_one: multiply by 1 + scale, where scale starts at 0 (Gemma Team 2024), so weight decay pulls the gain to 1.
      dtype: type of the result; None for the wider type of input and parameters. Sums are float32.
      groups: number of consecutive groups of features, each normalized separately (Wu and He 2018).

    >>> RMSNorm().init_with_output(jax.random.key(0), jnp.array([[2.0, -2.0]]))[0].round(3)
    Array([[ 1., -1.]], dtype=float32)
    """

    epsilon: float = 1e-6
    plus_one: bool = False
    dtype: DType | None = None
    groups: int = 1

    @nn.compact
    def __call__(self, x: Float[Array, "*B F"]) -> Float[Array, "*B F"]:
        """Normalize each vector of `[..., F]`."""
        initial = nn.initializers.zeros if self.plus_one else nn.initializers.ones
        scale = self.param("scale", initial, (x.shape[-1],))
        grouped = x.reshape(*x.shape[:-1], self.groups, x.shape[-1] // self.groups)
        y = pointwise.rms_normalize(grouped, self.epsilon).reshape(x.shape) * (1 + scale if self.plus_one else scale)
        return y.astype(self.dtype or jnp.result_type(x, scale))


def make_norm(
    kind: str, epsilon: float, *, use_bias: bool = False, dtype: DType | None = None, name: str | None = None
) -> nn.Module:
    """Make a norm: kind "layer", or "rms" or "rms_plus_one", which have no bias; ValueError for another kind."""
    if kind not in NORMS:
        raise ValueError(f"norm = {kind!r}: expected one of {', '.join(NORMS)}")
    if kind == "layer":
        return LayerNorm(epsilon, use_bias=use_bias, dtype=dtype, name=name)
    return RMSNorm(epsilon, plus_one=kind == "rms_plus_one", dtype=dtype, name=name)
