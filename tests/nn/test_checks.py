"""Bool array masks and unknown arguments for attention modules; float64 NumPy inputs for more modules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import nn
from attnlab.masks import Causal
from tests.parameters import parameters

X = np.random.default_rng(0).normal(size=(2, 5, 8))
CAUSAL = np.tri(5, dtype=bool)
ATTENTION = {
    "Head": nn.Head(4, mask=None),
    "StackedHeads": nn.StackedHeads(2, 4, mask=None),
    "MultiHeadAttention": nn.MultiHeadAttention(2),
    "AdditiveAttention": nn.AdditiveAttention(),
}
EACH = pytest.mark.parametrize("module", ATTENTION.values(), ids=ATTENTION)


@EACH
def test_bool_array_mask_equals_mask_in_field_and_call(module):
    x, field = X.astype(np.float32), module.clone(mask=CAUSAL)

    @jax.jit
    def run(params):
        called = [module.apply(params, x, mask=mask) for mask in (Causal(), None, CAUSAL)]
        return *called, field.apply(params, x)

    expected, without, by_call, by_field = map(np.asarray, run(parameters(module, x)))
    assert not np.allclose(expected, without, atol=1e-3)
    np.testing.assert_array_equal(by_call, expected)
    np.testing.assert_array_equal(by_field, expected)
    assert field == module.clone(mask=CAUSAL.copy()) != module.clone(mask=~CAUSAL)


@EACH
def test_unknown_argument_error_names_the_right_one(module):
    with pytest.raises(TypeError, match=r"__call__ .*'is_causal': use mask=masks.Causal\(\)"):
        jax.eval_shape(lambda: module.init(jax.random.key(0), X.astype(np.float32), is_causal=True))


@pytest.mark.parametrize(
    "module",
    [
        *ATTENTION.values(),
        nn.Block(nn.MultiHeadAttention(2, rotary=100.0, qk_norm=True), nn.Mlp()),
        nn.GRU(),
        nn.CausalConv(),
    ],
    ids=lambda module: type(module).__name__,
)
def test_float64_numpy_input_does_not_warn(module):  # warnings are errors in the tests
    out, _ = jax.eval_shape(lambda: module.init_with_output(jax.random.key(0), X))  # X stays a NumPy array, untraced
    assert out.dtype == jnp.float32


def test_float64_numpy_input_of_functions_does_not_warn():
    out = jax.eval_shape(lambda: (nn.rotary(X[:, :, None], np.arange(5)), nn.cosine_similarity(X, X[0])))
    assert [x.dtype for x in out] == [jnp.float32] * 2
