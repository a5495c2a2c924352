"""Masks and score mods split into arrays and programs for a kernel."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.masks import BlockSparse, Causal, Dense, Mask, MaskFn, Padding, PrefixLM, Segments, SlidingWindow
from attnlab.ops import dropout
from attnlab.ops.experimental.pallas import splitting
from attnlab.ops.experimental.pallas.splitting import Scores, UnsupportedError, split
from attnlab.ops.tiles import whole
from attnlab.score_mods import ALiBi, RelativeBias, ScoreFn, SoftCap
from tests.ops import cases

FLAT = Scores((), 2, (5, 5))
RNG = np.random.default_rng(0)
TABLE = jnp.asarray(RNG.normal(size=(2, 5)), jnp.float32)
RAW = RNG.normal(size=(2, 5, 5)).astype(np.float32)


def evaluated(one, scores, *raw):
    """The function, from its parts, for all pairs."""
    q_index, kv_index = jnp.arange(scores.lengths[0])[:, None], jnp.arange(scores.lengths[1])[None]
    axes = {"scalar": (-2, -1), "query": (-1,), "key": (-2,), "pair": ()}
    values = []
    for described, x in zip(one.program.inputs, one.arrays()):
        if x is None:
            values.append(q_index if described.varies == "q_index" else kv_index)
        elif described.varies == "distance":
            values.append(splitting.loaded(x, described.dtype)[..., kv_index - q_index + scores.lengths[0] - 1])
        else:
            values.append(jnp.expand_dims(splitting.loaded(x, described.dtype), axes[described.varies]))
    shape = (*scores.batch, scores.num_heads, *scores.lengths)
    return jnp.broadcast_to(one.program(*values, *raw), shape)


@pytest.mark.parametrize(
    "mask, varies",
    [
        (Causal(), {"q_index", "kv_index"}),
        (SlidingWindow(2) & ~Causal(), {"q_index", "kv_index"}),
        (Padding(3), {"key"}),
        (PrefixLM(np.array(2)), {"key", "q_index", "kv_index"}),
        (Segments(np.arange(5) // 2), {"query", "key"}),
        (Segments(np.arange(5) // 2) | Causal(), {"query", "key", "q_index", "kv_index"}),
        (Dense(np.eye(5, dtype=bool)), {"pair"}),
        (BlockSparse(np.eye(3, dtype=bool), 2), {"pair"}),
        (MaskFn(lambda b, h, i, j, by: (i - j) % by[h] == 0, jnp.array([1, 2])), {"scalar", "q_index", "kv_index"}),
        (MaskFn(lambda b, h, i, j, far: far[abs(i - j)], jnp.asarray(np.arange(5) > 2)), {"distance"}),
        (MaskFn(lambda b, h, i, j: h > 0), {"scalar"}),
        # A choice between two masks.
        (MaskFn(lambda b, h, i, j: jnp.where(h == 0, j <= i, (i - j) % 2 == 0)), {"scalar", "q_index", "kv_index"}),
    ],
    ids=lambda x: type(x).__name__,
)
def test_masks_take_only_what_varies_with_pairs(mask, varies):
    one = split(mask.visible, FLAT)
    assert {x.varies for x in one.program.inputs} == varies
    found, expected = jax.jit(lambda: (evaluated(one, FLAT), mask.visible(whole(5, 5, 2))))()
    np.testing.assert_array_equal(found, np.broadcast_to(expected, (2, 5, 5)))


@pytest.mark.parametrize(
    "mod, varies",
    [
        (ALiBi(jnp.array([0.5, 2.0])), {"scalar", "q_index", "kv_index"}),
        (RelativeBias(TABLE), {"distance"}),
        (SoftCap(3.0), set()),
        (SoftCap(jnp.array(3.0)), {"scalar"}),
        (ScoreFn(lambda s, b, h, i, j, x: s * x[j] + x[i], TABLE[0]), {"query", "key"}),
        (ScoreFn(lambda s, b, h, i, j, x: s + x[h, (i * j) % 5], TABLE), {"pair"}),
    ],
    ids=lambda x: type(x).__name__,
)
def test_score_mods_take_only_what_varies_with_pairs(mod, varies):
    one = split(lambda tile, raw: mod.apply(raw, tile), FLAT, of_raw=True)
    assert {x.varies for x in one.program.inputs} == varies
    assert all(x.is_learned for x in one.program.inputs if x.varies not in ("q_index", "kv_index"))
    found, expected = jax.jit(lambda raw: (evaluated(one, FLAT, raw), mod.apply(raw, whole(5, 5, 2))))(RAW)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_parts_of_random_masks_agree_with_the_whole(seed):
    rng = np.random.default_rng(seed)
    batch, (q_length, kv_length) = [(), (2,), (2, 3)][seed % 3], rng.integers(2, 9, 2).tolist()
    q_positions = rng.integers(0, kv_length, (*batch, q_length)).astype(np.int32)
    kv_positions = rng.integers(0, kv_length, kv_length).astype(np.int32)
    scores = Scores(batch, 2, (q_length, kv_length), q_positions, kv_positions)
    mask = jax.tree.map(jnp.asarray, cases.draw_mask(rng, batch, 2, q_length, kv_length))
    covers = whole(q_length, kv_length, 2, q_positions, kv_positions, batch)
    found, expected = jax.jit(lambda: (evaluated(split(mask.visible, scores), scores), mask.visible(covers)))()
    np.testing.assert_array_equal(found, np.broadcast_to(expected, found.shape))


def test_bits_of_dropout_are_those_of_the_whole():
    scores = Scores((3,), 2, (4, 6))

    @jax.jit
    def run():
        keys = dropout.per_example(jax.random.key(0), (3,))
        one = split(lambda tile: dropout.keep(keys, 0.4, tile.head, tile.q_index[0], tile.kv_index[0]), scores)
        return evaluated(one, scores), dropout.keep(keys, 0.4, *np.ogrid[:2, :4, :6])

    np.testing.assert_array_equal(*run())


def test_equal_functions_have_equal_programs():
    first, again, other = (split(SlidingWindow(left).visible, FLAT).program for left in (2, 2, 3))
    assert first == again and hash(first) == hash(again) and first != other


def test_arrays_get_gradients_through_the_split():
    def total(table):
        one = split(lambda tile, raw: RelativeBias(table).apply(raw, tile), FLAT, of_raw=True)
        return (evaluated(one, FLAT, RAW) ** 2).sum()

    def of_whole(table):
        return (RelativeBias(table).apply(jnp.asarray(RAW), whole(5, 5, 2)) ** 2).sum()

    # Sums of 25 terms, in another order.
    found, expected = jax.jit(lambda table: (jax.grad(total)(table), jax.grad(of_whole)(table)))(TABLE)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-5)


def test_pairs_that_are_drawn_are_counted_in_bytes():
    assert split(BlockSparse(np.ones((3, 3), bool), 2).visible, FLAT).drawn_bytes == 25
    assert split(Dense(np.ones((5, 5), bool)).visible, FLAT).drawn_bytes == 0  # the caller has it


@pytest.mark.parametrize(
    "fn, reason",
    [
        (lambda s, b, h, i, j: jax.nn.relu(s), "derivative rule of its own"),
        (lambda s, b, h, i, j: jnp.sort(s[None])[0], "no sort of scores"),
        (lambda s, b, h, i, j: TABLE[0][s.astype(int)], "of scores"),
    ],
)
def test_what_kernels_cannot_do_to_scores_is_refused(fn, reason):
    mod = ScoreFn(fn)
    with pytest.raises(UnsupportedError, match=reason):
        split(lambda tile, raw: mod.apply(raw, tile), FLAT, of_raw=True)


@dataclasses.dataclass(frozen=True)
class Two(Mask):
    """One array, by example and by head."""

    array: object

    def visible(self, tile):
        distance = tile.kv_index - tile.q_index
        return (distance <= self.array[:, None, None, None]) & (-distance <= self.array[:, None, None])


@dataclasses.dataclass(frozen=True)
class NeedsValues(Mask):
    array: object

    def visible(self, tile):
        return tile.kv_index < (2 if self.array.any() else 3)


@pytest.mark.parametrize("mask, reason", [(Two, "along two axes"), (NeedsValues, "needs the values")])
def test_masks_that_cannot_be_split_are_refused(mask, reason):
    with pytest.raises(UnsupportedError, match=reason):
        split(mask(jnp.asarray(np.arange(2))).visible, Scores((2,), 2, (5, 5)))
