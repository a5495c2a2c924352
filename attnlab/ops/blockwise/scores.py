"""The logits of a tile: scale, bias, score mods and mask, and which weights dropout keeps."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from attnlab.ops import dropout
from attnlab.ops.blockwise.operands import Plan, SplitTerms, Terms, combine
from attnlab.ops.schedule import PARTIAL
from attnlab.ops.tiles import Shard, Side, Tile, examples, heads
from attnlab.types import Array


def masked_logits(plan: Plan, kind: int, i, j, raw: Array, terms: SplitTerms) -> tuple[Array, Array | None]:
    """Masked logits; for a PARTIAL tile also its visible keys: the caller zeroes other keys, which may be NaN."""
    run = functools.partial(_masked_logits, plan, kind, i, j)
    return _per_example(plan, run, raw.shape[0], terms, raw)


def dropout_keeps(plan: Plan, i, j, shape: tuple[int, ...], terms: SplitTerms) -> Array:
    """Which weights of a tile dropout keeps, an array of `shape`."""

    def keeps(terms):
        tile = _tile(plan, i, j, shape[int(plan.is_mapped) :], terms.shard)
        return dropout.keep(terms.dropout_words, plan.dropout_rate, tile.head, tile.q_index, tile.kv_index)

    return _per_example(plan, keeps, shape[0], terms)


def _per_example(plan: Plan, fn: Callable, axis_size: int, terms: SplitTerms, *arrays: Array):
    """fn(terms, *arrays), mapped over the leading axis when `vmap` has added one."""

    def run(shared, mapped, *arrays):
        return fn(combine(shared, mapped), *arrays)

    if not plan.is_mapped:
        return run(*terms, *arrays)
    return jax.vmap(run, in_axes=(None, 0, *(0 for _ in arrays)), axis_size=axis_size)(*terms, *arrays)


def _masked_logits(plan: Plan, kind: int, i, j, terms: Terms, raw: Array):
    tile = _tile(plan, i, j, raw.shape, terms.shard, terms.q_positions, terms.kv_positions)
    logits, key_is_visible = raw, None
    if kind == PARTIAL:
        visible = _is_not_padding(plan, i, j)
        if terms.mask is not None:
            visible = visible & terms.mask.visible(tile)
        visible = jnp.reshape(visible, (1,) * (raw.ndim - jnp.ndim(visible)) + jnp.shape(visible))
        key_is_visible = jnp.broadcast_to(visible, (*visible.shape[:-2], *raw.shape[-2:])).any(axis=-1)
        if terms.scale is not None or terms.score_mods:
            logits = jnp.where(visible, logits, 0)  # a masked NaN would spoil the gradients of scale and mods
    if terms.scale is not None:
        logits = logits * terms.scale
    if terms.bias is not None:
        logits = logits + terms.bias.astype(logits.dtype)
    for mod in terms.score_mods:
        logits = jnp.broadcast_to(mod.apply(logits, tile), logits.shape).astype(logits.dtype)
    if kind == PARTIAL:
        logits = jnp.where(visible, logits, -jnp.inf)
    return logits, key_is_visible


def _is_not_padding(plan: Plan, i, j) -> Array:
    """Which pairs of a tile, `[keys, queries]`, lie within the lengths."""
    (q_size, kv_size), (q_length, kv_length) = plan.block_sizes, plan.lengths
    inside = jnp.ones((1, 1), bool)
    if q_length % q_size:
        inside = inside & (i * q_size + jnp.arange(q_size) < q_length)
    if kv_length % kv_size:
        inside = inside & (j * kv_size + jnp.arange(kv_size) < kv_length)[:, None]
    return inside


def _tile(plan: Plan, i, j, shape: tuple[int, ...], shard: Shard, q_positions=None, kv_positions=None) -> Tile:
    """The coordinates of query block i and key block j, for scores `[*batch, H, keys, queries]`."""
    *batch, num_heads, _, _ = shape
    (q_size, kv_size), (q_length, kv_length) = plan.block_sizes, plan.lengths
    return Tile(
        example=examples(tuple(batch), shard),
        head=heads(num_heads, shard),
        queries=_side(i, q_size, q_length, q_positions, -1, shard.queries),
        keys=_side(j, kv_size, kv_length, kv_positions, -2, shard.keys),
    )


def _side(block, size: int, length: int, positions, axis: int, in_call) -> Side:
    start = jnp.asarray(block * size, jnp.int32)
    # The padding of the last tile repeats the last row: a mod must not meet a position that does not exist.
    index = jnp.minimum(start + jnp.arange(size, dtype=jnp.int32), length - 1)
    side = Side(index, index, axis, start)
    side = side if in_call is None else side._replace(whole_index=side.take(in_call))
    return side if positions is None else side._replace(position=side.take(positions))
