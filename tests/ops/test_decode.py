"""Decoding steps: few queries against many keys, some of them hidden by traced lengths or masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.masks import Padding
from attnlab.ops import attention
from attnlab.testing import AttentionCall, answer

LENGTHS = np.array([7, 40])


def sample(queries, heads, kv_heads, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((2, queries, heads, 8), (2, 40, kv_heads, 8), (2, 40, kv_heads, 6))
    return [rng.normal(size=shape) for shape in shapes]


@jax.jit
def step(q, k, v, lengths):
    return attention.attention(q, k, v, Padding(lengths), impl="decode", return_lse=True)


@jax.jit
def with_gradients(q, k, v, lengths):
    """(out, lse) and the gradients of q, k and v."""

    def total(q, k, v):
        out, lse = step(q, k, v, lengths)
        return jnp.sin(out).sum(), (out, lse)

    gradients, results = jax.grad(total, (0, 1, 2), has_aux=True)(q, k, v)
    return *results, *gradients


def from_key(x, start, value):
    """`x` with `value` in the first example's keys from `start` on."""
    hidden = (np.arange(2) == 0)[:, None] & (np.arange(40) >= start)
    return np.where(hidden[..., None, None], x.dtype.type(value), x)


@pytest.mark.parametrize("queries, heads, kv_heads", [(1, 4, 2), (3, 6, 2), (1, 3, 1)])
def test_steps_of_few_queries_equal_the_formula(float64, queries, heads, kv_heads):
    q, k, v = sample(queries, heads, kv_heads)
    assert attention.explain(q, k, v, Padding(LENGTHS)).backend == "decode"
    expected = answer(AttentionCall(q, k, v, mask=Padding(LENGTHS)))
    for actual, exact in zip(step(q, k, v, LENGTHS), (expected.out, expected.lse)):
        np.testing.assert_allclose(actual, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("queries, heads, kv_heads", [(1, 4, 2), (3, 6, 2)])
def test_hidden_keys_change_no_bit_of_results_and_gradients(queries, heads, kv_heads):
    """The hidden keys lie beyond the first example's length, at positions where the second example has keys."""
    q, k, v = (x.astype(np.float32) for x in sample(queries, heads, kv_heads))
    expected = with_gradients(q, k, v, LENGTHS)
    for hidden in (np.nan, np.inf, 1e3):
        actual = with_gradients(q, *(from_key(x, 7, hidden) for x in (k, v)), LENGTHS)
        jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_keys_hidden_from_all_heads_of_a_group_change_no_bit():
    q, k, v = (x.astype(np.float32) for x in sample(1, 4, 2))
    masked = jax.jit(lambda k, v, hidden: attention.attention(q, k, v, ~hidden, impl="decode"))
    hidden = np.zeros((2, 4, 1, 40), bool)
    hidden[:, :2, :, 10:] = True  # heads 0 and 1 read key-value head 0
    hidden[:, 0, :, 5:10] = True  # head 1 attends to these
    changed = [np.where((np.arange(2) == 0)[:, None] & (np.arange(40) >= 10)[:, None, None], np.nan, x) for x in (k, v)]
    np.testing.assert_array_equal(masked(*changed, hidden), masked(k, v, hidden))
