"""The gated convolution."""

import flax.linen as nn
import jax.numpy as jnp

from attnlab.nn.layer import LayerConfig, LayerOut
from attnlab.nn.mixers.interface import CausalMixer, MixerState
from attnlab.nn.mixers.short_conv import ShortConv
from attnlab.ops.cpu import products
from attnlab.support.options import option
from attnlab.types import DType


class GatedConv(CausalMixer):
    """A causal convolution of each feature, times a linear layer: y = conv(x) ⊙ (W x + b) + x.

    This is BaseConv (Arora et al. 2023, arXiv 2312.04927) with an explicit kernel, `ShortConv`. It mixes the last
    `kernel_size` tokens, with weights that do not depend on the tokens and gates that do.

    Its cache holds the last W − 1 inputs, `[B, W − 1, F]`.

    Attributes:
      dtype: type of the computation; None for the input's type.

    >>> block = Block(GatedConv(kernel_size=3), Mlp())
    >>> block.init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 8)
    """

    kernel_size: int = option("kernel size in tokens, W, including the token itself", 4, low=1)
    dtype: DType | None = None

    def mix(self, x, state, context):
        convolve = ShortConv(self.kernel_size, use_bias=True, dtype=self.dtype, name="conv")
        mixed, after = convolve(x, state.conv, context.segments, context.lengths)
        gate = nn.Dense(x.shape[-1], dtype=self.dtype, name="linear", dot_general=products.dot_general)(x)
        return LayerOut(mixed * gate + x.astype(gate.dtype), MixerState(conv=after))

    def init_state(self, batch, features):
        if self.kernel_size < 1:
            raise ValueError(f"kernel_size = {self.kernel_size}: expected 1 or more")
        return MixerState(conv=jnp.zeros((batch, self.kernel_size - 1, features), self.dtype or jnp.float32))


class GatedConvConfig(LayerConfig, of=GatedConv, kind="gated_conv"):
    """A gated convolution."""
