"""Mixers and relatives of attention equal a direct float64 computation of their papers, from input to output."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import nn
from tests.nn import relatives
from tests.nn.mixers import papers
from tests.nn.mixers.cases import doubled
from tests.nn.relatives import by_path
from tests.parameters import parameters

DELTA = papers.gated_delta_net
CASES = {
    "gru": (nn.GRU(features=5), papers.gru),
    "conv": (nn.CausalConv(5, kernel_size=4, dilation=3), functools.partial(papers.causal_conv, dilation=3)),
    "gated_conv": (nn.GatedConv(kernel_size=3), papers.gated_conv),
    "gated_delta": (nn.GatedDeltaNet(2, key_dim=3, value_dim=5, value_heads=6, conv=2), DELTA),
    "delta": (
        nn.GatedDeltaNet(2, decay=False, gate=False, negative_eigenvalues=True),
        functools.partial(DELTA, negative=True),
    ),
    "kda": (nn.KimiDeltaAttention(2), papers.kimi_delta_attention),
    "delta_product": (nn.GatedDeltaProduct(2), functools.partial(papers.gated_delta_product, steps=2)),
    "rwkv7": (nn.RWKV7(2, key_dim=3, value_dim=5), papers.rwkv7),
    "hgrn2": (nn.HGRN2(2, key_dim=3, value_dim=5), papers.hgrn2),
    "mamba2": (
        nn.Mamba2(2, key_dim=3, value_heads=4, value_dim=6, conv=3),
        functools.partial(papers.mamba2, groups=2, state=3),
    ),
    "gla": (nn.GatedLinearAttention(2, rank=3), papers.gated_linear_attention),
    "retention": (nn.Retention(2), papers.retention),
    "linear": (nn.LinearAttention(2), papers.linear_attention),
    **{name: (module, relatives.PAPERS[name]) for name, module in relatives.MODULES.items()},
}
OTHER_SIZES = {
    "delta_without_convolution": (nn.GatedDeltaNet(2, decay=False, conv=0), DELTA),
    "kda_value_heads": (
        nn.KimiDeltaAttention(2, key_dim=3, value_dim=5, value_heads=6, conv=0, gate=False, negative_eigenvalues=True),
        functools.partial(papers.kimi_delta_attention, negative=True),
    ),
    "delta_product_value_heads": (
        nn.GatedDeltaProduct(*(2, 3, 5), value_heads=4, steps=3, conv=2, gate=False, negative_eigenvalues=False),
        functools.partial(papers.gated_delta_product, steps=3, negative=False),
    ),
    "mamba2_without_convolution": (
        nn.Mamba2(key_dim=5, value_heads=4, conv=0),
        functools.partial(papers.mamba2, groups=1, state=5),
    ),
    "gla_without_gate": (nn.GatedLinearAttention(2, key_dim=3, gate=False), papers.gated_linear_attention),
    "retention_without_gate": (nn.Retention(2, key_dim=6, value_dim=3, gate=False), papers.retention),
    "linear_unnormalized": (
        nn.LinearAttention(2, key_dim=3, features=5, normalize=False, use_bias=False, feature_map=doubled),
        functools.partial(
            papers.linear_attention, normalized=False, feature_map=lambda y: np.maximum(np.concatenate([y, -y], -1), 0)
        ),
    ),
}
ALL = CASES | OTHER_SIZES
SLOW = {"delta", "latent", *OTHER_SIZES}  # gated_delta and latent_queries cover more
X = np.random.default_rng(0).standard_normal((2, 37, 8))
FIRST, PADDING = 20, 3  # tokens
DOCUMENTS = (2, 6, 4)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in ALL])
def test_layer_in_padded_chunks_and_packed_equals_paper_in_float64(float64, name):
    module, paper = ALL[name]
    variables = parameters(module, X)
    cache = jax.tree.map(np.asarray, module.init_cache(2, 8, capacity=37 + PADDING))
    cache = jax.tree.map(lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, cache)
    segments = np.repeat(np.arange(3), DOCUMENTS)[None].repeat(2, axis=0)
    padded = np.concatenate([X[:, :FIRST], np.full((2, PADDING, 8), 1e3)], axis=1)

    @jax.jit
    def run(variables, cache):
        first, cache = module.apply(variables, padded, cache=cache, lengths=np.full(2, FIRST, np.int32))
        second, cache = module.apply(variables, X[:, FIRST:], cache=cache)
        packed = module.apply(variables, X[:, : sum(DOCUMENTS)], segments=segments)
        return jnp.concatenate([first[:, :FIRST], second], axis=1), cache.length, packed[0]

    out, length, packed = run(variables, cache)
    assert length.tolist() == [37, 37]
    p = by_path(variables)
    expected = np.stack([paper(x, p) for x in X])
    # 37 tokens with errors of about 1e-15 each, which the norms amplify.
    np.testing.assert_allclose(out, expected, rtol=1e-10, atol=1e-12)
    alone = [paper(x, p) for x in np.split(X[0, : sum(DOCUMENTS)], np.cumsum(DOCUMENTS)[:-1])]
    np.testing.assert_allclose(packed, np.concatenate(alone), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "gla")) for n in CASES])
def test_layer_gradient_equals_finite_differences_of_its_paper(float64, name):
    module, paper = CASES[name]
    variables, rng = parameters(module, X), np.random.default_rng(1)
    direction = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape), (variables, X))
    weights = rng.standard_normal(jax.eval_shape(module.apply, variables, X).shape)
    slopes = jax.jit(jax.grad(lambda both: (module.apply(*both) * weights).sum()))((variables, X))
    derivative = sum((a * b).sum() for a, b in zip(jax.tree.leaves(slopes), jax.tree.leaves(direction)))

    def loss(step):
        moved, x = jax.tree.map(lambda a, b: a + step * b, (variables, X), direction)
        return (np.stack([paper(row, by_path(moved)) for row in x]) * weights).sum()

    near, far = (loss(step) - loss(-step) for step in (1e-5, 2e-5))
    # The error of these differences grows with step⁴ and with 1e-14 / step.
    np.testing.assert_allclose(derivative, (8 * near - far) / 12e-5, rtol=1e-6)


@pytest.mark.parametrize(
    "module, paper",
    [(nn.HGRN2(2, layers=3), papers.hgrn2), (relatives.MODULES["differential"], relatives.differential)],
    ids=["hgrn2", "differential"],
)
def test_layer_with_a_number_equals_its_paper_in_float64(float64, module, paper):
    x, context = X[:, :9], nn.Context(layer=2)
    variables = parameters(module, x)
    out = jax.jit(lambda variables: module.apply(variables, x, context, method="forward").out)(variables)
    expected = np.stack([paper(row, by_path(variables), layer=2) for row in x])
    np.testing.assert_allclose(out, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("width, features", [(1, (3,)), (4, (2, 3))])
def test_short_conv_equals_its_sum_and_keeps_the_last_inputs(float64, width, features):
    x = np.random.default_rng(1).standard_normal((2, 9, *features))
    conv = nn.ShortConv(width, use_bias=True)
    variables = parameters(conv, x)
    out, kept = jax.jit(conv.apply)(variables, x)
    p = by_path(variables)
    expected = np.stack([papers.convolution(row, p["kernel"], p["bias"]) for row in x])
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(kept, x[:, 10 - width :])
