"""RWKV-7: mixing with the first layer's values, and initial values that depend on a layer's number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.nn import RWKV7, Context
from tests.nn.mixers import papers
from tests.nn.relatives import by_path
from tests.parameters import parameters

X = np.random.default_rng(0).standard_normal((2, 9, 8))
FIRST = np.random.default_rng(1).standard_normal((2, 9, 2, 4))


def test_rwkv7_mixes_values_with_first_layer_and_returns_them(float64):
    module = RWKV7(2, value_residual=True)
    variables = parameters(module, X)
    p = by_path(variables)

    @jax.jit
    def run(variables):
        calls = ((None, None), (FIRST, None), (FIRST, module.init_cache(2, 8)))
        contexts = ((Context(first_values=first), cache) for first, cache in calls)
        return [module.apply(variables, X, *call, method="forward") for call in contexts]

    *results, (_, cache, after) = run(variables)
    for (out, _, values), first in zip(results, ([None] * 2, FIRST)):
        expected = np.stack([papers.rwkv7(x, p, first=row) for x, row in zip(X, first)])
        np.testing.assert_allclose(out, expected, rtol=1e-10, atol=1e-12)
        assert values.shape == FIRST.shape
    np.testing.assert_array_equal(cache.conv[:, 0], np.float32(X[:, -1]))
    np.testing.assert_allclose(after, values, rtol=1e-10)


def test_rwkv7_ranks_match_published_model_of_this_width():
    """The published model is RWKV-7 "World" 0.1B, with width 768."""
    module = RWKV7(12, value_residual=True)
    variables = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((1, 2, 768)))
    ranks = {"decay_down": 64, "a_down": 64, "v_down": 32, "gate_down": 128}
    assert {name: variables["params"][name]["kernel"].shape[1] for name in ranks} == ranks


@pytest.mark.parametrize("layer, layers", [(0, 1), (1, 4)])
def test_rwkv7_initial_vectors_match_the_authors_code(layer, layers):
    module = RWKV7(2, value_residual=True, layers=layers)
    context, x = Context(layer=layer), jnp.zeros((1, 2, 16))
    params = by_path(jax.jit(lambda key: module.init(key, x, context, method="forward"))(jax.random.key(0)))
    channel, depth = np.arange(16), layer / max(1, layers - 1)
    along = channel / 15 - 0.5
    zigzag = (channel % 8 - 3.5) / 3.5 * np.abs((channel % 8 - 3.5) / 3.5)
    expected = {
        "x_r": 1 - (channel / 16) ** (0.2 * (1 - layer / layers)),
        "x_w": 1 - (channel / 16) ** (0.9 * (1 - layer / layers)),
        "x_k": 1 - (channel / 16) ** (0.7 * (1 - layer / layers)),
        "decay_up/bias": -6 + 6 * (channel / 15) ** (1 + depth**0.3) + 0.5 + 2.5 * zigzag,
        "a_up/bias": -0.19 + 0.3 * zigzag + 0.4 * along,
        "v_up/bias": 0.73 - 0.4 * along,
        "k_k": 0.71 - 0.1 * along,
        "k_a": np.full(16, 1.02),
        "r_k": np.full(16, -0.04),
        "norm/scale": np.full(16, ((layer + 1) / layers) ** 0.7),
        "norm/bias": np.zeros(16),
        "decay_down/kernel": np.zeros(16 * 32),
        "gate_down/kernel": np.zeros(16 * 32),
    }
    for path, value in expected.items():
        np.testing.assert_allclose(params[path].ravel(), value, rtol=1e-5, atol=1e-6, err_msg=path)
    rows = params["decay_up/kernel"].reshape(32, 16)  # orthogonal columns of norm 0.1 · √(32 / 16)
    np.testing.assert_allclose(rows.T @ rows, 0.02 * np.eye(16), atol=1e-6)
