"""Recurrent layers: their pattern, heads and contributions; and layers without a pattern."""

import jax
import numpy as np
import pytest

from attnlab import nn, see
from attnlab.masks import Causal
from tests.parameters import parameters
from tests.see.models import TOKENS, random, slow

X = random(2, 7, 8)
LAYERS = {
    "delta_product": nn.GatedDeltaProduct(2, value_heads=4),
    "linear": nn.LinearAttention(2),
    "gated_delta": nn.GatedDeltaNet(2, value_heads=4),
    "mamba2": nn.Mamba2(2, key_dim=4, value_heads=4),
    "rwkv7": nn.RWKV7(2),
    "gated_attention": nn.MultiHeadAttention(2, mask=Causal(), output_gate=True),
}
NORMALIZED = ("gated_delta", "delta_product", "rwkv7")
SIZES = {"vocab_size": 11, "num_heads": 2, "width": 16, "context": 8}
WANT = ("q", "k", "v", "pattern", "z")


@pytest.mark.parametrize("name", [name if name in ("delta_product", "linear") else slow(name) for name in LAYERS])
def test_recurrence_has_a_pattern_and_edits_before_its_norm_and_gate(name):
    layer = LAYERS[name]
    params = parameters(layer, X)
    (site,) = see.sites(layer, params, X)
    heads = 4 if name in ("gated_delta", "mamba2", "delta_product") else 2
    assert site.verified and site.names == WANT and (site.heads, site.kv_heads) == (heads, heads)
    factors = (1.0, 1e3, 1e4) if name in NORMALIZED else (1.0, 2.0)
    edits = [*({"pattern": see.Scale(factor)} for factor in factors), {"z": see.Put(0.0)}]

    @jax.jit
    def computed(params):
        edited = [see.edited(layer, params, X, edits=each).out for each in edits]
        return see.capture(layer, params, X, want=WANT), layer.apply(params, X), *edited

    run, plain, same, *scaled, without = jax.device_get(computed(params))
    pattern, z = run.values["pattern"][""], run.values["z"][""]
    steps = 2 if name == "delta_product" else 1  # per token, each with its own value
    assert pattern.shape == (2, heads, 7, 7 * steps) and not np.triu(pattern[..., ::steps], 1).any()
    if name in ("linear", "gated_attention"):  # the weights of every query sum to 1
        np.testing.assert_allclose(pattern.sum(axis=-1), 1, atol=1e-6)
    out = params["params"]["out"]
    bias = out.get("bias", 0)
    np.testing.assert_allclose(run.out, np.einsum("bthd,hdf->btf", z, out["kernel"]) + bias, atol=2e-6)

    np.testing.assert_allclose(same, plain, atol=2e-6)
    np.testing.assert_allclose(without, np.broadcast_to(bias, plain.shape), atol=1e-6)
    if name in NORMALIZED:  # the norm removes the scale, except for its ε
        large, larger = scaled
        np.testing.assert_allclose(larger, large, atol=1e-3 * np.abs(large).max())
    else:
        assert np.abs(scaled[0] - plain).max() > 0.1 * np.abs(plain).max()


def test_recurrence_pattern_respects_padding_and_documents():
    layer = LAYERS["gated_delta"]
    params = parameters(layer, X)
    segments = np.array([[0] * 4 + [1] * 3, [0] * 2 + [1] * 5])
    x = np.where(np.arange(7)[:, None] < 6, X, np.nan)  # no earlier output depends on it
    (site,) = see.sites(layer, params, X, segments=segments)
    options = {"lengths": np.array([6, 6]), "segments": segments, "rows": np.array([5])}
    run = jax.jit(lambda params: see.capture(layer, params, x, **options))(params)
    assert site.verified
    pattern = np.asarray(run.values["pattern"][""])
    assert pattern.shape == (2, 4, 1, 7) and not pattern[0, ..., :4].any() and not pattern[1, ..., :2].any()
    assert np.isfinite(pattern).all() and pattern[0, ..., 4:6].all()


def test_hybrid_lists_layers_without_a_pattern_beside_its_sites():
    model = nn.GPT.of(**SIZES, num_layers=3, layers="linear gru attention")
    sites = see.sites(model, parameters(model, TOKENS), TOKENS)
    assert [(site.path, site.kind, site.verified) for site in sites] == [
        ("block_0/attention", "LinearAttention", True),
        ("block_2/attention", "MultiHeadAttention", True),
    ]
    assert sites.others == (("block_1/attention", "GRU"),)
    assert sites.blocks == ("block_0", "block_1", "block_2")
    (line,) = (line for line in str(sites).splitlines() if "GRU" in line)
    assert line.split() == ["block_1/attention", "GRU", "has", "no", "pattern"]


def test_model_without_any_pattern_is_refused_in_one_line():
    model = nn.GPT.of(**SIZES, num_layers=2, layers="gru")
    params = jax.eval_shape(model.init, jax.random.key(0), TOKENS)
    with pytest.raises(ValueError, match="^GPT has no attention .*: layers of GRU have no pattern and no heads$"):
        see.sites(model, params, TOKENS)


def test_shares_of_a_signed_pattern_sum_to_one_or_are_zero():
    pattern = random(2, 3, 5, 5) * np.tri(5)
    pattern[0, 0, 2] = 0
    shares = np.asarray(see.shares(pattern))
    expected = np.ones((2, 3, 5))
    expected[0, 0, 2] = 0
    np.testing.assert_allclose(shares.sum(axis=-1), expected, rtol=1e-6)
    np.testing.assert_allclose(shares[1, 2, 4], np.abs(pattern[1, 2, 4]) / np.abs(pattern[1, 2, 4]).sum(), rtol=1e-6)
