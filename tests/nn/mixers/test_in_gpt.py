"""A GPT of each mixer, and of several: loops, recomputation, caches."""

import functools

import jax
import numpy as np
import pytest

from attnlab.nn import GPT, GatedDeltaProduct, stack_layers, unstack_layers
from tests.parameters import parameters

TOKENS = np.arange(20).reshape(2, 10) % 11
SIZES = {"vocab_size": 11, "num_layers": 2, "num_heads": 2, "width": 16, "context": 12}
REMAT = {"gru": "attention", "mamba2": "dots"}


def value_and_gradient(model, params):
    def loss(params):
        return model.apply({"params": params}, TOKENS, targets=np.roll(TOKENS, -1, axis=1)).mean()

    return jax.device_get(jax.jit(jax.value_and_grad(loss))(params))


@pytest.mark.slow  # of layers in loops and recomputed, `tests/nn/test_stack.py` has a model of two kinds
@pytest.mark.parametrize("kind", ["gru", "gated_delta", "mamba2", "latent"])
def test_gpt_of_a_mixer_has_the_same_gradients_in_a_loop_and_recomputed(kind):
    model = GPT.of(**SIZES, layers=kind)
    params = parameters(model, TOKENS)["params"]
    loss, gradient = value_and_gradient(model, params)
    again = value_and_gradient(model.replace(remat=REMAT.get(kind, "block")), stack_layers(params))
    np.testing.assert_allclose(again[0], loss, rtol=1e-6)
    size = max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradient))
    assert jax.tree.structure(unstack_layers(again[1])) == jax.tree.structure(gradient)
    # Sums of float32 in another order.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * size), unstack_layers(again[1]), gradient
    )


@pytest.mark.parametrize(
    "layers",
    [
        "attention rwkv7 rwkv7",  # the second layer hands its values to the last one alone
        pytest.param("forget differential latent stick_breaking", marks=pytest.mark.slow),
        pytest.param("mamba2 local retention gru", marks=pytest.mark.slow),
        pytest.param("kda hgrn2 delta_product hgrn2", marks=pytest.mark.slow),
    ],
)
def test_hybrid_with_caches_equals_the_full_pass(layers):
    local = {"local": {"window": 4}} if "local" in layers else {}
    model = GPT.of(**SIZES | {"num_layers": len(layers.split())}, layers=layers, mlp_ratio=0.0, **local)
    params, apply = parameters(model, TOKENS), jax.jit(model.apply)
    whole = np.asarray(apply(params, TOKENS))
    caches, outs = model.init_caches(batch=2, capacity=12), []
    for t in range(10):
        out, caches = apply(params, TOKENS[:, t : t + 1], caches=caches)
        outs.append(np.asarray(out))
    size = np.abs(whole).max()
    np.testing.assert_allclose(np.concatenate(outs, axis=1), whole, atol=1e-5 * size)
    # A piece of six, of which the first row has four: the rest follows.
    out, caches = apply(params, TOKENS[:, :6], caches=model.init_caches(2, 12), lengths=np.array([4, 6], np.int32))
    np.testing.assert_allclose(out[0, :4], whole[0, :4], atol=1e-5 * size)
    following = np.stack([TOKENS[0, 4:5], TOKENS[1, 6:7]])
    out, _ = apply(params, following, caches=caches)
    np.testing.assert_allclose(out[:, 0], [whole[0, 4], whole[1, 6]], atol=1e-5 * size)


@pytest.mark.parametrize(
    "layers, number",
    [
        ("attention hgrn2", 4),
        pytest.param("rwkv7 hgrn2", 3, marks=pytest.mark.slow),
        pytest.param("rwkv7", 1, marks=pytest.mark.slow),
    ],
)
def test_stacked_layers_have_their_numbers_and_the_first_values(layers, number):
    model = GPT.of(**SIZES | {"num_layers": number}, layers=layers, mlp_ratio=1.0)
    params = parameters(model, TOKENS)["params"]
    expected, found = (jax.jit(model.apply)({"params": p}, TOKENS) for p in (params, stack_layers(params)))
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


@functools.cache
def states(kind):
    """The bytes of each layer's cache, by part."""
    caches = jax.eval_shape(lambda: GPT.of(**SIZES, layers=kind).init_caches(batch=1, capacity=12))
    return {
        part: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(getattr(caches[0], part)))
        for part in ("state", "conv")
    }


@pytest.mark.parametrize(
    "kind, state, conv",
    [  # H·K·V·4 of 2 heads and a width of 16; W − 1 = 3 inputs of the convolution
        ("gated_delta", 2 * 8 * 8 * 4, 3 * 3 * 16 * 4),
        ("delta", 2 * 8 * 8 * 4, 3 * 3 * 16 * 4),
        ("kda", 2 * 8 * 8 * 4, 3 * 3 * 16 * 4),
        ("delta_product", 2 * 8 * 8 * 4, 3 * (1 + 2 + 2) * 16 * 4),  # two keys and values a token
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
def test_states_have_the_bytes_of_their_papers(kind, state, conv):
    assert states(kind) == {"state": state, "conv": conv}


def layer(kind, **options):
    config = GPT.of(**SIZES, layers=kind, **{kind: options}).config
    return config.layers[0].make(config)


def test_delta_product_reads_its_steps_and_has_negative_eigenvalues_unless_told():
    assert (layer("delta_product").steps, layer("delta_product", steps=3).steps) == (2, 3)
    assert layer("delta_product").negative_eigenvalues and not layer("gated_delta").negative_eigenvalues
    assert not layer("delta_product", negative_eigenvalues=False).negative_eigenvalues
    with pytest.raises(ValueError, match="^steps = 0: expected 1 step"):
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


def test_norm_epsilon_of_a_recurrence_is_that_of_its_outputs_norm():
    for kind in ("gated_delta", "mamba2", "gla", "retention"):
        assert layer(kind, norm_epsilon=0.25).norm_epsilon == 0.25
    options = {}, {"norm_epsilon": 1e-5}, {"norm_epsilon": 1.0}
    models = [GPT.of(**SIZES | {"num_layers": 1}, layers="gla", gla=each) for each in options]
    params = parameters(models[0], TOKENS)
    logits, same, vanishing = jax.jit(lambda params: [model.apply(params, TOKENS) for model in models])(params)
    np.testing.assert_array_equal(same, logits)
    assert np.abs(vanishing - logits).max() > 1e-4
