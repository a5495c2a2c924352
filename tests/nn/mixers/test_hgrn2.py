"""HGRN2: lower bounds of the forget gate, which grow with the layer's number."""

import jax
import numpy as np
import pytest

from attnlab.nn import GPT, HGRN2
from tests.nn.mixers import papers
from tests.nn.relatives import by_path
from tests.parameters import parameters

X = np.random.default_rng(0).standard_normal((2, 9, 8))


@pytest.mark.parametrize("layer", [0, 2])
def test_hgrn2_forgets_no_more_than_its_lower_bound(float64, layer):
    module = HGRN2(2, layers=3)
    variables = parameters(module, X)
    p = by_path(variables)
    below = layer * np.exp(p["lower_bound"])
    found = jax.jit(module.apply)(variables, X, layer=layer)
    expected = np.stack([papers.hgrn2(x, p, bound=below / (below + 3 - layer)) for x in X])
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("layer", range(4))
def test_hgrn2_starts_with_the_bound_of_its_place_among_the_layers(layer):
    module = HGRN2(1, layers=4)
    x = np.ones((1, 2, 8), np.float32)
    params = dict(jax.jit(module.init)(jax.random.key(0), x)["params"])
    params["key"] = {"kernel": np.full((8, 1, 8), -10, np.float32)}  # the gate is shut: f is its bound
    _, cache = module.apply({"params": params}, x, layer=layer, cache=module.empty_cache(1, 8))
    value, bound = x[0, 0] @ params["value"]["kernel"][:, 0], layer / 4
    # Each token writes 1 − f, and the first one has decayed once.
    expected = (1 - bound) * (1 + bound) * np.broadcast_to(value, (8, 8))
    np.testing.assert_allclose(cache.state[0, 0], expected, rtol=1e-5, atol=1e-6)


def test_hgrn2_of_a_shut_gate_has_finite_gradients():
    module = HGRN2(1)
    params = parameters(module, X.astype(np.float32))
    x = np.float32(1e4 * X)
    slopes = jax.jit(jax.grad(lambda params: module.apply(params, x).sum()))(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slopes))


def test_gpt_tells_hgrn2_the_number_of_layers_and_its_own():
    model = GPT(11, 2, 2, 8, 12, positions="auto", mixer="hgrn2")
    tokens = np.arange(12).reshape(1, 12) % 11
    params = parameters(model, tokens)
    slopes = jax.jit(jax.grad(lambda p: model.apply(p, tokens, targets=tokens).sum()))(params)["params"]
    bounds = [np.abs(slopes[f"block_{n}"]["attention"]["lower_bound"]).max() for n in range(2)]
    assert bounds[0] == 0 and bounds[1] > 1e-4
