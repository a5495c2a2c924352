"""The plan of a call: the sizes and kinds of its tiles and, on CPUs, the parts that are computed in turn."""

import functools
from typing import NamedTuple

import numpy as np

from attnlab.ops.call import AttentionCall
from attnlab.ops.cpu import plans as of_cpus
from attnlab.ops.platforms import platform_of
from attnlab.ops.schedule import ACCELERATOR, FULL, PARTIAL, schedule
from attnlab.types import Array


class TilePlan(NamedTuple):
    tile_kinds: tuple[int, ...]  # which of PARTIAL and FULL the block mask has; both if it is traced
    mapped: tuple[bool, ...] | None = None  # under `vmap`: which leaves of the call have a leading mapped axis
    tiles: tuple[tuple[int, ...], ...] | None = None  # the block mask if tiles are unrolled; None for loops
    together: tuple[int, int] | None = None  # how many examples and key heads are computed at a time; None for all


def planned(call: AttentionCall) -> tuple[tuple[int, int], Array, TilePlan]:
    """Return the tile sizes, block mask and plan of a call."""
    where = {"q_positions": call.q_positions, "kv_positions": call.kv_positions, "num_heads": call.num_heads}
    where |= {"batch": call.batch, "shard": call.shard}
    scheduled = functools.partial(schedule, call.mask, *call.lengths, call.block_sizes, **where)
    if platform_of(call.q, call.k, call.v) == "cpu":
        block_sizes, block_mask, tiles, together = of_cpus.choose(call, scheduled)
    else:
        (block_sizes, block_mask), tiles, together = scheduled(costs=ACCELERATOR), None, None
    is_known = isinstance(block_mask, np.ndarray)
    kinds = tuple(kind for kind in (FULL, PARTIAL) if not is_known or (block_mask == kind).any())
    return block_sizes, block_mask, TilePlan(kinds, tiles=tiles, together=together)
