"""Stick-breaking attention: the formula, its tiles, their gradients, masks, positions and errors."""

import functools

import jax
import numpy as np
import pytest

from attnlab import stick_breaking_attention, stick_breaking_weights
from attnlab.masks import Padding, Segments, SlidingWindow
from tests.ops.cases import slow
from tests.ops.references import broken, naive


def inputs(length, heads=4, kv_heads=2, dtype=np.float64):
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((2, length, h, 5)).astype(dtype) for h in (heads, kv_heads, kv_heads))


SEGMENTS = np.array([[0] * 5 + [1] * 8, [0] * 9 + [1] * 4])
MASKS = {
    "none": (None, np.ones((2, 13, 13), bool)),
    "segments": (Segments(SEGMENTS), SEGMENTS[:, :, None] == SEGMENTS[:, None]),
    "padding": (Padding(np.array([4, 13])), np.arange(13) < np.array([4, 13])[:, None, None] + np.zeros((13, 1))),
    "window": (SlidingWindow(3), np.broadcast_to(np.arange(13)[:, None] - np.arange(13) <= 3, (2, 13, 13))),
}


DENSE, TILES = {"impl": "dense"}, {"block_size": 4}


@pytest.mark.parametrize(
    "name, options",
    [("none", DENSE), ("segments", DENSE), ("segments", TILES), ("padding", TILES), ("window", {"impl": "blockwise"})],
)
def test_attention_equals_sticks_broken_one_by_one(float64, name, options):
    mask, visible = MASKS[name]
    q, k, v = inputs(13)
    expected, weights = broken(q, k, v, visible)
    actual = stick_breaking_attention(q, k, v, mask, **options), jax.jit(stick_breaking_weights)(q, k, mask)
    for x, y in zip(actual, (expected, weights)):
        np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-13)


@functools.cache
def both(block_size):
    def run(q, k, v, cotangent, **options):
        out, pull_back = jax.vjp(functools.partial(stick_breaking_attention, **options), q, k, v)
        return out, pull_back(cotangent)

    return jax.jit(lambda *x: [run(*x, impl="dense"), run(*x, block_size=block_size)])


@pytest.mark.parametrize("block_size", [4, slow(1), slow(16)])
def test_tiles_have_the_gradients_of_the_formula(float64, block_size):
    for size in (0.1, 1.0, 30.0):
        q, k, v = inputs(13)
        dense, tiled = both(block_size)(size * q, k, v, np.cos(np.arange(2 * 13 * 4 * 5)).reshape(2, 13, 4, 5))
        # About a hundred sums in another order; the sum over farther keys is a difference of numbers as large as do·o.
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-11 * size), tiled, dense)


def test_float32_gradients_of_tiles_are_finite_and_near_float64():
    size = 100.0
    cotangent = np.random.default_rng(1).standard_normal((2, 200, 4, 5))
    with jax.enable_x64(True):
        expected = jax.device_get(both(16)(*(size * x for x in inputs(200)), cotangent)[0])
    actual = both(16)(*(np.float32(size * x) for x in inputs(200)), np.float32(cotangent))[1]
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(actual)):
        # The log of the remaining stick is up to 200 logits; 2⁻²⁴ of that is a weight's relative error.
        np.testing.assert_allclose(b, a, rtol=0, atol=200 * size**2 * 2**-24 * np.abs(a).max())


def test_ring_buffer_keys_are_ordered_by_their_positions(float64):
    q, k, v = inputs(13)
    whole = stick_breaking_attention(q, k, v)
    shifted = np.roll(np.arange(13), 4)
    options = {"q_positions": np.array([12]), "kv_positions": shifted}
    out = stick_breaking_attention(q[:, -1:], k[:, shifted], v[:, shifted], **options)
    np.testing.assert_allclose(out, whole[:, -1:], rtol=1e-12)


@pytest.mark.parametrize("options", [DENSE, TILES], ids=str)
def test_nan_behind_a_mask_has_no_effect_on_outputs_and_gradients(options):
    q, k, v = inputs(13, dtype=np.float32)
    spoiled = k.copy(), v.copy()
    for x in spoiled:
        x[0, 6:] = np.nan
    lengths = Padding(np.array([6, 13]))

    def valid_sum(q, k, v):
        return stick_breaking_attention(q, k, v, lengths, **options)[:, :6].sum()

    gradient = jax.jit(jax.grad(valid_sum, (0, 1, 2)))
    actual, expected = (gradient(q, *x) for x in (spoiled, (k, v)))
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_scale_may_be_traced_and_has_a_gradient(float64):
    q, k, v = inputs(13)

    def of(scale, **options):
        return (stick_breaking_attention(q, k, v, scale=scale, **options) ** 2).sum()

    slopes = jax.jit(lambda x: [jax.grad(functools.partial(of, **options))(x) for options in (DENSE, TILES)])(0.7)
    assert abs(slopes[0]) > 0.01
    np.testing.assert_allclose(*slopes, rtol=1e-10)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"impl": "flash"}, "impl = 'flash': expected one of auto, dense, blockwise"),
        (DENSE | TILES, "block_size = 4: expected 1 or more, for impl='blockwise'"),
        ({"block_size": 0}, "block_size = 0: expected 1 or more"),
        ({"scale": np.ones(2)}, r"scale has shape \(2,\)"),
    ],
    ids=str,
)
def test_invalid_options_raise_one_line(own_errors, options, message):
    with pytest.raises(ValueError, match=message):
        stick_breaking_attention(*inputs(3, dtype=np.float32), **options)


def test_unequal_numbers_of_queries_and_keys_need_positions():
    q, k, v = inputs(3, dtype=np.float32)
    with pytest.raises(ValueError, match="2 queries and 3 keys: pass q_positions and kv_positions"):
        stick_breaking_attention(q[:, :2], k, v)


@pytest.mark.slow
def test_memory_of_tiles_is_linear_in_the_length():
    def temporary(length):
        x = jax.ShapeDtypeStruct((1, length, 4, 16), np.float32)
        grad = jax.grad(lambda q, k, v: stick_breaking_attention(q, k, v).sum(), (0, 1, 2))
        return jax.jit(grad).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    sizes = [temporary(length) for length in (1024, 4096)]
    assert sizes[1] < 4.2 * sizes[0]


def test_attention_equals_naive_version_of_fla():
    torch = pytest.importorskip("torch", reason="torch is not installed")

    q, k, v = inputs(40, dtype=np.float32)
    theirs = naive("stickbreaking_attn").naive_stickbreaking_attn(*map(torch.from_numpy, (q, k, v)))[0]
    np.testing.assert_allclose(stick_breaking_attention(q, k, v), theirs.numpy(), atol=2e-6)
