"""Dense attention, the specification; tests/testing/test_reference.py compares it with the formula."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import attnlab
from attnlab.masks import BlockSparse, Causal, Dense, Padding
from attnlab.score_mods import ALiBi, SoftCap, alibi_slopes


def sample(seed, q_length, kv_length, heads, kv_heads, dim, v_dim, batch=()):
    rng = np.random.default_rng(seed)
    shapes = ((q_length, heads, dim), (kv_length, kv_heads, dim), (kv_length, kv_heads, v_dim))
    return [rng.normal(size=(*batch, *shape)) for shape in shapes]


def test_order_is_bias_then_mods_then_mask(float64):
    q, k, _ = sample(0, 4, 4, 1, 1, 4, 4)
    run = jax.jit(lambda q, k, bias: attnlab.attention_weights(q, k, Causal(), SoftCap(2.0), bias))
    capped = run(q, k, np.full((1, 1, 4), 100.0))
    np.testing.assert_allclose(capped[0], np.tri(4) / np.tri(4).sum(1, keepdims=True), rtol=1e-12)


def test_batch_axes_match_single_examples():
    batch = (2, 3)
    lengths = np.random.default_rng(0).integers(0, 8, batch).astype(np.int32)
    every = list(np.ndindex(*batch))

    @jax.jit
    def run(q, k, v):
        ones = [attnlab.attention(q[at], k[at], v[at], mask=Padding(int(lengths[at]))) for at in every]
        return attnlab.attention(q, k, v, mask=Padding(jnp.asarray(lengths))), ones

    out, ones = jax.tree.map(np.asarray, run(*sample(0, 5, 7, 4, 2, 8, 3, batch)))
    assert out.shape == (*batch, 5, 4, 3)
    for at, one in zip(every, ones, strict=True):
        np.testing.assert_allclose(out[at], one, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("impl", ["dense", "blockwise"])
def test_lse_is_float32_and_output_has_input_type(dtype, impl):
    x = jax.ShapeDtypeStruct((64, 2, 16), dtype)
    run = functools.partial(attnlab.attention, mask=Causal(), return_lse=True, impl=impl)
    out, lse = jax.eval_shape(run, x, x, x)
    assert out.dtype == dtype and lse.dtype == jnp.float32


def test_lse_of_fully_masked_row_with_sink_is_the_sink():
    sinks = np.array([0.5, -1.0], np.float32)
    run = jax.jit(lambda q, k, v, sinks: attnlab.attention(q, k, v, mask=Padding(0), sinks=sinks, return_lse=True))
    out, lse = run(*sample(0, 2, 2, 2, 2, 4, 4), sinks)
    np.testing.assert_allclose(lse, np.broadcast_to(sinks, (2, 2)), rtol=1e-6)
    assert (np.asarray(out) == 0).all()


@pytest.mark.slow
def test_second_order_derivatives_match_finite_differences(float64):
    q, k, v = (jnp.asarray(x) for x in sample(3, 4, 4, 2, 1, 3, 3))
    sinks, bias = jnp.array([0.1, -0.2]), jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 4)))

    @jax.jit
    def f(q, k, v, sinks, bias):
        mods = (SoftCap(3.0), ALiBi(alibi_slopes(2)))
        return attnlab.attention(q, k, v, Causal(), mods, bias=bias, sinks=sinks, return_lse=True)

    check_grads(f, (q, k, v, sinks, bias), order=2, modes=["fwd", "rev"], rtol=1e-6)


def test_dropout_of_batch_matches_single_examples():
    def drop(q, k, v, key):
        return attnlab.attention(q, k, v, Causal(), dropout_rate=0.5, dropout_key=key)

    @jax.jit
    def run(q, k, v):
        keys = jax.random.split(jax.random.key(0), 3)
        return drop(q, k, v, keys), jax.vmap(drop)(q, k, v, keys)

    np.testing.assert_allclose(*run(*sample(0, 6, 6, 2, 1, 4, 4, (3,))), rtol=1e-6)


def test_weights_of_chosen_rows_match_all_rows():
    q, k, _ = sample(0, 6, 6, 2, 2, 4, 4, (3,))
    mask = Causal() & (Dense(np.random.default_rng(0).random((6, 6)) < 0.7) | BlockSparse(np.eye(2, dtype=bool), 3))
    bias = np.random.default_rng(1).normal(size=(3, 1, 6, 6)).astype(np.float32)
    terms = {"mask": mask, "bias": bias, "score_mod": ALiBi(alibi_slopes(2))}
    chosen = np.array([4, 1]), np.array([5, 4, 3, 2, 1, 0]), np.array([-1, 0])  # negative rows count from the end

    @jax.jit
    def run(q, k, chosen):
        some = [attnlab.attention_weights(q, k, rows=rows, **terms) for rows in chosen]
        return some, attnlab.attention_weights(q, k, **terms)

    some, every = run(q, k, chosen)
    for rows, weights in zip(chosen, some, strict=True):
        np.testing.assert_allclose(weights, np.asarray(every)[..., rows, :], rtol=1e-6)
