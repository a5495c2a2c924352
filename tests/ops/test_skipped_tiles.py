"""Tiles without visible pairs are not computed, even under `vmap` or with a traced mask."""

import dataclasses
import math
from typing import ClassVar

import jax
import numpy as np
import pytest

import attnlab
from attnlab.masks import BlockSparse, Causal, MaskFn, Padding, Segments, SlidingWindow
from attnlab.score_mods import ScoreMod
from tests.ops.cases import slow


@dataclasses.dataclass(frozen=True)
class Counting(ScoreMod):
    """Leaves scores unchanged, and counts computed tiles of 64 × 64; two that are computed as one count as two."""

    counted: ClassVar[list] = []

    def apply(self, scores, tile):
        count = math.prod(scores.shape[-2:]) // 64**2
        jax.debug.callback(lambda: self.counted.append(count))
        return scores


def tiles_computed(attend, q, *others):
    """(forward, backward)."""

    def count(run, *arguments):
        Counting.counted.clear()
        result = jax.block_until_ready(jax.jit(run)(*arguments))
        jax.effects_barrier()
        return sum(Counting.counted), result

    forward, (out, back) = count(lambda q, *others: jax.vjp(lambda q: attend(q, *others), q), q, *others)
    return forward, count(lambda back, out: back(out), back, out)[0]


DOCUMENTS = np.arange(512) // 64


@pytest.mark.parametrize(
    "mask, expected",
    [
        (Causal(), 36),
        (BlockSparse(np.eye(8, dtype=bool), size=64), 8),
        slow(Padding(np.array(0)), 0),
        slow(SlidingWindow(left=64), 15),
        slow(MaskFn(lambda b, h, i, j: i // 64 == j // 64), 8),
    ],
)
def test_empty_tiles_are_skipped(mask, expected):
    q, k, v = np.random.default_rng(0).standard_normal((3, 512, 1, 8), np.float32)

    def attend(q, mask):
        return attnlab.attention(q, k, v, mask, Counting(), impl="blockwise", block_sizes=(64, 64))

    assert tiles_computed(lambda q: attend(q, mask), q) == (expected, expected)
    if jax.tree.leaves(mask):  # the block mask of a traced mask is computed at run time
        assert tiles_computed(attend, q, mask) == (expected, expected)


@pytest.mark.parametrize(
    "wrap, ids, expected",
    [
        slow(lambda f: jax.vmap(f, in_axes=(0, 0, 0, None)), DOCUMENTS, 8),
        (lambda f: jax.vmap(jax.vmap(f)), np.stack([DOCUMENTS, DOCUMENTS // 2, DOCUMENTS])[None], 12),
    ],
    ids=["shared mask", "vmap of vmap"],
)
def test_empty_tiles_are_skipped_under_vmap(wrap, ids, expected):
    arrays = np.random.default_rng(0).standard_normal((3, 3, 512, 1, 8), np.float32)
    arrays = arrays[:, None] if ids.ndim == 3 else arrays

    def attend(q, k, v, ids):
        mask = Causal() & Segments(ids)
        return attnlab.attention(q, k, v, mask, Counting(), impl="blockwise", block_sizes=(64, 64))

    assert tiles_computed(wrap(attend), *arrays, ids) == (expected, expected)
