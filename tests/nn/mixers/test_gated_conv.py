"""The gated convolution against its formula."""

import jax
import numpy as np

from attnlab.nn import GatedConv
from tests.parameters import parameters

X = np.random.default_rng(0).standard_normal((2, 7, 4))


def test_gated_conv_is_the_convolution_times_a_linear_layer_plus_its_input():
    with jax.enable_x64(True):
        module = GatedConv(kernel_size=3)
        variables = jax.tree.map(lambda x: np.asarray(x, np.float64), parameters(module, X.astype(np.float32)))
        conv, gate = variables["params"]["conv"], variables["params"]["linear"]
        padded = np.pad(X, ((0, 0), (2, 0), (0, 0)))
        mixed = sum(conv["kernel"][n] * padded[:, n : n + 7] for n in range(3)) + conv["bias"]
        expected = mixed * (X @ gate["kernel"] + gate["bias"]) + X
        np.testing.assert_allclose(module.apply(variables, X), expected, rtol=0, atol=1e-14)  # sums of 4 and 3 terms
