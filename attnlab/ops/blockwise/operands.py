"""The arguments of a pass: arrays, and the static plan that goes with them."""

from typing import NamedTuple

import jax

from attnlab.ops.masks import Mask
from attnlab.ops.tiles import Shard
from attnlab.types import Array


class Terms(NamedTuple):
    """Everything that turns the raw logits q·k into masked logits."""

    scale: Array | None
    bias: Array | None  # [..., H or 1, Tq or 1, Tk], padded to whole tiles; within a tile its part of it, transposed
    score_mods: tuple
    mask: Mask | None
    dropout_words: Array | None
    q_positions: Array | None
    kv_positions: Array | None
    shard: Shard


class SplitTerms(NamedTuple):
    """Two `Terms` that complement each other: a leaf that stands in one is None in the other.

    Attributes:
      shared: the leaves that all examples of a `vmap` share; all leaves when there is no `vmap`.
      mapped: the leaves with a leading axis that `vmap` maps over.
    """

    shared: Terms
    mapped: Terms


class Operands(NamedTuple):
    """The arrays of a pass. Under `vmap` all but `block_mask` and `terms.shared` have a leading mapped axis."""

    q: Array
    k: Array
    v: Array
    sinks: Array | None
    block_mask: Array  # [nQ, nK], EMPTY, PARTIAL or FULL
    terms: SplitTerms
    # Of the backward pass alone:
    out: Array | None = None
    log_sums: tuple[Array, Array] | None = None  # (max, log_sum)
    d_out: Array | None = None
    d_lse: Array | None = None


class Plan(NamedTuple):
    """The static part of a call.

    Attributes:
      lengths: Tq and Tk.
      block_sizes: queries and keys of a tile.
      tile_kinds: the values, PARTIAL and FULL, that occur in `block_mask`; both when it is traced.
      dropout_rate: probability that a weight is dropped.
      is_mapped: whether the operands have a leading axis that `vmap` maps over.
    """

    lengths: tuple[int, int]
    block_sizes: tuple[int, int]
    tile_kinds: tuple[int, ...]
    dropout_rate: float
    is_mapped: bool = False


def partition(tree, is_chosen):
    """`tree` as two trees: the leaves for which `is_chosen`, a tree of booleans, is true, and the others.

    Each has None in place of the other's leaves; `combine` is the inverse.
    """
    chosen = jax.tree.map(lambda x, choose: x if choose else None, tree, is_chosen)
    others = jax.tree.map(lambda x, choose: None if choose else x, tree, is_chosen)
    return chosen, others


def combine(a, b):
    """The leaves of both trees, which complement each other."""
    return jax.tree.map(lambda x, y: y if x is None else x, a, b, is_leaf=lambda x: x is None)
