"""The projection from heads to features that layers of attention and recurrent mixers share."""

import flax.linen as nn

from attnlab.ops.cpu import products


def out(layer: nn.Module, features: int, *, use_bias: bool) -> nn.DenseGeneral:
    """The projection "out" of `[..., H, V]` to `[..., features]`, with the initializers and the type of a layer."""
    return nn.DenseGeneral(
        features,
        axis=(-2, -1),
        use_bias=use_bias,
        dtype=layer.dtype,
        kernel_init=layer.out_kernel_init or layer.kernel_init,
        name="out",
        dot_general=products.dot_general,
    )
