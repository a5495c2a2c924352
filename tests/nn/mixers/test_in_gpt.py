"""Mixers and relatives of softmax attention in a GPT: cache sizes, options, norms and `see`."""

import jax
import numpy as np
import pytest

from attnlab import see
from attnlab.nn import GPT, GatedDeltaProduct
from tests.nn import relatives
from tests.parameters import parameters

TOKENS = np.arange(20).reshape(2, 10) % 11
SIZES = {"vocab_size": 11, "num_layers": 2, "num_heads": 2, "width": 16, "context": 12}


@pytest.mark.parametrize(
    "kind, state, conv",
    [  # H·K·V·4 bytes for 2 heads and width 16; W − 1 = 3 inputs of the convolution
        ("gated_delta", 2 * 8 * 8 * 4, 3 * 3 * 16 * 4),
        ("delta", 2 * 8 * 8 * 4, 3 * 3 * 16 * 4),
        ("kda", 2 * 8 * 8 * 4, 3 * 3 * 16 * 4),
        ("delta_product", 2 * 8 * 8 * 4, 3 * (1 + 2 + 2) * 16 * 4),  # two keys and values per token
        ("rwkv7", 2 * 8 * 8 * 4, 16 * 4),
        ("hgrn2", 2 * 8 * 8 * 4, 0),
        ("mamba2", 2 * 8 * 16 * 4, 3 * (32 + 2 * 8) * 4),
        ("gla", 2 * 4 * 8 * 4, 0),
        ("retention", 2 * 8 * 16 * 4, 0),
        ("linear", 2 * 8 * (8 + 1) * 4, 0),
        ("gru", 16 * 4, 0),
        ("conv", 0, 3 * 16 * 4),
        ("gated_conv", 0, 3 * 16 * 4),
    ],
)
def test_state_sizes_match_the_papers(kind, state, conv):
    cache, _ = jax.eval_shape(lambda: GPT.of(**SIZES, layers=kind).init_caches(batch=1, capacity=12))
    sizes = [sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(part)) for part in (cache.state, cache.conv)]
    assert sizes == [state, conv]


def layer(kind, **options):
    config = GPT.of(**SIZES, layers=kind, **{kind: options}).config
    return config.layers[0].make(config)


def test_delta_product_defaults_to_two_steps_and_negative_eigenvalues():
    assert (layer("delta_product").steps, layer("delta_product", steps=3).steps) == (2, 3)
    assert layer("delta_product").negative_eigenvalues and not layer("gated_delta").negative_eigenvalues
    assert not layer("delta_product", negative_eigenvalues=False).negative_eigenvalues
    with pytest.raises(ValueError, match="^steps = 0: expected 1 or more steps"):
        GatedDeltaProduct(2, steps=0).init_cache(1, 16)


def test_hybrid_norms_are_after_attention_and_before_other_mixers():
    model = GPT.of(**SIZES | {"num_layers": 3}, layers="gated_delta attention gru", norm_at="hybrid")
    blocks = parameters(model, TOKENS)["params"]
    before, after = {"attention_norm", "mlp_norm"}, {"attention_post_norm", "mlp_post_norm"}
    norms = [{name for name in blocks[f"block_{layer}"] if "norm" in name} for layer in range(3)]
    assert norms == [before, after, before]
    alike = GPT.of(**SIZES, norm_at="hybrid")
    params, after = parameters(alike, TOKENS), alike.replace(norm_at="after")
    np.testing.assert_array_equal(*jax.jit(lambda p: [model.apply(p, TOKENS) for model in (alike, after)])(params))


def test_recurrence_norm_epsilon_applies_to_its_output_norm():
    for kind in ("gated_delta", "mamba2", "gla", "retention"):
        assert layer(kind, norm_epsilon=0.25).norm_epsilon == 0.25
    options = {}, {"norm_epsilon": 1e-5}, {"norm_epsilon": 1.0}
    models = [GPT.of(**SIZES | {"num_layers": 1}, layers="gla", gla=each) for each in options]
    params = parameters(models[0], TOKENS)
    logits, same, vanishing = jax.jit(lambda params: [model.apply(params, TOKENS) for model in models])(params)
    np.testing.assert_array_equal(same, logits)
    assert np.abs(vanishing - logits).max() > 1e-4


@pytest.mark.parametrize("kind, name, has_effect", [("hgrn2", "lower_bound", [0, 1]), ("rwkv7", "v_down", [0, 1, 1])])
def test_gpt_passes_layer_number_and_first_values_to_layers(kind, name, has_effect):
    model = GPT.of(**SIZES | {"num_layers": len(has_effect)}, layers=kind, mlp_ratio=0.0)
    params, apply = parameters(model, TOKENS), jax.jit(model.apply)

    def change(layer):
        """The largest change in the logits when the parameters of this name change in one layer."""
        changed = f"['block_{layer}']['attention']['{name}']"
        moved = jax.tree_util.tree_map_with_path(lambda p, x: x + (changed in jax.tree_util.keystr(p)), params)
        return np.abs(np.asarray(apply(moved, TOKENS)) - apply(params, TOKENS)).max()

    for layer, expected in enumerate(has_effect):
        assert change(layer) > 1e-4 if expected else change(layer) == 0


@pytest.mark.parametrize("kind", ["differential", pytest.param("latent", marks=pytest.mark.slow)])
def test_see_verifies_the_pattern_and_contributions_sum_to_the_logits(kind):
    model = GPT.of(**SIZES | {"num_layers": 1}, layers=kind)
    params = parameters(model, TOKENS)
    assert [site.verified for site in see.sites(model, params, TOKENS)] == [True]
    parts = see.contributions(model, params, TOKENS, targets=TOKENS)
    np.testing.assert_allclose(parts.total, parts.logits, rtol=1e-5, atol=1e-5 * np.abs(parts.logits).max())


@pytest.mark.parametrize(
    "kind, numbers",  # per token, for width 16 and two heads; the cache also has a length
    [("differential", 2 * 8 + 16), ("latent", 4 * 8 + 4), ("stick_breaking", 2 * 16)],
)
def test_cache_size_matches_the_paper(kind, numbers):
    caches = jax.eval_shape(lambda: GPT.of(**SIZES, layers=kind).init_caches(1))
    assert sum(leaf.size for leaf in jax.tree.leaves(caches[0])) == 12 * numbers + 1


def test_latent_attention_step_with_edit_is_not_absorbed():
    """The absorbed order of products never computes the values per head, which an edit changes."""
    module, x = relatives.MODULES["latent"], relatives.X
    edit = {"edit_v": {"tapped": lambda v: 0 * v}}
    run = jax.jit(lambda params: module.apply(params | edit, x[:, :1], cache=module.init_cache(2, 8, 10))[0])
    np.testing.assert_allclose(run(parameters(module, x)), 0, atol=5e-6)
