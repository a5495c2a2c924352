"""Bounds of masks over tiles, and schedules, against the masks themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnlab.masks import BlockSparse, Causal, Dense, MaskFn, Padding, PrefixLM, Segments, SlidingWindow
from attnlab.ops.schedule import EMPTY, FULL, PARTIAL, schedule
from attnlab.ops.tiles import Side, Tile, whole
from tests.ops import cases

sizes = st.sampled_from([1, 5, 12, 25])  # few, so that cases share programs


@settings(max_examples=8)  # each compiles a program
@given(st.integers(0, 2**32 - 1), sizes, sizes, sizes, sizes, st.sampled_from([(), (2,)]), st.booleans())
def test_bounds_of_random_masks_hold_for_each_pair(seed, q_length, kv_length, q_size, kv_size, batch, as_data):
    rng = np.random.default_rng(seed)
    mask = jax.tree.map(jnp.asarray, cases.draw_mask(rng, batch, 2, q_length, kv_length, depth=3))
    where = {
        "q_positions": rng.integers(0, 25, (*batch, q_length)).astype(np.int32),
        "kv_positions": rng.integers(0, 25, kv_length).astype(np.int32),
        "num_heads": 2,
        "batch": batch,
    }

    def dense(mask):
        return mask.dense(q_length, kv_length, **where)

    def tiles(mask):
        return mask.tiles(q_length, kv_length, (q_size, kv_size), **where)

    if as_data:
        drawn, (any_visible, all_visible) = jax.jit(lambda mask: (dense(mask), tiles(mask)))(mask)
    else:
        drawn, (any_visible, all_visible) = jax.jit(dense)(mask), tiles(mask)
    drawn, any_visible, all_visible = (np.asarray(x) for x in (drawn, any_visible, all_visible))
    drawn = np.broadcast_to(drawn, np.broadcast_shapes(drawn.shape, (1,) * 4))
    assert any_visible.shape[-2:] == all_visible.shape[-2:] == (-(-q_length // q_size), -(-kv_length // kv_size))
    for i, j in np.ndindex(any_visible.shape[-2:]):
        tile = drawn[..., i * q_size : (i + 1) * q_size, j * kv_size : (j + 1) * kv_size]
        assert (tile.any(axis=(-2, -1)) <= any_visible[..., i, j]).all()
        assert (tile.all(axis=(-2, -1)) >= all_visible[..., i, j]).all()


ORDERED = np.array([0] * 5 + [1] * 9 + [2] * 6)


@pytest.mark.parametrize(
    "mask",
    [
        Causal(),
        SlidingWindow(5, 2),
        PrefixLM(7),
        Padding(9),
        Segments(ORDERED),
        BlockSparse(np.random.default_rng(0).random((5, 5)) < 0.4, 4),
        Dense(np.random.default_rng(0).random((20, 20)) < 0.2),
        MaskFn(lambda b, h, i, j: (i + j) % 7 == 0),
        ~Causal(),
    ],
)
def test_bounds_of_single_masks_are_exact(mask):
    any_visible, all_visible = mask.tiles(20, 20, (3, 6))
    assert isinstance(any_visible, np.ndarray) and isinstance(all_visible, np.ndarray)  # known before the program runs
    drawn = np.asarray(jax.jit(lambda: mask.dense(20, 20))())
    for i, j in np.ndindex(any_visible.shape[-2:]):
        tile = drawn[i * 3 : (i + 1) * 3, j * 6 : (j + 1) * 6]
        assert any_visible[0, 0, i, j] == tile.any() and all_visible[0, 0, i, j] == tile.all()


@settings(max_examples=8)  # each compiles a program
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 5, 12]), st.sampled_from([1, 7, 12]), st.booleans())
def test_tile_of_random_mask_matches_dense_slice(seed, q_size, kv_size, transposed):
    rng = np.random.default_rng(seed)
    mask = jax.tree.map(jnp.asarray, cases.draw_mask(rng, (2,), 3, 24, 24))
    q_start, kv_start = rng.integers(0, 24 - q_size + 1), rng.integers(0, 24 - kv_size + 1)
    axes = (-1, -2) if transposed else (-2, -1)

    def side(start, size, axis):
        index = start + jnp.arange(size)
        return Side(index, index, axis, start=start)

    @jax.jit
    def run(mask, q_start, kv_start):
        everything = whole(24, 24, 3, batch=(2,))
        sides = side(q_start, q_size, axes[0]), side(kv_start, kv_size, axes[1])
        return mask.visible(everything), mask.visible(Tile(everything.example, everything.head, *sides))

    drawn, visible = (np.asarray(x) for x in run(mask, q_start, kv_start))
    drawn = np.broadcast_to(drawn, np.broadcast_shapes(drawn.shape, (1, 1, 24, 24)))
    expected = drawn[..., q_start : q_start + q_size, kv_start : kv_start + kv_size]
    expected = expected.swapaxes(-1, -2) if transposed else expected
    np.testing.assert_array_equal(
        np.broadcast_to(visible, np.broadcast_shapes(visible.shape, expected.shape)), expected
    )


@pytest.mark.parametrize("length, block_sizes", [(40, (16, 16)), (64, (16, 32)), (7, None), (700, None)])
def test_block_mask_of_schedule_is_exact(length, block_sizes):
    (q_size, kv_size), block_mask = schedule(Causal(), length, length, block_sizes, num_heads=4)
    drawn = np.tri(length, dtype=bool)
    assert block_mask.shape == (-(-length // q_size), -(-length // kv_size))
    for i, j in np.ndindex(block_mask.shape):
        tile = drawn[i * q_size : (i + 1) * q_size, j * kv_size : (j + 1) * kv_size]
        is_ragged = tile.shape != (q_size, kv_size)
        assert block_mask[i, j] == (EMPTY if not tile.any() else FULL if tile.all() and not is_ragged else PARTIAL)


def test_narrow_windows_and_large_batches_get_smaller_tiles():
    narrow, _ = schedule(SlidingWindow(left=100), 8192, 8192, num_heads=8)
    wide, _ = schedule(Causal(), 8192, 8192, num_heads=8)
    few, _ = schedule(Causal(), 1024, 1024, num_heads=4)
    many, _ = schedule(Causal(), 1024, 1024, num_heads=16, batch=(8,))
    assert max(narrow) < max(wide) and max(many) < max(few)


def test_traced_mask_has_a_traced_block_mask():
    run = jax.jit(lambda ids: schedule(Segments(ids), 20, 20, (5, 5))[1])
    block_mask = np.asarray(run(ORDERED))
    assert block_mask[0].tolist() == [FULL, EMPTY, EMPTY, EMPTY]
    assert block_mask[2].tolist() == [EMPTY, PARTIAL, PARTIAL, PARTIAL]
