"""HGRN2: lower bounds of the forget gate, which grow with the layer's number."""

import jax
import numpy as np

from attnlab.nn import GPT, HGRN2, Context
from tests.nn.mixers import papers
from tests.nn.relatives import by_path
from tests.parameters import parameters

X = np.random.default_rng(0).standard_normal((2, 9, 8))


def test_hgrn2_forgets_no_more_than_its_lower_bound(float64):
    module, layer = HGRN2(2, layers=3), 2
    variables = parameters(module, X)
    p = by_path(variables)
    below = layer * np.exp(p["lower_bound"])
    found = jax.jit(lambda variables: module.apply(variables, X, Context(layer=layer), method="forward").out)(variables)
    expected = np.stack([papers.hgrn2(x, p, bound=below / (below + 3 - layer)) for x in X])
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)
    # At first the bound is layer / layers.
    initial = jax.jit(lambda key: module.init(key, X)["params"]["lower_bound"])(jax.random.key(0))
    np.testing.assert_array_equal(initial, 0)


def test_hgrn2_of_a_shut_gate_has_finite_gradients():
    module = HGRN2(1)
    params = parameters(module, X.astype(np.float32))
    x = np.float32(1e4 * X)
    slopes = jax.jit(jax.grad(lambda params: module.apply(params, x).sum()))(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slopes))


def test_gpt_tells_hgrn2_the_number_of_layers_and_its_own():
    model = GPT.of(vocab_size=11, num_layers=2, num_heads=2, width=8, context=12, layers="hgrn2", mlp_ratio=0.0)
    tokens = np.arange(12).reshape(1, 12) % 11
    params, apply = parameters(model, tokens), jax.jit(model.apply)

    def change(layer):
        """Of the logits, where a layer has other lower bounds."""
        name = f"['block_{layer}']['attention']['lower_bound']"
        moved = jax.tree_util.tree_map_with_path(lambda p, x: x + (name in jax.tree_util.keystr(p)), params)
        return np.abs(np.asarray(apply(moved, tokens)) - apply(params, tokens)).max()

    assert change(0) == 0 and change(1) > 1e-4
