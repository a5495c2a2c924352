"""The mixers that the tests of this folder share."""

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.nn import (
    GRU,
    HGRN2,
    RWKV7,
    CausalConv,
    GatedConv,
    GatedDeltaNet,
    GatedDeltaProduct,
    GatedLinearAttention,
    KimiDeltaAttention,
    LinearAttention,
    Mamba2,
    Retention,
)

X = np.random.default_rng(0).standard_normal((2, 12, 8)).astype(np.float32)


def doubled(x):
    return jnp.concatenate([jax.nn.relu(x), jax.nn.relu(-x)], axis=-1)


ALL = {
    "gated_delta": GatedDeltaNet(2, value_heads=4),
    "delta_product": GatedDeltaProduct(2, value_heads=4, steps=3),
    "rwkv7": RWKV7(2),
    "mamba2": Mamba2(2, key_dim=4, value_heads=4, conv=3),
    "retention": Retention(2),
    "gru": GRU(),
    "conv": CausalConv(kernel_size=2, dilation=3),
    "delta": GatedDeltaNet(2, conv=1, decay=False, gate=False, negative_eigenvalues=True),
    "kda": KimiDeltaAttention(2, value_heads=4),
    "kda_without_convolution": KimiDeltaAttention(2, conv=0, gate=False),
    "hgrn2": HGRN2(2),
    "gla": GatedLinearAttention(2),
    "linear": LinearAttention(2),
    "linear_doubled": LinearAttention(2, feature_map=doubled),
    "conv_of_one": CausalConv(kernel_size=1),
    "gated_conv": GatedConv(kernel_size=3),
}
