"""How a call is computed: in which tiles, and on CPUs in which parts, so that scores stay in the caches.

XLA's CPU backend divides the product of two large matrices among threads, but not a batch of small ones; and it runs
small products that do not depend on each other at the same time. Short sequences are therefore computed by blocks of
few queries with all their keys, written out one by one, for a few heads at a time; long ones head by head in loops over
tiles of many queries, rather than in tiles of few queries of all heads.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.ops.call import AttentionCall
from attnlab.ops.meshes import is_partitioned
from attnlab.ops.platforms import platform_of
from attnlab.ops.schedule import ACCELERATOR, CPU, FULL, PARTIAL, Costs, runs, schedule
from attnlab.types import Array

ROWS = 512  # queries of a tile, from which XLA divides its products among threads
# Short sequences, on two x86 cores with 1 MiB of L2 each: float32 and bfloat16, 64 features a head.
LENGTH = 1024  # beyond which loops are as fast, in less memory
SCORES = 2**18  # of a block of queries with its keys, in all heads that are computed at a time
UNROLLED = 16  # products of scores that are written out; more of them would leave the caches
SHORT = Costs((64, 128, 256), SCORES, cached_scores=SCORES, uncached=1, comparing=1, per_tile=0, per_row=30)


class Plan(NamedTuple):
    tile_kinds: tuple[int, ...]  # PARTIAL and FULL, if they occur in the block mask; both when it is traced
    mapped: tuple[bool, ...] | None = None  # under `vmap`: which leaves of the call have a leading mapped axis
    tiles: tuple[tuple[int, ...], ...] | None = None  # the block mask where tiles are written out; None for loops
    together: tuple[int, int] | None = None  # the examples and key heads that are computed at a time; None for all


def planned(call: AttentionCall) -> tuple[tuple[int, int], Array, Plan]:
    """The sizes of tiles, the block mask, and the plan of a call."""
    where = {"q_positions": call.q_positions, "kv_positions": call.kv_positions, "num_heads": call.num_heads}
    where |= {"batch": call.batch, "shard": call.shard}
    tiling = (call.mask, *call.lengths, call.block_sizes)
    if platform_of(call.q, call.k, call.v) != "cpu":
        block_sizes, block_mask = schedule(*tiling, **where, costs=ACCELERATOR)
        return block_sizes, block_mask, Plan(_kinds(block_mask))

    can_be_cut = _can_be_cut(call)
    if max(call.lengths) <= LENGTH:
        block_sizes, block_mask = schedule(*tiling, **where, costs=SHORT, together=1)
        if plan := _written_out(call, block_sizes, block_mask, can_be_cut):
            return block_sizes, block_mask, plan
    if can_be_cut:
        group = call.num_heads // call.k.shape[-2]
        block_sizes, block_mask = schedule(*tiling, **where, costs=CPU, together=group)
        if block_sizes[0] >= ROWS:
            return block_sizes, block_mask, Plan(_kinds(block_mask), together=(1, 1))
    block_sizes, block_mask = schedule(*tiling, **where, costs=CPU)
    return block_sizes, block_mask, Plan(_kinds(block_mask))


def mapped_at_once(plan: Plan, call: AttentionCall, is_mapped: bool, size: int) -> int:
    """How many of `size` calls of a plan `vmap` computes at a time."""
    if plan.together is not None:
        return 1
    if plan.tiles is None:
        return size
    *batch, _, num_heads, _ = call.q.shape[1:] if is_mapped else call.q.shape
    longest = max(len(plan.tiles), len(plan.tiles[0]))
    return min(size, max(1, SCORES // (math.prod(batch) * num_heads * math.prod(call.block_sizes) * longest)))


def _kinds(block_mask: Array) -> tuple[int, ...]:
    return tuple(
        kind for kind in (FULL, PARTIAL) if not isinstance(block_mask, np.ndarray) or (block_mask == kind).any()
    )


def _written_out(call: AttentionCall, block_sizes, block_mask: Array, can_be_cut: bool) -> Plan | None:
    """The plan of a call whose tiles are written out, if they are few, and their scores stay in the caches."""
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
    return Plan(_kinds(block_mask), tiles=tiles, together=together)


def _largest_divisor(n: int, limit: int) -> int:
    return next(size for size in range(max(1, min(n, limit)), 0, -1) if n % size == 0)


def _can_be_cut(call: AttentionCall) -> bool:
    """Whether a call may be computed in parts: without a bias or mods whose gradients heads share."""
    sizes, shared = (*call.batch, call.k.shape[-2]), jax.tree.leaves((call.bias, call.score_mods))
    return (
        not is_partitioned(call.q)
        and all(isinstance(size, int) for size in sizes)
        and math.prod(sizes) > 1
        and all(index is None for index in call.shard)
        and not any(jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in shared)
    )
