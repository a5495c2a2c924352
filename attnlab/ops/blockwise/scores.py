"""The logits of a tile: scale, bias, score mods and mask, and which weights dropout keeps."""

import functools

import jax.numpy as jnp
import numpy as np

from attnlab.ops import dropout
from attnlab.ops.blockwise.batching import Plan, per_example
from attnlab.ops.call import AttentionCall
from attnlab.ops.schedule import PARTIAL
from attnlab.ops.tiles import Side, Tile, examples, heads
from attnlab.types import Array


def masked_logits(
    plan: Plan, kind: int, i, j, raw: Array, call: AttentionCall, *, queries: int
) -> tuple[Array, Array | None]:
    """Masked logits, and the visible keys, or None for all: the caller zeroes other keys, which may be NaN.

    `queries` is the axis of the tile that has the queries, −1 or −2; the other one has the keys.
    """
    return per_example(plan, functools.partial(_masked_logits, kind, i, j, queries), call, raw)


def dropout_keeps(plan: Plan, i, j, logits: Array, call: AttentionCall, *, queries: int) -> Array:
    """Which weights of a tile dropout keeps, a boolean array of the logits' shape."""

    def keeps(call, logits):
        tile = _tile(call, i, j, queries, logits.shape)
        return dropout.keep(call.dropout_keys, call.dropout_rate, tile.head, tile.q_index, tile.kv_index)

    return per_example(plan, keeps, call, logits)


def _masked_logits(kind: int, i, j, queries: int, call: AttentionCall, raw: Array):
    tile = _tile(call, i, j, queries, raw.shape)
    logits, key_is_visible = raw, None
    if kind == PARTIAL:
        visible = _visible(call, i, j, queries, raw.shape)
        key_is_visible = visible.any(axis=queries)
        if isinstance(visible, np.ndarray) and key_is_visible.all():
            key_is_visible = None
        if call.scale is not None or call.score_mods:
            logits = jnp.where(visible, logits, 0)  # a masked NaN would spoil the gradients of scale and mods
    if call.scale is not None:
        logits = logits * call.scale
    if call.bias is not None:
        bias = call.bias if queries == -2 else call.bias.swapaxes(-1, -2)
        logits = logits + bias.astype(logits.dtype)
    for mod in call.score_mods:
        logits = jnp.broadcast_to(mod.apply(logits, tile), logits.shape).astype(logits.dtype)
    if kind == PARTIAL:
        logits = jnp.where(visible, logits, -jnp.inf)
    return logits, key_is_visible


def _visible(call: AttentionCall, i, j, queries: int, shape: tuple[int, ...]) -> Array:
    """Which pairs of a tile are visible, `[..., *shape[-2:]]`; a NumPy array where that is known while tracing."""
    xp = np if isinstance(i, int) and isinstance(j, int) else jnp
    visible = _is_not_padding(call, i, j, xp)
    visible = visible if queries == -2 else visible.swapaxes(-1, -2)
    if call.mask is not None:
        visible = visible & call.mask.visible(_tile(call, i, j, queries, shape, xp))
    xp = np if isinstance(visible, np.ndarray) else jnp
    visible = visible.reshape((1,) * (len(shape) - visible.ndim) + visible.shape)
    return xp.broadcast_to(visible, (*visible.shape[:-2], *shape[-2:]))


def _is_not_padding(call: AttentionCall, i, j, xp) -> Array:
    """Which pairs of a tile, `[queries, keys]`, lie within the lengths."""
    (q_size, kv_size), (q_length, kv_length) = call.block_sizes, call.lengths
    inside = xp.ones((1, 1), bool)
    if q_length % q_size:
        inside = inside & (i * q_size + xp.arange(q_size) < q_length)[:, None]
    if kv_length % kv_size:
        inside = inside & (j * kv_size + xp.arange(kv_size) < kv_length)
    return inside


def _tile(call: AttentionCall, i, j, queries: int, shape: tuple[int, ...], xp=jnp) -> Tile:
    """The coordinates of query block i and key block j, for scores of a shape whose axis `queries` has the queries."""
    *batch, num_heads, _, _ = shape
    (q_size, kv_size), (q_length, kv_length) = call.block_sizes, call.lengths
    return Tile(
        example=examples(tuple(batch), call.shard, xp),
        head=heads(num_heads, call.shard, xp),
        queries=_side(i, q_size, q_length, call.q_positions, queries, call.shard.queries, xp),
        keys=_side(j, kv_size, kv_length, call.kv_positions, -3 - queries, call.shard.keys, xp),
    )


def _side(block, size: int, length: int, positions, axis: int, in_call, xp) -> Side:
    start = xp.asarray(block * size, xp.int32)
    # The padding of the last tile repeats the last row: a mod must not meet a position that does not exist.
    index = xp.minimum(start + xp.arange(size, dtype=xp.int32), length - 1)
    side = Side(index, index, axis, start)
    side = side if in_call is None else side._replace(whole_index=side.take(in_call))
    return side if positions is None else side._replace(position=side.take(positions))
