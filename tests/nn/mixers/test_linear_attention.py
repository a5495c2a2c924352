"""Linear attention is the operator between the projections of softmax attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import linear_attention
from attnlab.nn import LinearAttention, MultiHeadAttention
from tests.nn.mixers.cases import doubled
from tests.parameters import parameters


@pytest.mark.parametrize("use_bias, normalize", [(True, True), (False, False)])
def test_linear_attention_module_equals_projections_and_operator(use_bias, normalize, float64):
    x = np.random.default_rng(3).standard_normal((2, 9, 8))
    options = {"key_dim": 3, "features": 5, "feature_map": doubled}
    module = LinearAttention(num_heads=2, normalize=normalize, use_bias=use_bias, **options)
    params = parameters(module, x)["params"]
    softmax = MultiHeadAttention(num_heads=2, head_dim=3, out_features=5, use_bias=use_bias)
    theirs = jax.eval_shape(softmax.init, jax.random.key(1), x)["params"]
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, dict(theirs))

    def projected(name):
        return np.einsum("btf,fhd->bthd", x, params[name]["kernel"]) + params[name].get("bias", 0)

    @jax.jit
    def run(params, *qkv):
        z = linear_attention(*qkv, feature_map=doubled, normalize=normalize, impl="naive")
        return module.apply({"params": params}, x), z

    out, z = run(params, *map(projected, ("query", "key", "value")))
    expected = np.einsum("bthd,hdf->btf", z, params["out"]["kernel"]) + params["out"].get("bias", 0)
    np.testing.assert_allclose(out, expected, rtol=1e-10)


def test_linear_attention_state_has_the_features_of_the_map_and_a_sum_of_keys():
    # 4 features of a head, doubled; as many values, and the sum.
    cache = LinearAttention(num_heads=2, feature_map=doubled).empty_cache(batch=3, features=8)
    assert cache.state.shape == (3, 2, 8, 5) and cache.conv is None
