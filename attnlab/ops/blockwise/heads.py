"""One head after another, so that the scores of a tile stay in the caches of two cores.

XLA's CPU backend divides the product of two large matrices among threads, but not a batch of small ones. Long sequences
are therefore computed in tiles of many rows of one key head, rather than in tiles of few rows of all heads.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from attnlab.ops.call import AttentionCall
from attnlab.ops.meshes import is_partitioned
from attnlab.ops.platforms import platform_of
from attnlab.ops.tiles import Shard
from attnlab.types import Array

ROWS = 512  # queries of a tile, from which XLA divides its products among threads


def can_be_cut(call: AttentionCall) -> bool:
    """Whether a call may be computed head by head: on a CPU, without a bias or mods whose gradients heads share."""
    sizes, shared = (*call.batch, call.k.shape[-2]), jax.tree.leaves((call.bias, call.score_mods))
    return (
        platform_of(call.q, call.k, call.v) == "cpu"
        and not is_partitioned(call.q)
        and all(isinstance(size, int) for size in sizes)
        and math.prod(sizes) > 1
        and all(index is None for index in call.shard)
        and not any(jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in shared)
    )


def one_by_one(fn: Callable, call: AttentionCall, *arrays: Array):
    """fn(part, *arrays of the part) for each key head of each example and its query heads, joined.

    Args:
      fn: returns a tree of arrays `[1, T, heads, ...]`, and of numbers, which are summed.
      call: of `[*batch, T, heads, ...]`.
      *arrays: `[*batch, T, H, ...]`.
    """
    count, kv_heads = math.prod(call.batch), call.k.shape[-2]
    group = call.num_heads // kv_heads

    def part(unit):
        example, kv_head = unit // kv_heads, unit % kv_heads

        def cut(x):
            x, size = x.reshape(count, *x.shape[len(call.batch) :]), x.shape[len(call.batch) + 1] // kv_heads
            x = lax.dynamic_slice_in_dim(x, example, 1, axis=0)
            return lax.dynamic_slice_in_dim(x, kv_head * size, size, axis=2)

        heads = kv_head * group + jnp.arange(group, dtype=jnp.int32)
        shard = Shard(examples=example[None].astype(jnp.int32), heads=heads)
        changes = {name: cut(getattr(call, name)) for name in ("q", "k", "v")} | {"shard": shard}
        if call.sinks is not None:
            changes["sinks"] = call.sinks[heads]
        for name in ("q_positions", "kv_positions", "dropout_keys"):  # [*batch or none, ...]
            if getattr(call, name) is not None:
                changes[name] = Shard(shard.examples).take(getattr(call, name), "keys")
        return fn(call.replace(**changes).of_shard(), *map(cut, arrays))

    def joined(x):
        if x.ndim == 1:
            return x.sum()
        _, _, length, size, *rest = x.shape  # [units, 1, T, heads, ...]
        x = jnp.moveaxis(x.reshape(count, kv_heads, length, size, *rest), 1, 2)
        return x.reshape(*call.batch, length, kv_heads * size, *rest)

    return jax.tree.map(joined, lax.map(part, jnp.arange(count * kv_heads)))
