"""Recurrent layers: their pattern, heads and contributions; and layers without a pattern."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import see
from attnlab.masks import Causal
from attnlab.nn import (
    GPT,
    GRU,
    HGRN2,
    RWKV7,
    GatedDeltaNet,
    GatedDeltaProduct,
    GatedLinearAttention,
    KimiDeltaAttention,
    LinearAttention,
    Mamba2,
    MultiHeadAttention,
    Retention,
)
from tests.parameters import parameters
from tests.see.models import TOKENS, random

X = random(2, 7, 8)
LAYERS = {
    "gated_delta": GatedDeltaNet(2, value_heads=4),
    "mamba2": Mamba2(2, key_dim=4, value_heads=4),
    "gla": GatedLinearAttention(2),
    "retention": Retention(2),
    "kda": KimiDeltaAttention(2),
    "delta_product": GatedDeltaProduct(2, value_heads=4),
    "rwkv7": RWKV7(2),
    "hgrn2": HGRN2(2),
    "linear": LinearAttention(2),
    "gated_attention": MultiHeadAttention(2, mask=Causal(), output_gate=True),
}
NORMALIZED = ("gated_delta", "gla", "retention", "kda", "delta_product", "rwkv7", "hgrn2")
SLOW = ("gla", "retention", "kda", "hgrn2")
EACH = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in LAYERS]
)
WANT = ("q", "k", "v", "pattern", "z")


@EACH
def test_pattern_of_a_recurrence_is_verified_and_z_is_what_out_projects(name):
    layer = LAYERS[name]
    params = parameters(layer, X)
    (site,) = see.sites(layer, params, X)
    assert site.verified and site.names == WANT and (site.heads, site.kv_heads) == (layer_heads(name),) * 2
    run = jax.jit(lambda params: see.capture(layer, params, X, want=WANT))(params)
    pattern, z = np.asarray(run.values["pattern"][""]), run.values["z"][""]
    steps = 2 if name == "delta_product" else 1  # of a token, each with a value
    assert pattern.shape == (2, site.heads, 7, 7 * steps) and not np.triu(pattern[..., ::steps], 1).any()
    out = params["params"]["out"]
    np.testing.assert_allclose(run.out, np.einsum("bthd,hdf->btf", z, out["kernel"]) + out.get("bias", 0), atol=2e-6)
    if name in ("linear", "gated_attention"):  # weights, of every query together 1
        np.testing.assert_allclose(pattern.sum(axis=-1), 1, atol=1e-6)


def layer_heads(name):
    return 4 if name in ("gated_delta", "mamba2", "delta_product") else 2


@EACH
def test_edits_of_a_recurrence_act_before_its_norm_and_gate(name):
    layer = LAYERS[name]
    params = parameters(layer, X)

    def edited(edit, site):
        return jax.jit(lambda params: see.edited(layer, params, X, edits={site: edit}).out)(params)

    plain = jax.jit(layer.apply)(params, X)
    np.testing.assert_allclose(edited(see.Scale(1.0), "pattern"), plain, atol=2e-6)
    bias = params["params"]["out"].get("bias", 0)
    np.testing.assert_allclose(edited(see.Put(0.0), "z"), np.broadcast_to(bias, plain.shape), atol=1e-6)
    if name in NORMALIZED:  # the norm takes the scale away, but for its ε
        large, larger = (edited(see.Scale(factor), "pattern") for factor in (1e3, 1e4))
        np.testing.assert_allclose(larger, large, atol=1e-3 * np.abs(large).max())
    else:
        assert np.abs(edited(see.Scale(2.0), "pattern") - plain).max() > 0.1 * np.abs(plain).max()


def test_capture_of_a_recurrence_with_padding_and_documents_is_of_the_pattern():
    layer = LAYERS["gated_delta"]
    params = parameters(layer, X)
    segments = np.array([[0] * 4 + [1] * 3, [0] * 2 + [1] * 5])
    x = np.where(np.arange(7)[:, None] < 6, X, np.nan)  # no output before it depends on it
    (site,) = see.sites(layer, params, X, segments=segments)
    options = {"lengths": np.array([6, 6]), "segments": segments, "rows": np.array([5])}
    run = jax.jit(lambda params: see.capture(layer, params, x, **options))(params)
    assert site.verified
    pattern = np.asarray(run.values["pattern"][""])
    assert pattern.shape == (2, 4, 1, 7) and not pattern[0, ..., :4].any() and not pattern[1, ..., :2].any()
    assert np.isfinite(pattern).all() and pattern[0, ..., 4:6].all()


@pytest.fixture(scope="module")
def hybrid():
    model = GPT(11, 3, 2, 16, 8, positions="auto", pattern="gated_delta gru attention")
    return model, parameters(model, TOKENS % 11)


def test_hybrid_names_layers_without_a_pattern_and_sees_the_others(hybrid):
    model, params = hybrid
    tokens = TOKENS % 11
    found = see.sites(model, params, tokens)
    assert [(site.path, site.kind, site.verified) for site in found] == [
        ("block_0/attention", "GatedDeltaNet", True),
        ("block_2/attention", "MultiHeadAttention", True),
    ]
    assert found.others == (("block_1/attention", "GRU"),)
    assert found.blocks == ("block_0", "block_1", "block_2")
    assert [line.split() for line in str(found).splitlines() if "GRU" in line] == [
        ["block_1/attention", "GRU", "has", "no", "pattern"]
    ]


def test_contributions_of_a_hybrid_sum_to_its_logits(hybrid):
    model, params = hybrid
    tokens = TOKENS % 11
    parts = see.contributions(model, params, tokens, targets=np.roll(tokens, -1, axis=1))
    assert parts.heads.shape == (2, 2, *tokens.shape) and parts.blocks.shape == (3, *tokens.shape)
    np.testing.assert_allclose(parts.total, parts.logits, atol=1e-4)


@pytest.mark.slow
def test_ablation_and_patching_of_a_hybrid_are_of_the_heads_of_its_layers(hybrid):
    model, params = hybrid
    tokens = TOKENS % 11
    effects = see.ablate(model, params, tokens, jnp.mean, targets=np.roll(tokens, -1, axis=1))
    assert effects.paths == ("block_0/attention", "block_2/attention") and effects.change.shape == (2, 2)
    z = see.capture(model, params, tokens, want=("z",)).values["z"]["block_0/attention"]
    edits = {"block_0/attention/z": see.Put(z.mean((0, 1)), where=np.array([[False], [True]]))}
    without = see.edited(model, params, tokens, targets=np.roll(tokens, -1, axis=1), edits=edits)
    assert effects.values[0, 1] == pytest.approx(float(without.out.mean()), rel=1e-5)


@pytest.mark.parametrize("mixer, kind", [("gru", "GRU"), ("conv", "CausalConv")])
def test_model_without_any_pattern_is_refused_in_one_line(mixer, kind):
    model = GPT(11, 2, 2, 16, 8, positions="auto", mixer=mixer)
    params = jax.eval_shape(model.init, jax.random.key(0), TOKENS % 11)
    with pytest.raises(ValueError, match=f"^GPT has no attention .*: layers of {kind} have no pattern and no heads$"):
        see.sites(model, params, TOKENS % 11)
    with pytest.raises(ValueError, match="^GRU has no attention .*: layers of GRU have no pattern and no heads$"):
        see.capture(GRU(), parameters(GRU(), X), X)


def test_shares_of_a_signed_pattern_sum_to_one_and_are_zero_where_nothing_is_read():
    pattern = random(2, 3, 5, 5) * np.tri(5)
    pattern[0, 0, 2] = 0
    found = np.asarray(see.shares(pattern))
    expected = np.ones((2, 3, 5))
    expected[0, 0, 2] = 0
    np.testing.assert_allclose(found.sum(axis=-1), expected, rtol=1e-6)
    np.testing.assert_allclose(found[1, 2, 4], np.abs(pattern[1, 2, 4]) / np.abs(pattern[1, 2, 4]).sum(), rtol=1e-6)
