"""Exact attention by tiles, with memory linear in the sequence length.

For a block of queries the keys come tile by tile. A running max m, denominator l and accumulator a are rescaled
whenever the max grows (Milakov & Gimelshein 2018; Rabe & Staats 2021), with masked logits s:

    m' = max(m, max_j s_ij)    l' = e^(m−m') l + Σ_j e^(s_ij−m')    a' = e^(m−m') a + Σ_j e^(s_ij−m') v_j

and at the end o_i = a / l, lse_i = m_i + log l_i. Only o, m and log l are kept for the backward pass, which computes
the logits of each tile again (Dao et al. 2022, algorithm 4; with δ_i = o_i·do_i − dlse_i):

    p_ij = e^(s_ij − m_i − log l_i)    ds_ij = p_ij (do_i·v_j − δ_i)
    dv_j = Σ_i p_ij do_i    dk_j = Σ_i ds_ij q_i    dq_i = Σ_j ds_ij k_j

EMPTY tiles are never computed, and FULL tiles are not compared with the mask (see `attnlab.ops.schedule`).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.ops import dropout
from attnlab.ops.blockwise import heads, passes
from attnlab.ops.blockwise.batching import Plan
from attnlab.ops.call import AttentionCall, Result
from attnlab.ops.meshes import equally_varying, like_queries, on_auto_axes
from attnlab.ops.platforms import platform_of
from attnlab.ops.schedule import ACCELERATOR, CPU, EMPTY, FULL, PARTIAL, schedule
from attnlab.ops.tiles import padded
from attnlab.types import Array

# Tiles that are compiled one by one rather than as loops, on CPUs. Where they are small, XLA computes their products on
# one thread, and tiles that do not depend on each other at the same time. More of them would leave the caches.
UNROLLED = 16


def reason_against(call: AttentionCall) -> str | None:
    """The reason why this backend cannot run a call, or None."""
    return "an axis has length 0" if any(0 in x.shape for x in (call.q, call.k, call.v)) else None


@on_auto_axes(like_queries)
def attend(call: AttentionCall, given: Result | None = None) -> Result:
    """(out, (max, log_sum)); or `given`, such results over more keys, with the gradients of these keys."""
    call, block_mask, by_head = _in_tiles(call)
    is_known = isinstance(block_mask, np.ndarray)
    kinds = tuple(kind for kind in (FULL, PARTIAL) if not is_known or (block_mask == kind).any())
    tiles = _unrolled(call, block_mask) if is_known else None
    plan = Plan(kinds, tiles=tiles, by_head=by_head)
    operands = equally_varying((jax.tree.map(jnp.asarray, call), jnp.asarray(block_mask), *(given or ())))
    run = passes.attention if given is None else passes.part_of
    return run(plan, *operands)


def _unrolled(call: AttentionCall, block_mask: np.ndarray) -> tuple[tuple[int, ...], ...] | None:
    """The block mask as a static value, where its tiles are compiled one by one; None for loops."""
    if platform_of(call.q, call.k, call.v) != "cpu" or call.block_sizes[0] >= heads.ROWS:
        return None
    return tuple(map(tuple, block_mask.tolist())) if (block_mask > EMPTY).sum() <= UNROLLED else None


def _in_tiles(call: AttentionCall) -> tuple[AttentionCall, Array, bool]:
    """The call with the sizes of tiles, prepared for them; the block mask; whether heads are computed one by one."""
    q, mask, bias, lengths = call.q, call.mask, call.bias, call.lengths
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    where = {"q_positions": call.q_positions, "kv_positions": call.kv_positions, "num_heads": call.num_heads}
    where |= {"batch": call.batch, "shard": call.shard}
    costs = CPU if platform_of(q, call.k, call.v) == "cpu" else ACCELERATOR
    block_sizes, block_mask, by_head = None, None, heads.can_be_cut(call)
    if by_head:
        group = call.num_heads // call.k.shape[-2]
        block_sizes, block_mask = schedule(mask, *lengths, call.block_sizes, **where, costs=costs, together=group)
        by_head = block_sizes[0] >= heads.ROWS
    if not by_head:
        block_sizes, block_mask = schedule(mask, *lengths, call.block_sizes, **where, costs=costs)
    padded_lengths = tuple(count * size for count, size in zip(block_mask.shape, block_sizes))
    scale = q.shape[-1] ** -0.5 if call.scale is None else call.scale
    if q.dtype == dtype or (isinstance(scale, float) and math.frexp(scale)[0] == 0.5):
        # This adds no rounding, and saves a multiplication per tile.
        q, scale = (q * scale).astype(q.dtype), None
    call = call.replace(
        q=q,
        scale=None if scale is None else jnp.asarray(scale, dtype),
        bias=None if bias is None else _padded_bias(bias, rank=len(call.batch) + 3, lengths=padded_lengths),
        score_mods=tuple(mod.for_tiles(dtype) for mod in call.score_mods),
        mask=None if mask is None else mask.for_tiles(*padded_lengths),
        dropout_keys=dropout.key_words(call.dropout_keys) if call.dropout_rate else None,
        block_sizes=tuple(block_sizes),
    )
    return call, block_mask, by_head


def _padded_bias(bias: Array, rank: int, lengths: tuple[int, int]) -> Array:
    """The bias with all axes of the scores, padded to whole tiles."""
    bias = jnp.reshape(bias, (1,) * (rank - bias.ndim) + bias.shape)
    return padded(padded(bias, 1 if bias.shape[-2] == 1 else lengths[0], axis=-2), lengths[1])
