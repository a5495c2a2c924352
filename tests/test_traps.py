"""Errors and omissions of the source documents, by document: attnlab does the right thing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnlab
from attnlab.masks import Causal, Padding
from attnlab.nn import GPT, CausalConv, Head, LearnedPositions, MultiHeadAttention, sinusoidal
from attnlab.study.claims import complexity, scaling
from tests.golden.test_notebook import X as WORDS

X = jnp.asarray(WORDS)
ONE_HEAD = X[:, None]
BATCH = jax.random.normal(jax.random.key(0), (2, 6, 8))


def head(**fields):
    module = Head(head_dim=2, **fields)
    return module, module.init(jax.random.key(1), BATCH)


# ----------------------------------------------------------------------------------------------------------------- 000


def test_000_causal_mask_hides_later_words():
    weights = attnlab.attention_weights(ONE_HEAD, ONE_HEAD, mask=Causal())[0]
    assert not np.triu(weights, 1).any() and (np.diag(weights) > 0).all()


@pytest.mark.parametrize("width", [3, 300])
def test_000_003_scores_are_scaled_by_head_width(width):
    x = jax.random.normal(jax.random.key(0), (1, 5, width))
    module = Head(head_dim=2, mask=None)
    params = module.init(jax.random.key(1), x)
    q, k, v = (x[0] @ params["params"][name]["kernel"] for name in ("query", "key", "value"))
    right = jax.nn.softmax(q @ k.T / 2**0.5) @ v
    np.testing.assert_allclose(module.apply(params, x)[0], right, atol=1e-5)
    assert not np.allclose(right, jax.nn.softmax(q @ k.T / width**0.5) @ v, atol=1e-3)


@pytest.mark.parametrize(
    "module",
    [GPT(vocab_size=9, num_layers=1, num_heads=1, width=4, context=5), LearnedPositions(context=5, features=4)],
    ids=["GPT", "LearnedPositions"],
)
def test_000_sequence_beyond_context_raises(module):
    tokens = jnp.zeros((1, 6), jnp.int32)
    with pytest.raises(ValueError, match="a sequence of 6 tokens is longer than the 5 learned positions"):
        module.init(jax.random.key(0), tokens)


def test_000_each_head_projects_full_embedding():
    module = MultiHeadAttention(num_heads=2)
    params = module.init(jax.random.key(0), BATCH)["params"]
    assert params["query"]["kernel"].shape == (8, 2, 4), "all 8 features, for each of 2 heads"
    first = Head(head_dim=4, use_bias=True, mask=None)
    of_first = {name: jax.tree.map(lambda x: x.take(0, -2), params[name]) for name in ("query", "key", "value")}
    changed = BATCH.at[..., 4:].add(1.0)  # the second head's chunk if the embedding were split
    before, after = (first.apply({"params": of_first}, x) for x in (BATCH, changed))
    assert not np.allclose(before, after, atol=1e-2)


# ----------------------------------------------------------------------------------------------------------------- 001


def test_001_softmax_does_not_overflow():
    naive = jnp.exp(100 * X @ X.T)
    assert not jnp.isfinite(naive / naive.sum(1, keepdims=True)).all()
    for impl in ("dense", "blockwise"):
        assert jnp.isfinite(attnlab.attention(100 * ONE_HEAD, ONE_HEAD, ONE_HEAD, scale=1.0, impl=impl)).all()


def test_001_kernels_apply_untransposed_to_batches():
    module, params = head(mask=None)
    assert params["params"]["query"]["kernel"].shape == (8, 2), "x @ kernel; a torch layer stores its transpose"
    apart = jnp.stack([module.apply(params, x[None])[0] for x in BATCH])
    np.testing.assert_allclose(module.apply(params, BATCH), apart, atol=1e-6)


@pytest.mark.parametrize("impl", ["dense", "blockwise"])
def test_001_large_masked_score_gives_no_nan(impl):
    q, k = jnp.ones((2, 1, 1)), jnp.array([0.0, 200.0])[:, None, None]
    after = jax.nn.softmax(jnp.array([[0.0, 200.0], [0.0, 200.0]])) * np.tri(2)
    assert jnp.isnan(after / after.sum(1, keepdims=True)).any(), "masking after softmax, then renormalizing"
    out = attnlab.attention(q, k, jnp.ones((2, 1, 1)), mask=Causal(), scale=1.0, impl=impl)
    np.testing.assert_allclose(out[:, 0, 0], [1, 1])


def test_001_fully_dropped_row_returns_zeros():
    options = {"dropout_rate": 0.9, "dropout_key": jax.random.key(0)}
    out = attnlab.attention(*(jnp.ones((200, 1, 1)),) * 3, mask=Causal(), **options)[:, 0, 0]
    assert jnp.isfinite(out).all() and (out[:20] == 0).any()
    assert abs(float(out.mean()) - 1) < 0.2, "kept weights are scaled by 1 / (1 − p)"


def test_001_indivisible_width_raises():
    with pytest.raises(ValueError, match="width 8 is not divisible by 3 heads: change one, or give head_dim"):
        MultiHeadAttention(num_heads=3).init(jax.random.key(0), BATCH)


# ----------------------------------------------------------------------------------------------------------------- 002


def test_002_log_depth_needs_dilated_convolutions():
    k, n = 3, 81
    layers = complexity.conv_path(n, k)
    assert layers == 4  # log_3(81)
    undilated = 1 + layers * (complexity.conv_reach(k) - 1)
    assert undilated == 9 < n


def test_002_flops_include_projections():
    n, d = 64, 256
    alone = complexity.count_flops(complexity.compiled_for(complexity.dense, *complexity.qkv(n, d)))
    module = MultiHeadAttention(num_heads=1, impl="dense", use_bias=False)
    whole = complexity.count_flops(complexity.compiled_for(*complexity.layer_call(module, n, d)))
    assert whole - alone == pytest.approx(4 * 2 * n * d**2, rel=0.02) and whole > 3 * alone


def test_002_flops_count_scan_body_per_iteration():
    rows = [row for row in _gru_rows(8) if row["n"] in (4, 16)]
    assert rows[1]["flops"] == 4 * rows[0]["flops"]


def _gru_rows(d):
    step = complexity.count_flops(complexity.gru_step(d))
    for n in (4, 16):
        trips = complexity.count_trips(complexity.compiled_for(*complexity.layer_call(complexity.GRU(), n, d)))
        yield {"n": n, "flops": trips * step}


def test_002_values_do_not_enter_scores():
    q, k, v = (jax.random.normal(jax.random.key(i), (5, 1, 4)) for i in range(3))
    weights = attnlab.attention_weights(q, k)[0]
    np.testing.assert_allclose(attnlab.attention(q, k, v)[:, 0], weights @ v[:, 0], atol=1e-6)
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-6)  # a convex combination of values
    assert (weights >= 0).all()


def test_002_jacobian_norm_rises_then_falls():
    rng = np.random.default_rng(0)

    def norm(width):  # the simulation of 002: 50 independent logits of variance d_k
        logits = rng.normal(0, width**0.5, (4000, 50))
        return scaling.jacobian_norm(np.asarray(jax.nn.softmax(jnp.asarray(logits)), np.float64)).mean()

    at_1, at_7, at_1000 = norm(1), norm(7), norm(1000)
    assert at_1 < at_7 > at_1000 and at_7 == pytest.approx(0.31, abs=0.01)


def test_002_sinusoidal_similarity_is_not_monotonic():
    places = sinusoidal(jnp.arange(100), 128)
    similarity = places @ places[0]
    rises = np.flatnonzero(np.diff(similarity) > 0)
    assert rises[0] == 11, "from k = 11 to 12"


def test_002_causal_mask_includes_the_diagonal():
    np.testing.assert_array_equal(np.asarray(Causal().dense(4, 4)).reshape(4, 4), np.tri(4))


# ----------------------------------------------------------------------------------------------------------------- 003


def test_003_ambiguous_mask_rank_raises():
    mask, scores = np.ones((2, 1, 1, 6), bool), np.zeros((2, 6, 6))
    assert np.where(mask, scores, -np.inf).shape == (2, 2, 6, 6), "NumPy broadcasts silently"
    q = jnp.ones((2, 6, 1, 4))
    for wrong in (mask, np.ones((2, 6), bool), np.ones((2, 6, 6), bool)):
        with pytest.raises(ValueError, match=r"mask .*shape") as error:
            attnlab.attention(q, q, q, mask=jnp.asarray(wrong))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("impl", ["dense", "blockwise"])
def test_003_fully_padded_row_returns_zeros(impl):
    q = jnp.ones((2, 6, 1, 4))
    mask = Causal() & Padding(jnp.array([0, 3]))
    out, gradient = jax.value_and_grad(lambda q: attnlab.attention(q, q, q, mask=mask, impl=impl)[0].sum())(q)
    assert out == 0 and jnp.isfinite(gradient).all()


def test_003_sowing_weights_keeps_dropout():
    module = MultiHeadAttention(num_heads=2, dropout_rate=0.5)
    params = {"params": module.init(jax.random.key(0), BATCH)["params"]}
    options = {"deterministic": False, "rngs": {"dropout": jax.random.key(1)}}
    out, sown = module.apply(params, BATCH, mutable=["intermediates"], **options)
    (weights,) = sown["intermediates"]["attention_weights"]
    assert weights.shape == (2, 2, 6, 6)
    np.testing.assert_allclose(out, module.apply(params, BATCH, **options), atol=1e-6)
    assert not np.allclose(out, module.apply(params, BATCH), atol=1e-3)


def test_003_blockwise_saves_memory_and_agrees():
    q = jax.random.normal(jax.random.key(0), (1, 2048, 1, 16))

    def compiled(impl):
        return jax.jit(lambda q: attnlab.attention(q, q, q, impl=impl)).lower(q).compile()

    tiles, dense = compiled("blockwise"), compiled("dense")
    np.testing.assert_allclose(tiles(q), dense(q), atol=1e-5)
    assert tiles.memory_analysis().temp_size_in_bytes * 4 < dense.memory_analysis().temp_size_in_bytes


# ----------------------------------------------------------------------------------------------------------------- 004


def test_004_softmax_denominator_sums_exponentials():
    scores = X @ X.T
    printed = (jnp.exp(scores) / scores.sum(1, keepdims=True)).sum(1)
    assert printed.min() > 2.8 and printed.mean() == pytest.approx(2.9, abs=0.2)
    np.testing.assert_allclose(attnlab.attention_weights(ONE_HEAD, ONE_HEAD, scale=1.0).sum(-1), 1, rtol=1e-6)


def test_004_longest_vector_dominates_raw_dot_products():
    weights = attnlab.attention_weights(ONE_HEAD, ONE_HEAD, scale=1.0)[0]
    assert (weights.argmax(1) == 1).sum() == 4, "journey"
    matrix = jax.random.normal(jax.random.key(0), (3, 2))
    lengths = [jnp.linalg.norm(c * X[1] @ matrix) for c in (1, 16)]
    np.testing.assert_allclose(lengths[1] / lengths[0], 16, rtol=1e-5)


def test_004_qk_norm_ignores_vector_length():
    def weights(qk_norm, factor):
        module = MultiHeadAttention(num_heads=1, qk_norm=qk_norm)
        params = module.init(jax.random.key(0), BATCH)
        _, sown = module.apply(params, BATCH.at[:, 1].multiply(factor), mutable=["intermediates"])
        return sown["intermediates"]["attention_weights"][0]

    # LayerNorm adds 1e-6 to a variance near 1.
    np.testing.assert_allclose(weights(True, 4.0), weights(True, 64.0), atol=1e-5)
    assert not np.allclose(weights(False, 4.0), weights(False, 64.0), atol=0.1)


def test_002_causal_conv_ignores_later_characters():
    module = CausalConv(kernel_size=3)
    params = module.init(jax.random.key(0), BATCH)
    changed = BATCH.at[:, 4:].set(0)
    np.testing.assert_allclose(module.apply(params, BATCH)[:, :4], module.apply(params, changed)[:, :4], atol=1e-6)
