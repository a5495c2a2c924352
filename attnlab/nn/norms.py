"""Layer normalization."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Float

from attnlab.ops import pointwise
from attnlab.types import Array, DType


class LayerNorm(nn.Module):
    """Layer normalization over the last axis (Ba et al. 2016): scale·(x − mean)/√(variance + ε) + bias.

    Parameters have the names and shapes of `flax.linen.LayerNorm`: `scale` and `bias` `[F]`.

    Attributes:
      epsilon: ε.
      use_bias: whether there is a bias.
      dtype: type of the result; the wider of the input's and the parameters' when None. Sums are float32.

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
