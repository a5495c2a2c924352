"""The feed-forward layer of a transformer block."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from attnlab.nn import sharding
from attnlab.ops.cpu import pointwise, products
from attnlab.types import Array, DType

MLPS = ("plain", "gated")
ACTIVATIONS = {
    "gelu_tanh": pointwise.gelu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
    "silu": jax.nn.silu,
}


class Mlp(nn.Module):
    """Feed-forward layer: W_2 activation(W_1 x) (Vaswani et al. 2017, section 3.3), or its gated form.

    The gated form is W_2 (activation(W_g x) ⊙ W_1 x) (Shazeer 2020, equation 6): SwiGLU with "silu", GeGLU with "gelu"
    or "gelu_tanh".

    Attributes:
      hidden: number of hidden features; None for four times the input's width.
      activation: "gelu_tanh" (GELU's tanh form, as in GPT-2), "gelu" (Hendrycks and Gimpel 2016), "relu",
        "relu_squared" (So et al. 2021) or "silu".
      gated: whether the layer has the gated form.
      use_bias: whether the linear layers add a bias.
      kernel_init, out_kernel_init: initializers of `up/kernel` and `gate/kernel` `[F, hidden]`, and of `down/kernel`
        `[hidden, F]`.
      dtype: type of the computation; None for the input's type.

    >>> Mlp().init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 8)
    >>> list(Mlp(gated=True).init(jax.random.key(0), jnp.ones((2, 5, 8)))["params"])
    ['up', 'gate', 'down']
    """

    hidden: int | None = None
    activation: str = "gelu_tanh"
    use_bias: bool = True
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
    out_kernel_init: nn.initializers.Initializer | None = None
    dtype: DType | None = None
    gated: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "*B F"]) -> Float[Array, "*B F"]:
        """Apply the layer to each token: `[..., F]` to `[..., F]`; ValueError for an unknown activation."""
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation = {self.activation!r}: expected one of {', '.join(ACTIVATIONS)}")
        activation = ACTIVATIONS[self.activation]
        width = x.shape[-1]
        options = {"use_bias": self.use_bias, "dtype": self.dtype, "dot_general": products.dot_general}

        def hidden(name):
            features = 4 * width if self.hidden is None else self.hidden
            y = nn.Dense(features, kernel_init=self.kernel_init, name=name, **options)(x)
            return sharding.constrain(y, *("batch", "length", *(None,) * y.ndim)[: y.ndim - 1], "mlp")

        y = hidden("up")
        y = activation(hidden("gate")) * y if self.gated else activation(y)
        return nn.Dense(width, kernel_init=self.out_kernel_init or self.kernel_init, name="down", **options)(y)
