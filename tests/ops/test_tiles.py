"""What masks say of whole tiles holds for every pair in them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlab.masks import BlockSparse, Causal, Dense, MaskFn, Padding, PrefixLM, Segments, SlidingWindow
from attnlab.ops.schedule import FULL, NONE, PART, schedule
from attnlab.ops.tiles import Side, Tile, whole
from tests.ops import cases

sizes = st.integers(1, 25)


@given(st.integers(0, 2**32 - 1), sizes, sizes, sizes, sizes, st.sampled_from([(), (2,)]), st.booleans())
def test_tiles_never_contradict_the_mask_drawn(seed, q_length, kv_length, q_size, kv_size, batch, as_data):
    rng = np.random.default_rng(seed)
    mask = cases.draw_mask(rng, batch, 2, q_length, kv_length, depth=3)
    where = {
        "q_positions": jnp.asarray(rng.integers(0, 25, (*batch, q_length))),
        "kv_positions": jnp.asarray(rng.integers(0, 25, kv_length)),
        "num_heads": 2,
        "batch": batch,
    }
    drawn = np.asarray(mask.dense(q_length, kv_length, **where))
    drawn = np.broadcast_to(drawn, np.broadcast_shapes(drawn.shape, (1,) * 4))

    def tiles(mask):
        return mask.tiles(q_length, kv_length, (q_size, kv_size), **where)

    some, every = jax.jit(tiles)(mask) if as_data else tiles(mask)
    assert some.shape[-2:] == every.shape[-2:] == (-(-q_length // q_size), -(-kv_length // kv_size))
    for i, j in np.ndindex(some.shape[-2:]):
        tile = drawn[..., i * q_size : (i + 1) * q_size, j * kv_size : (j + 1) * kv_size]
        assert (tile.any(axis=(-2, -1)) <= np.asarray(some)[..., i, j]).all()
        assert (tile.all(axis=(-2, -1)) >= np.asarray(every)[..., i, j]).all()


ORDERED = jnp.array([0] * 5 + [1] * 9 + [2] * 6)


@pytest.mark.parametrize(
    "mask",
    [
        Causal(),
        SlidingWindow(5, 2),
        PrefixLM(7),
        Padding(9),
        Segments(ORDERED),
        BlockSparse(jnp.asarray(np.random.default_rng(0).random((5, 5)) < 0.4), 4),
        Dense(jnp.asarray(np.random.default_rng(0).random((20, 20)) < 0.2)),
        MaskFn(lambda b, h, i, j: (i + j) % 7 == 0),
        ~Causal(),
    ],
)
def test_of_a_single_mask_tiles_say_no_more_than_the_truth(mask):
    some, every = mask.tiles(20, 20, (3, 6))
    assert isinstance(some, np.ndarray) and isinstance(every, np.ndarray)  # known before the program runs
    drawn = np.asarray(mask.dense(20, 20))
    for i, j in np.ndindex(some.shape[-2:]):
        tile = drawn[i * 3 : (i + 1) * 3, j * 6 : (j + 1) * 6]
        assert some[0, 0, i, j] == tile.any() and every[0, 0, i, j] == tile.all()


def test_tiles_of_a_mask_that_compares_positions_need_them():
    with pytest.raises(ValueError, match="Tq = 2 and Tk = 5 differ"):
        Causal().tiles(2, 5, (1, 1))


@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 12), st.booleans())
def test_a_tile_of_a_mask_is_that_part_of_its_drawing(seed, q_size, kv_size, turned):
    rng = np.random.default_rng(seed)
    mask = cases.draw_mask(rng, (2,), 3, 24, 24)
    drawn = mask.visible(whole(24, 24, 3, batch=(2,)))
    drawn = np.broadcast_to(drawn, np.broadcast_shapes(drawn.shape, (1, 1, 24, 24)))
    q_start, kv_start = rng.integers(0, 24 - q_size + 1), rng.integers(0, 24 - kv_size + 1)

    def side(start, size, axis):
        index = start + jnp.arange(size)
        return Side(index, index, axis, start=jnp.asarray(start))

    axes = (-1, -2) if turned else (-2, -1)
    everything = whole(24, 24, 3, batch=(2,))
    tile = Tile(everything.example, everything.head, side(q_start, q_size, axes[0]), side(kv_start, kv_size, axes[1]))
    seen = mask.visible(tile)
    expected = drawn[..., q_start : q_start + q_size, kv_start : kv_start + kv_size]
    expected = expected.swapaxes(-1, -2) if turned else expected
    np.testing.assert_array_equal(np.broadcast_to(seen, np.broadcast_shapes(seen.shape, expected.shape)), expected)


@pytest.mark.parametrize("length, block_sizes", [(40, (16, 16)), (64, (16, 32)), (7, None), (700, None)])
def test_a_schedule_computes_what_is_seen_and_compares_where_not_all_is(length, block_sizes):
    (q_size, kv_size), kinds = schedule(Causal(), length, length, block_sizes, num_heads=4)
    drawn = np.asarray(Causal().dense(length, length))
    assert kinds.shape == (-(-length // q_size), -(-length // kv_size))
    for i, j in np.ndindex(kinds.shape):
        tile = drawn[i * q_size : (i + 1) * q_size, j * kv_size : (j + 1) * kv_size]
        is_ragged = tile.shape != (q_size, kv_size)
        assert kinds[i, j] == (NONE if not tile.any() else FULL if tile.all() and not is_ragged else PART)


def test_a_narrow_window_gets_smaller_tiles_than_a_wide_one():
    narrow, _ = schedule(SlidingWindow(left=100), 8192, 8192, num_heads=8)
    wide, _ = schedule(Causal(), 8192, 8192, num_heads=8)
    assert max(narrow) < max(wide)


def test_many_heads_and_examples_get_smaller_tiles_than_few():
    few, _ = schedule(Causal(), 1024, 1024, num_heads=4)
    many, _ = schedule(Causal(), 1024, 1024, num_heads=16, batch=(8,))
    assert max(many) < max(few)


def test_a_mask_that_comes_as_data_is_scheduled_by_the_running_program():
    run = jax.jit(lambda ids: schedule(Segments(ids), 20, 20, (5, 5))[1])
    kinds = run(ORDERED)
    assert kinds[0].tolist() == [FULL, NONE, NONE, NONE] and kinds[2].tolist() == [NONE, PART, PART, PART]
