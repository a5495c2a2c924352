"""The short convolution before a recurrence or attention."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Float, Int

from attnlab.nn.layer import Context
from attnlab.nn.mixers.interface import last
from attnlab.types import Array, DType


class ShortConv(nn.Module):
    """Depthwise causal convolution: y_t = Σ_i w_i · x_{t−W+1+i} (Gu and Dao 2023, section 3.4).

    Attributes:
      width: W, number of tokens that the kernel covers; the last is the token itself.
      use_bias: whether the layer adds a bias.
      kernel_init: initializer of the kernel `[W, …]`; None for uniform within ±1/√W, as in the papers' code.
      dtype: type of the computation; None for the input's type.

    >>> conv = ShortConv(width=4)
    >>> (out, after), _ = conv.init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))
    >>> out.shape, after.shape
    ((2, 5, 8), (2, 3, 8))
    """

    width: int = 4
    use_bias: bool = False
    kernel_init: nn.initializers.Initializer | None = None
    dtype: DType | None = None

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T *F"],
        before: Float[Array, "B R *F"] | None = None,
        segments: Int[Array, "B T"] | None = None,
        lengths: Int[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B T *F"], Float[Array, "B R *F"]]:
        """(Outputs, the last R = W − 1 inputs that are not padding); `before` are the inputs before x, None for zeros.

        Outputs depend only on inputs of the same segment.
        """
        width, length, features = self.width, x.shape[1], x.shape[2:]
        kernel = self.param("kernel", self.kernel_init or _uniform(width), (width, *features))
        dtype = self.dtype or x.dtype
        # Sums are in float32, because processors sum bfloat16 more slowly.
        x = x.astype(dtype).astype(jnp.promote_types(dtype, jnp.float32))
        if before is None:
            before = jnp.zeros((x.shape[0], width - 1, *features), dtype)
        inputs = jnp.concatenate([before.astype(x.dtype), x], axis=1)
        out = x * kernel[-1].astype(x.dtype)
        for distance in range(1, width):
            earlier = inputs[:, width - 1 - distance :][:, :length]
            if segments is not None:
                same = segments[:, distance:] == segments[:, :-distance] if distance < length else segments[:, :0] == 0
                same = jnp.pad(same, ((0, 0), (length - same.shape[1], 0)))
                earlier = jnp.where(same[(..., *(None,) * len(features))], earlier, 0)
            out = out + earlier * kernel[-1 - distance].astype(x.dtype)
        if self.use_bias:
            out = out + self.param("bias", nn.initializers.zeros, features).astype(x.dtype)
        return out.astype(dtype), last(inputs, width - 1, lengths).astype(before.dtype)


def convolve(projections: dict[str, Array], width: int, before: dict[str, Array] | None, context: Context, dtype=None):
    """(The projections, convolved by the calling module's submodules `NAME_conv`; their last inputs, for a cache).

    For width 0: (the unchanged projections, None).
    """
    if not width:
        return projections, None
    convolved, last_inputs = {}, {}
    for name, y in projections.items():
        conv = ShortConv(width, dtype=dtype, name=f"{name}_conv")
        convolved[name], last_inputs[name] = conv(y, before and before[name], context.segments, context.lengths)
    return convolved, last_inputs


def inputs_before(sizes: dict[str, tuple[int, ...]], width: int, batch: int, dtype) -> dict[str, Array] | None:
    """The inputs before the first token, zeros, of convolutions with features `sizes`, by name; None for width 0."""
    return {name: jnp.zeros((batch, width - 1, *size), dtype) for name, size in sizes.items()} if width else None


def _uniform(width):
    def init(key, shape, dtype=jnp.float32):
        return nn.initializers.uniform(2 * width**-0.5)(key, shape, dtype) - jnp.asarray(width**-0.5, dtype)

    return init
