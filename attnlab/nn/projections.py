"""Projections to heads and back, shared by attention layers and recurrent mixers."""

import flax.linen as nn
from jaxtyping import Float

from attnlab.nn import sharding, taps
from attnlab.ops.cpu import products
from attnlab.types import Array, DType


def dense(
    layer: nn.Module, name: str, *features: int, use_bias: bool, dtype: DType | None = None, **initializers
) -> nn.DenseGeneral:
    """A linear layer to axes of sizes `features`, e.g. heads and head_dim, with initializer and type of `layer`."""
    return nn.DenseGeneral(
        features,
        use_bias=use_bias,
        dtype=dtype or layer.dtype,
        name=name,
        dot_general=products.dot_general,
        **{"kernel_init": layer.kernel_init, **initializers},
    )


def out(layer: nn.Module, z: Float[Array, "B T H V"], features: int, *, use_bias: bool) -> Float[Array, "B T F"]:
    """Project z to `[B, T, features]` by a submodule "out", as `layer` configures it; `attnlab.see` taps z."""
    z = sharding.constrain(taps.tap(layer, "z", z), "batch", "length", "heads", None)
    return nn.DenseGeneral(
        features,
        axis=(-2, -1),
        use_bias=use_bias,
        dtype=layer.dtype,
        kernel_init=layer.out_kernel_init or layer.kernel_init,
        name="out",
        dot_general=products.dot_general,
    )(z)
