"""The mixers that the tests of this folder share, and their compiled programs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
from tests.parameters import parameters

X = np.random.default_rng(0).standard_normal((2, 12, 8)).astype(np.float32)
PIECE = 5  # tokens


def doubled(x):
    return jnp.concatenate([jax.nn.relu(x), jax.nn.relu(-x)], axis=-1)


FAST = {
    "gated_delta": GatedDeltaNet(2, value_heads=4),
    "delta_product": GatedDeltaProduct(2, value_heads=4, steps=3),
    "rwkv7": RWKV7(2),
    "mamba2": Mamba2(2, key_dim=4, value_heads=4, conv=3),
    "retention": Retention(2),
    "gru": GRU(),
    "conv": CausalConv(kernel_size=2, dilation=3),
}
SLOW = {
    "delta": GatedDeltaNet(2, conv=1, decay=False, gate=False, negative_eigenvalues=True),
    "delta_without_convolution": GatedDeltaNet(2, conv=0),
    "kda": KimiDeltaAttention(2, value_heads=4),
    "kda_without_convolution": KimiDeltaAttention(2, conv=0, gate=False),
    "hgrn2": HGRN2(2),
    "gla": GatedLinearAttention(2),
    "linear": LinearAttention(2),
    "linear_doubled": LinearAttention(2, feature_map=doubled),
    "linear_unnormalized": LinearAttention(2, normalize=False),
    "conv_of_one": CausalConv(kernel_size=1),
    "gated_conv": GatedConv(kernel_size=3),
}
ALL = FAST | SLOW
EACH = pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])


@functools.cache
def compiled(name):
    """Variables of a mixer for X, and its compiled `apply`, which compiles again for other shapes."""
    return parameters(ALL[name], X), jax.jit(ALL[name].apply)


@functools.cache
def token_by_token(name):
    """(Outputs `[B, T, d]`, the caches before each token and after the last)."""
    params, apply = compiled(name)
    outs, caches = [], [jax.device_get(ALL[name].empty_cache(2, 8))]
    for t in range(X.shape[1]):
        out, cache = jax.device_get(apply(params, X[:, t : t + 1], cache=caches[-1]))
        outs.append(out)
        caches.append(cache)
    return np.concatenate(outs, axis=1), caches
