"""The mixers that the tests of this folder share."""

import jax
import jax.numpy as jnp
import numpy as np

from attnlab import nn

X = np.random.default_rng(0).standard_normal((2, 12, 8)).astype(np.float32)


def doubled(x):
    return jnp.concatenate([jax.nn.relu(x), jax.nn.relu(-x)], axis=-1)


ALL = {
    "gated_delta": nn.GatedDeltaNet(2, value_heads=4),
    "delta_product": nn.GatedDeltaProduct(2, value_heads=4, steps=3),
    "rwkv7": nn.RWKV7(2),
    "mamba2": nn.Mamba2(2, key_dim=4, value_heads=4, conv=3),
    "retention": nn.Retention(2),
    "gru": nn.GRU(),
    "conv": nn.CausalConv(kernel_size=2, dilation=3),
    "delta": nn.GatedDeltaNet(2, conv=1, decay=False, gate=False, negative_eigenvalues=True),
    "kda": nn.KimiDeltaAttention(2, value_heads=4),
    "kda_without_convolution": nn.KimiDeltaAttention(2, conv=0, gate=False),
    "hgrn2": nn.HGRN2(2),
    "gla": nn.GatedLinearAttention(2),
    "linear": nn.LinearAttention(2),
    "linear_doubled": nn.LinearAttention(2, feature_map=doubled),
    "conv_of_one": nn.CausalConv(kernel_size=1),
    "gated_conv": nn.GatedConv(kernel_size=3),
}
