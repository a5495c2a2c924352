"""Compute a call in parts, a few examples and key heads at a time; `plans` says why."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from attnlab.ops.call import AttentionCall
from attnlab.ops.tiles import Shard
from attnlab.types import Array


def in_parts(fn: Callable, together: tuple[int, int], call: AttentionCall, *arrays: Array):
    """Call `fn(part, *arrays of the part)` for each part of `together` examples and key heads, and join the results.

    Args:
      fn: returns a tree of arrays `[examples, T, heads, ...]` and of numbers, which are summed.
      together: (examples, key heads) of a part, divisors of their numbers; query heads go with their key heads.
      call: has arrays `[*batch, T, heads, ...]`.
      *arrays: `[*batch, T, H, ...]`.
    """
    kv_heads, count = call.k.shape[-2], math.prod(call.batch)
    examples_at_once, heads_at_once = together
    parts_of_heads = kv_heads // heads_at_once

    def part(unit):
        example, kv_head = unit // parts_of_heads * examples_at_once, unit % parts_of_heads * heads_at_once

        def cut(x):
            x, size = x.reshape(count, *x.shape[len(call.batch) :]), x.shape[len(call.batch) + 1] // kv_heads
            x = lax.dynamic_slice_in_dim(x, example, examples_at_once, axis=0)
            return lax.dynamic_slice_in_dim(x, kv_head * size, heads_at_once * size, axis=2)

        group = call.num_heads // kv_heads
        shard = Shard(
            examples=(example + jnp.arange(examples_at_once)).astype(jnp.int32),
            heads=kv_head * group + jnp.arange(heads_at_once * group, dtype=jnp.int32),
        )
        changes = {name: cut(getattr(call, name)) for name in ("q", "k", "v")} | {"shard": shard}
        if call.sinks is not None:
            changes["sinks"] = call.sinks[shard.heads]
        for name in ("q_positions", "kv_positions", "dropout_keys"):  # [*batch or none, ...]
            if getattr(call, name) is not None:
                changes[name] = Shard(shard.examples).take(getattr(call, name), "keys")
        return fn(call.replace(**changes).of_shard(), *map(cut, arrays))

    def joined(x):
        if x.ndim == 1:
            return x.sum()
        _, examples, length, size, *rest = x.shape  # [parts, examples, T, heads, ...]
        if parts_of_heads > 1:
            x = jnp.moveaxis(x.reshape(-1, parts_of_heads, examples, length, size, *rest), 1, 3)
        return x.reshape(*call.batch, length, parts_of_heads * size, *rest)

    return jax.tree.map(joined, lax.map(part, jnp.arange(count // examples_at_once * parts_of_heads)))
