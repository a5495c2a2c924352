"""The logits of a tile after scale, bias, score mods and mask, and the weights that dropout keeps."""

import functools

import jax.numpy as jnp
import numpy as np

from attnlab.ops import dropout
from attnlab.ops.blockwise.batching import per_example
from attnlab.ops.blockwise.layout import Range
from attnlab.ops.blockwise.plans import TilePlan
from attnlab.ops.call import AttentionCall
from attnlab.ops.schedule import PARTIAL
from attnlab.ops.tiles import Side, Tile, examples, heads
from attnlab.types import Array


def masked_logits(
    plan: TilePlan, kind: int, rows: Range, columns: Range, raw: Array, call: AttentionCall, *, queries: int
) -> tuple[Array, Array | None]:
    """Return (masked logits, whether each key is visible to any query; None if all are).

    The caller zeroes hidden keys, which may be NaN. `queries` is the axis of the queries in the tile, −1 or −2.
    """
    return per_example(plan, functools.partial(_masked_logits, kind, rows, columns, queries), call, raw)


def dropout_keeps(
    plan: TilePlan, rows: Range, columns: Range, logits: Array, call: AttentionCall, *, queries: int
) -> Array:
    """The weights of a tile that dropout keeps, as a boolean array of the logits' shape."""

    def keeps(call, logits):
        tile = _tile(call, rows, columns, queries, logits.shape)
        return dropout.keep(call.dropout_keys, call.dropout_rate, tile.head, tile.q_index, tile.kv_index)

    return per_example(plan, keeps, call, logits)


def _masked_logits(kind: int, rows: Range, columns: Range, queries: int, call: AttentionCall, raw: Array):
    tile = _tile(call, rows, columns, queries, raw.shape)
    logits, key_is_visible = raw, None
    if kind == PARTIAL:
        visible = _visible(call, rows, columns, queries, raw.shape)
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


def _visible(call: AttentionCall, rows: Range, columns: Range, queries: int, shape: tuple[int, ...]) -> Array:
    """The visible pairs of a tile, `[..., *shape[-2:]]`; a NumPy array if they are known while tracing."""
    xp = np if isinstance(rows.start, int) and isinstance(columns.start, int) else jnp
    visible = _is_not_padding(call, rows, columns, xp)
    visible = visible if queries == -2 else visible.swapaxes(-1, -2)
    if call.mask is not None:
        visible = visible & call.mask.visible(_tile(call, rows, columns, queries, shape, xp))
    xp = np if isinstance(visible, np.ndarray) else jnp
    visible = visible.reshape((1,) * (len(shape) - visible.ndim) + visible.shape)
    return xp.broadcast_to(visible, (*visible.shape[:-2], *shape[-2:]))


def _is_not_padding(call: AttentionCall, rows: Range, columns: Range, xp) -> Array:
    """The pairs of a tile that lie within the lengths, `[queries, keys]`."""
    (q_size, kv_size), (q_length, kv_length) = call.block_sizes, call.lengths
    inside = xp.ones((1, 1), bool)
    if q_length % q_size:
        inside = inside & (rows.start + xp.arange(rows.size) < q_length)[:, None]
    if kv_length % kv_size:
        inside = inside & (columns.start + xp.arange(columns.size) < kv_length)
    return inside


def _tile(call: AttentionCall, rows: Range, columns: Range, queries: int, shape: tuple[int, ...], xp=jnp) -> Tile:
    """The coordinates of a tile whose scores have `shape`; `queries` is the axis of the queries in the scores."""
    *batch, num_heads, _, _ = shape
    q_length, kv_length = call.lengths
    return Tile(
        example=examples(tuple(batch), call.shard, xp),
        head=heads(num_heads, call.shard, xp),
        queries=_side(rows, q_length, call.q_positions, queries, call.shard.queries, xp),
        keys=_side(columns, kv_length, call.kv_positions, -3 - queries, None, xp),
    )


def _side(at: Range, length: int, positions, axis: int, in_call, xp) -> Side:
    # Padding of the last tile repeats the last row, because a mod must not receive a position that does not exist.
    index = xp.minimum(xp.asarray(at.start, xp.int32) + xp.arange(at.size, dtype=xp.int32), length - 1)
    side = Side(index, index, axis, at.start)
    position = index if positions is None else side.take(positions)
    return side._replace(position=position, whole_index=None if in_call is None else side.take(in_call))
