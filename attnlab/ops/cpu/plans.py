"""Parts of a call, and tiles of short sequences, whose scores stay in the CPU's caches.

XLA's tracker has no issue for this; seen on jaxlib 0.10.2, by timing alone. A batch of products over all heads writes
scores that do not fit the caches, while the scores of a single head do. When the sizes below were fitted, XLA split a
product of two large matrices among threads, but not a batch of small products; it ran independent small products at the
same time. Short sequences are therefore computed in unrolled blocks of few queries with all their keys, a few heads at
a time. Long sequences are computed head by head, in loops over tiles of many queries, rather than all heads at a time
in tiles of few queries.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.ops.call import AttentionCall
from attnlab.ops.meshes import is_partitioned
from attnlab.ops.schedule import CPU, Costs, runs
from attnlab.types import Array

ROWS = 512  # queries per tile from which XLA splits its products among threads
# Fitted for short sequences, on two x86 cores with 1 MiB of L2 each: float32 and bfloat16, 64 features per head.
LENGTH = 1024  # beyond this length loops are as fast and take less memory
SCORES = 2**18  # most scores of a block of queries with its keys, over all heads computed at a time
UNROLLED = 16  # most products of scores to unroll; more would not fit the caches
SHORT = Costs((64, 128, 256), SCORES, cached_scores=SCORES, uncached=1, comparing=1, per_tile=0, per_row=30)


def choose(call: AttentionCall, scheduled: Callable) -> tuple:
    """Return (tile sizes, block mask, `tiles` and `together` of a `blockwise.plans.TilePlan`) for a call.

    `scheduled` is `schedule` with the call's arguments bound; it takes `costs` and `heads_per_step`.
    """
    can_be_cut = _can_be_cut(call)
    if max(call.lengths) <= LENGTH:
        block_sizes, block_mask = scheduled(costs=SHORT, heads_per_step=1)
        if written_out := _written_out(call, block_sizes, block_mask, can_be_cut):
            return block_sizes, block_mask, *written_out
    if can_be_cut:
        group = call.num_heads // call.k.shape[-2]
        block_sizes, block_mask = scheduled(costs=CPU, heads_per_step=group)
        if block_sizes[0] >= ROWS:
            return block_sizes, block_mask, None, (1, 1)
    return *scheduled(costs=CPU), None, None


def mapped_at_once(plan, call: AttentionCall, is_mapped: bool, size: int) -> int:
    """How many of the `size` calls that `vmap` maps are computed at a time under a plan."""
    if plan.together is not None:
        return 1
    if plan.tiles is None:
        return size
    *batch, _, num_heads, _ = call.q.shape[1:] if is_mapped else call.q.shape
    longest = max(len(plan.tiles), len(plan.tiles[0]))
    return min(size, max(1, SCORES // (math.prod(batch) * num_heads * math.prod(call.block_sizes) * longest)))


def _written_out(call: AttentionCall, block_sizes, block_mask: Array, can_be_cut: bool) -> tuple | None:
    """Return (`tiles`, `together`) for unrolled tiles; None unless they are few and the scores fit the caches."""
    if not isinstance(block_mask, np.ndarray) or block_sizes[0] >= ROWS:
        return None
    count, kv_heads = math.prod(size for size in call.batch if isinstance(size, int)), call.k.shape[-2]
    at_once = SCORES // (math.prod(block_sizes) * max(block_mask.shape) * call.num_heads // kv_heads)  # key heads
    if can_be_cut and at_once:
        heads = _largest_divisor(kv_heads, at_once)
        examples = _largest_divisor(count, at_once // kv_heads) if heads == kv_heads else 1
    elif count * kv_heads <= at_once:
        examples, heads = count, kv_heads
    else:
        return None
    together = None if (examples, heads) == (count, kv_heads) else (examples, heads)
    tiles = tuple(map(tuple, block_mask.tolist()))
    if any(sum(len(runs(row)) for row in rows) > UNROLLED for rows in (tiles, zip(*tiles))):
        return None
    return tiles, together


def _largest_divisor(n: int, limit: int) -> int:
    return next(size for size in range(max(1, min(n, limit)), 0, -1) if n % size == 0)


def _can_be_cut(call: AttentionCall) -> bool:
    """Whether a call may be computed in parts; not if parts would share the gradient of a bias or a score mod."""
    sizes, shared = (*call.batch, call.k.shape[-2]), jax.tree.leaves((call.bias, call.score_mods))
    return (
        not is_partitioned(call.q)
        and all(isinstance(size, int) for size in sizes)
        and math.prod(sizes) > 1
        and all(index is None for index in call.shard)
        and not any(jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in shared)
    )
