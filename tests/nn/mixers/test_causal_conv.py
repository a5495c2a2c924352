"""The dilated convolution reaches as far as its kernel and dilation say."""

import jax
import numpy as np
import pytest

from attnlab.nn import GRU, CausalConv
from tests.nn.mixers.cases import X
from tests.parameters import parameters


def test_conv_receptive_field_follows_kernel_and_dilation():
    x = np.random.default_rng(2).standard_normal((1, 32, 4)).astype(np.float32)
    modules = [CausalConv(kernel_size=3), CausalConv(kernel_size=3, dilation=4), GRU()]

    def last(x, module):
        return module.apply(parameters(module, x[:, :1]), x)[0, -1] @ np.array([1, -2, 3, -5], np.float32)

    # The derivatives of the last token.
    slopes = jax.jit(lambda x: [jax.grad(last)(x, module)[0] for module in modules])(x)
    assert [32 - int(np.any(slope, axis=1).argmax()) for slope in slopes] == [3, 9, 32]


@pytest.mark.parametrize("fields, shown", [({"kernel_size": 0}, "0, 1"), ({"dilation": 0}, "3, 0")])
def test_conv_sizes_of_zero_raise_one_line(fields, shown):
    with pytest.raises(ValueError, match=f"kernel_size, dilation = {shown}: expected"):
        jax.eval_shape(CausalConv(**fields).init, jax.random.key(0), X)
