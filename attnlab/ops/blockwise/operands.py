"""The arguments of a pass: arrays, and the static plan that goes with them."""

from typing import NamedTuple

import jax

from attnlab.ops.masks import Mask
from attnlab.ops.tiles import Shard
from attnlab.types import Array


class Terms(NamedTuple):
    scale: Array | None
    bias: Array | None  # [..., H or 1, Tq or 1, Tk], padded to whole tiles; within a tile its part of it, transposed
    score_mods: tuple
    mask: Mask | None
    dropout_words: Array | None
    q_positions: Array | None
    kv_positions: Array | None
    shard: Shard


class SplitTerms(NamedTuple):
    """Two complementary `Terms`: each leaf is None in one of them."""

    shared: Terms  # leaves without an axis that `vmap` maps over
    mapped: Terms  # leaves with a leading axis that `vmap` maps over


class Operands(NamedTuple):
    """The arrays of a pass. Under `vmap` all but `block_mask` and `terms.shared` have a leading mapped axis."""

    q: Array
    k: Array
    v: Array
    sinks: Array | None
    block_mask: Array  # [nQ, nK], EMPTY, PARTIAL or FULL
    terms: SplitTerms
    # In the backward pass only:
    out: Array | None = None
    log_sums: tuple[Array, Array] | None = None  # (max, log_sum)
    d_out: Array | None = None
    d_lse: Array | None = None


class Plan(NamedTuple):
    lengths: tuple[int, int]  # Tq, Tk
    block_sizes: tuple[int, int]  # queries and keys of a tile
    tile_kinds: tuple[int, ...]  # PARTIAL and FULL, if they occur in `block_mask`; both when it is traced
    dropout_rate: float
    is_mapped: bool = False  # whether the operands have a leading axis that `vmap` maps over


def partition(tree, is_chosen):
    """`tree` split by a tree of booleans: the chosen leaves and the other leaves, None in place of missing leaves."""
    chosen = jax.tree.map(lambda x, choose: x if choose else None, tree, is_chosen)
    others = jax.tree.map(lambda x, choose: None if choose else x, tree, is_chosen)
    return chosen, others


def combine(a, b):
    """The inverse of `partition`."""
    return jax.tree.map(lambda x, y: y if x is None else x, a, b, is_leaf=lambda x: x is None)
