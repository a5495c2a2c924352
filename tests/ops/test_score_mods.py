"""Score mods against their formulas, and as pytrees."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnlab
from attnlab.masks import MaskFn
from attnlab.ops.tiles import whole
from attnlab.score_mods import ALiBi, Forget, RelativeBias, ScoreFn, SoftCap, alibi_slopes

I, J = np.arange(5)[:, None], np.arange(5)[None, :]
SCORES = np.random.default_rng(0).normal(size=(2, 5, 5)).astype(np.float32)
SUMS = -np.cumsum(np.random.default_rng(2).exponential(size=(5, 2)), axis=0).astype(np.float32)
TABLE = np.random.default_rng(1).normal(size=(2, 5)).astype(np.float32)


@pytest.mark.parametrize(
    "mod, expected",
    [
        (ALiBi(jnp.array([0.5, 2.0])), SCORES - np.array([0.5, 2.0])[:, None, None] * abs(I - J)),
        (RelativeBias(jnp.asarray(TABLE)), SCORES + TABLE[:, np.clip(J - I, -2, 2) + 2]),
        (SoftCap(2.0), 2 * np.tanh(SCORES / 2)),
        (Forget(jnp.asarray(SUMS)), SCORES + SUMS.T[:, :, None] - SUMS.T[:, None, :]),
        (Forget(jnp.asarray(SUMS), jnp.asarray(SUMS[::-1])), SCORES + SUMS.T[:, :, None] - SUMS[::-1].T[:, None, :]),
        (ScoreFn(lambda s, b, h, i, j: s * (i - j) + h), SCORES * (I - J) + np.arange(2)[:, None, None]),
        (ScoreFn(lambda s, b, h, i, j, x: s + x[j], jnp.asarray(np.arange(5, dtype=np.float32))), SCORES + J),
    ],
)
def test_mod_equals_its_formula(mod, expected):
    actual = jax.jit(lambda mod: mod.apply(jnp.asarray(SCORES), whole(5, 5, 2)))(mod)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("impl", ["dense", "blockwise"])
@pytest.mark.parametrize("visible, score", [(True, 0.5), (False, 0.5), (True, lambda h: 1.0 * h)])
def test_functions_that_return_scalars_apply_to_all_pairs(impl, visible, score):
    q = np.random.default_rng(3).normal(size=(1, 5, 2, 4)).astype(np.float32)
    mod = ScoreFn(lambda s, b, h, i, j: score(h) if callable(score) else score)
    terms = {"mask": MaskFn(lambda b, h, i, j: visible), "score_mod": mod}
    expected = np.broadcast_to(q.mean(axis=1, keepdims=True), q.shape) if visible else np.zeros_like(q)
    np.testing.assert_allclose(attnlab.attention(q, q, q, impl=impl, **terms), expected, atol=1e-6)


def test_function_receives_the_example_index():
    q = np.zeros((2, 3, 4, 1, 2), np.float32)  # two batch axes
    mod = ScoreFn(lambda s, b, h, i, j: jnp.where(j == 0, b.astype(float), 0.0))
    weights = jax.jit(lambda: attnlab.attention_weights(q, q, score_mod=mod))()
    example = np.arange(6).reshape(2, 3)
    np.testing.assert_allclose(weights[..., 0, 0, 0], np.exp(example) / (np.exp(example) + 3), rtol=1e-5)


@pytest.mark.parametrize(
    "mod, message",
    [
        (Forget(np.zeros((3, 2), np.float32)), r"Forget keys has shape \(3, 2\), expected .*pass keys too"),
        (Forget(np.zeros((2, 2), np.float32), np.zeros((4, 2), np.float32)), "Forget queries has shape"),
        (Forget(np.zeros((5, 3, 2), np.float32), np.zeros((4, 2), np.float32)), r"expected \(3, 2\) or \(1, 3, 2\)"),
        (Forget(jnp.zeros((3, 2), jnp.bfloat16)), "type bfloat16, expected float32 or float64"),
        (Forget(np.full((3, 2), -1e9, np.float32), np.zeros((4, 2), np.float32)), "sums down to"),
        (Forget(np.full((3, 2), -np.inf, np.float32), np.zeros((4, 2), np.float32)), "sums down to"),
    ],
)
def test_invalid_running_sums_are_rejected(own_errors, mod, message):
    q, k = np.zeros((1, 3, 2, 4), np.float32), np.zeros((1, 4, 2, 4), np.float32)
    with pytest.raises(ValueError, match=message):
        attnlab.attention(q, k, k, score_mod=mod)


def test_differences_of_long_running_sums_stay_within_the_bound():
    length = 16384
    log_gates = -np.log1p(np.exp(-np.random.default_rng(0).normal(size=length))).astype(np.float32)
    exact = np.cumsum(log_gates.astype(np.float64))
    errors = np.asarray(jax.jit(jnp.cumsum)(log_gates), np.float64) - exact
    assert np.ptp(errors) <= 4 * np.log2(length) * 2.0**-24 * abs(exact[-1])


@pytest.mark.parametrize(
    "make, message", [(lambda: SoftCap(-1.0), "SoftCap cap = -1.0"), (lambda: alibi_slopes(0), "num_heads = 0")]
)
def test_numbers_out_of_range_are_rejected(own_errors, make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_function_may_ignore_the_score():
    q = np.random.default_rng(0).standard_normal((20, 2, 4)).astype(np.float32)
    mod = ScoreFn(lambda s, b, h, i, j: -1.0 * abs(i - j) * (h + 1))
    out = jax.jit(lambda: attnlab.attention(q, q, q, score_mod=mod, impl="blockwise"))()
    scores = -abs(np.arange(20)[:, None] - np.arange(20)) * np.array([1, 2])[:, None, None]
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(out, np.einsum("hqk,khd->qhd", weights, q), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", ["dense", "blockwise"])
def test_float32_inputs_stay_float32_beside_float64(float64, impl):
    q = jax.ShapeDtypeStruct((20, 2, 4), jnp.float32)
    run = functools.partial(
        attnlab.attention,
        mask=MaskFn(lambda b, h, i, j: i >= j),
        score_mod=(SoftCap(jnp.array(3.0)), ScoreFn(lambda s, b, h, i, j: s + jnp.float64(1.0))),
        scale=np.float64(0.5),
        q_positions=np.arange(20),
        return_lse=True,
        impl=impl,
    )
    out, lse = jax.eval_shape(run, q, q, q)
    assert out.dtype == lse.dtype == jnp.float32
