"""Errors and omissions of the source documents, by document: attnlab does the right thing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax

import attnlab
from attnlab._studies import complexity, scaling
from attnlab.masks import Causal
from attnlab.nn import MultiHeadAttention, sinusoidal
from tests.parameters import parameters

BATCH = np.random.default_rng(0).standard_normal((2, 6, 8)).astype(np.float32)


@pytest.mark.parametrize("impl", ["dense", "blockwise"])
def test_001_large_masked_score_gives_no_nan(impl):
    q, k = np.ones((2, 1, 1), np.float32), np.array([0, 200], np.float32)[:, None, None]
    after = softmax(np.array([[0, 200], [0, 200]], np.float32), axis=1) * np.tri(2, dtype=np.float32)
    with np.errstate(invalid="ignore"):
        assert np.isnan(after / after.sum(1, keepdims=True)).any(), "masking after softmax, then renormalizing"
    out = jax.jit(lambda: attnlab.attention(q, k, q, mask=Causal(), scale=1.0, impl=impl))()
    np.testing.assert_allclose(out[:, 0, 0], [1, 1])


def test_002_flops_include_projections():
    n, d = 64, 256
    alone = complexity.count_flops(complexity.compiled_for(complexity.dense, *complexity.qkv(n, d)))
    module = MultiHeadAttention(num_heads=1, impl="dense", use_bias=False)
    whole = complexity.count_flops(complexity.compiled_for(*complexity.layer_call(module, n, d)))
    assert whole - alone == pytest.approx(4 * 2 * n * d**2, rel=0.02) and whole > 3 * alone


def test_002_jacobian_norm_rises_then_falls():
    rng = np.random.default_rng(0)

    def norm(width):  # the simulation of 002: 50 independent logits of variance d_k
        logits = rng.normal(0, width**0.5, (4000, 50))
        return scaling.jacobian_norm(softmax(logits, axis=-1)).mean()

    at_1, at_7, at_1000 = norm(1), norm(7), norm(1000)
    assert at_1 < at_7 > at_1000 and at_7 == pytest.approx(0.31, abs=0.01)


def test_002_sinusoidal_similarity_is_not_monotonic():
    places = np.asarray(jax.jit(lambda: sinusoidal(jnp.arange(100), 128))())
    similarity = places @ places[0]
    rises = np.flatnonzero(np.diff(similarity) > 0)
    assert rises[0] == 11, "from k = 11 to 12"


def test_003_sowing_weights_keeps_dropout():
    module = MultiHeadAttention(num_heads=2, dropout_rate=0.5)
    params = parameters(module, BATCH)

    @jax.jit
    def outputs(params):
        options = {"deterministic": False, "rngs": {"dropout": jax.random.key(1)}}
        sowing = module.apply(params, BATCH, mutable=["intermediates"], **options)
        return *sowing, module.apply(params, BATCH, **options), module.apply(params, BATCH)

    out, sown, dropped, plain = outputs({"params": params["params"]})
    (weights,) = sown["intermediates"]["attention_weights"]
    assert weights.shape == (2, 2, 6, 6)
    np.testing.assert_allclose(out, dropped, atol=1e-6)
    assert not np.allclose(out, plain, atol=1e-3)
