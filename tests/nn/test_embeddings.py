"""Cosine similarity and nearest neighbors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.nn import cosine_similarity, nearest

EMBEDDING = jax.random.normal(jax.random.key(0), (20, 6))


def test_cosine_similarity_ignores_vector_norms():
    u, v = np.asarray(EMBEDDING[:3], np.float64), np.asarray(EMBEDDING[3:10], np.float64)
    expected = u @ v.T / np.outer(np.linalg.norm(u, axis=1), np.linalg.norm(v, axis=1))
    np.testing.assert_allclose(cosine_similarity(5 * EMBEDDING[:3], 0.1 * EMBEDDING[3:10]), expected, atol=1e-6)
    assert not cosine_similarity(jnp.zeros((2, 6)), EMBEDDING).any(), "zero vectors have similarity 0"


def test_nearest_returns_most_similar_others_in_order():
    ids, similarities = nearest(EMBEDDING, jnp.array([[4], [7]]), count=5)
    assert ids.shape == similarities.shape == (2, 1, 5)
    all_of_4 = np.asarray(cosine_similarity(EMBEDDING[4], EMBEDDING))
    order = [i for i in np.argsort(-all_of_4) if i != 4]
    np.testing.assert_array_equal(ids[0, 0], order[:5])
    np.testing.assert_allclose(similarities[0, 0], all_of_4[order[:5]], rtol=1e-6)


def test_nearest_token_out_of_range_raises_one_line():
    for wrong in (-1, 20):
        with pytest.raises(ValueError, match=f"tokens contains {wrong}, expected ids from 0 to 19"):
            nearest(EMBEDDING, jnp.array([wrong]), count=1)


def test_cosine_similarity_of_two_widths_raises_one_line(own_errors):
    with pytest.raises(ValueError, match=r"u has shape \(2, 3\) and v \(4,\): give both the same width"):
        cosine_similarity(jnp.ones((2, 3)), jnp.ones(4))


def test_cosine_similarity_of_zeros_has_finite_gradient():
    assert jnp.isfinite(jax.grad(lambda u: cosine_similarity(u, EMBEDDING).sum())(jnp.zeros(6))).all()


def test_nearest_count_too_large_raises_one_line():
    with pytest.raises(ValueError, match="count = 20: expected 0 to 19, as each of 20 tokens has 19 neighbors"):
        nearest(EMBEDDING, jnp.array(0), count=20)
