"""Cosine similarity and nearest neighbors."""

import jax
import numpy as np
import pytest

from attnlab.nn import cosine_similarity, nearest

EMBEDDING = np.random.default_rng(0).standard_normal((20, 6)).astype(np.float32)
similarity = jax.jit(cosine_similarity)


def test_cosine_similarity_ignores_vector_norms():
    u, v = np.asarray(EMBEDDING[:3], np.float64), np.asarray(EMBEDDING[3:10], np.float64)
    expected = u @ v.T / np.outer(np.linalg.norm(u, axis=1), np.linalg.norm(v, axis=1))
    actual = np.asarray(similarity(5 * np.pad(EMBEDDING[:3], ((0, 1), (0, 0))), np.float32(0.1) * EMBEDDING[3:10]))
    np.testing.assert_allclose(actual[:3], expected, atol=1e-6)
    assert not actual[3].any(), "zero vectors have similarity 0"


def test_nearest_returns_most_similar_others_in_order():
    neighbours = jax.jit(nearest, static_argnames="count")(EMBEDDING, np.array([[4], [7]]), count=5)
    ids, similarities = map(np.asarray, neighbours)
    assert ids.shape == similarities.shape == (2, 1, 5)
    all_of_4 = np.asarray(similarity(EMBEDDING[4], EMBEDDING))
    order = [i for i in np.argsort(-all_of_4) if i != 4]
    np.testing.assert_array_equal(ids[0, 0], order[:5])
    np.testing.assert_allclose(similarities[0, 0], all_of_4[order[:5]], rtol=1e-6)


def test_cosine_similarity_of_zeros_has_finite_gradient():
    slope = jax.jit(jax.grad(lambda u: cosine_similarity(u, EMBEDDING).sum()))(np.zeros(6, np.float32))
    assert np.isfinite(slope).all()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: nearest(EMBEDDING, np.array([-1]), count=1), "tokens contains -1"),
        (lambda: nearest(EMBEDDING, np.array([20]), count=1), "tokens contains 20"),
        (lambda: nearest(EMBEDDING, np.array(0), count=20), "count = 20: .*20 tokens.*19"),
        (lambda: cosine_similarity(EMBEDDING[:2, :3], EMBEDDING[0, :4]), r"u has shape \(2, 3\) and v \(4,\)"),
    ],
)
def test_invalid_arguments_raise_one_line(own_errors, call, message):
    with pytest.raises(ValueError, match=message):
        call()
