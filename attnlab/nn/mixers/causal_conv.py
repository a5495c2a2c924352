"""The dilated causal convolution."""

import flax.linen as nn
import jax.numpy as jnp

from attnlab.nn.layer import LayerConfig, LayerOut
from attnlab.nn.mixers.interface import CausalMixer, MixerState, last
from attnlab.support.options import option
from attnlab.types import DType


class CausalConv(CausalMixer):
    """Dilated causal convolution (van den Oord et al. 2016, section 2.1): O(k·n·d²) for n tokens, all in parallel.

    The receptive field of a token is the token and the k − 1 tokens at distances `dilation`, 2·`dilation`, … before
    it. Stacked layers with dilations 1, k, k², … reach receptive fields of k, k², k³, … tokens, so log_k(n) layers
    cover n tokens; without dilation, it takes (n − 1) / (k − 1) layers.

    Its cache holds the last R = (k − 1)·dilation inputs, `[B, R, F]`.

    Attributes:
      features: d, width of the output; None for the input's width.
      dtype: type of the computation; None for the input's type.

    >>> block = Block(CausalConv(kernel_size=3, dilation=2), Mlp())
    >>> block.init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 8)
    """

    features: int | None = None
    kernel_size: int = option("kernel size in tokens, k", 4, low=1)
    dilation: int = option("distance between the kernel's tokens", 1, low=1)
    dtype: DType | None = None

    def mix(self, x, state, context):
        previous, length = state.conv, x.shape[1]
        inputs = jnp.concatenate([previous, x.astype(previous.dtype)], axis=1)
        reach = previous.shape[1]
        taps = [inputs[:, at : at + length] for at in range(0, reach + 1, self.dilation)]
        if context.segments is not None:
            # Inputs before the sequence are 0 and count as part of its first segment.
            segments = jnp.pad(context.segments, ((0, 0), (reach, 0)), mode="edge")
            same = [segments[:, at : at + length] == context.segments for at in range(0, reach + 1, self.dilation)]
            taps = [jnp.where(seen[..., None], tap, 0) for seen, tap in zip(same, taps)]
        # The kernel `[k, F, d]`, as in `nn.Conv`, multiplies the last two axes, taps and features.
        convolve = nn.DenseGeneral(self.features or x.shape[-1], axis=(-2, -1), dtype=self.dtype, name="conv")
        return LayerOut(convolve(jnp.stack(taps, axis=-2)), MixerState(conv=last(inputs, reach, context.lengths)))

    def init_state(self, batch, features):
        if min(self.kernel_size, self.dilation) < 1:
            raise ValueError(f"kernel_size, dilation = {self.kernel_size}, {self.dilation}: expected both 1 or more")
        reach = (self.kernel_size - 1) * self.dilation
        return MixerState(conv=jnp.zeros((batch, reach, features), self.dtype or jnp.float32))


class CausalConvConfig(LayerConfig, of=CausalConv, kind="conv"):
    """A dilated causal convolution; with a kernel of 4 tokens it has as many weights as attention."""
