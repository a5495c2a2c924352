"""Exact attention in tiles, with memory linear in the sequence length.

A block of queries visits its keys tile by tile. The masked logits s update a running max m; the denominator l and the
accumulator a are rescaled whenever it grows (Milakov & Gimelshein 2018; Rabe & Staats 2021):

    m' = max(m, max_j s_ij)    l' = e^(m−m') l + Σ_j e^(s_ij−m')    a' = e^(m−m') a + Σ_j e^(s_ij−m') v_j

and at the end o_i = a / l and lse_i = m_i + log l_i. Besides the inputs, only o, m and log l are stored: the backward
pass recomputes the logits of each tile (Dao et al. 2022, algorithm 4; with δ_i = o_i·do_i − dlse_i):

    p_ij = e^(s_ij − m_i − log l_i)    ds_ij = p_ij (do_i·v_j − δ_i)
    dv_j = Σ_i p_ij do_i    dk_j = Σ_i ds_ij q_i    dq_i = Σ_j ds_ij k_j

EMPTY tiles are never computed, and FULL tiles are not compared with the mask (see `attnlab.ops.schedule`).
"""

import math

import jax
import jax.numpy as jnp

from attnlab.ops import dense, dropout
from attnlab.ops.blockwise import passes
from attnlab.ops.blockwise.plans import planned
from attnlab.ops.call import AttentionCall, Result
from attnlab.ops.meshes import equally_varying, like_queries, on_auto_axes
from attnlab.ops.tiles import padded
from attnlab.types import Array


def reason_against(call: AttentionCall) -> str | None:
    """The reason why this backend cannot run a call, or None."""
    return None if call.v.shape[-1] else "values have no features"


@on_auto_axes(like_queries)
def attend(call: AttentionCall) -> Result:
    """Return (out, (max, log_sum))."""
    if 0 in (*call.batch, *call.lengths):  # there are no tiles
        return dense.attend(call)
    block_sizes, block_mask, plan = planned(call)
    call = _prepared(call, block_sizes, block_mask.shape)
    operands = equally_varying((jax.tree.map(jnp.asarray, call), jnp.asarray(block_mask)))
    return passes.attention(plan, *operands)


def _prepared(call: AttentionCall, block_sizes: tuple[int, int], counts: tuple[int, int]) -> AttentionCall:
    """The call with mask, mods and bias prepared for tiles, and with q scaled if that loses no precision."""
    q, mask, bias = call.q, call.mask, call.bias
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    padded_lengths = tuple(count * size for count, size in zip(counts, block_sizes))
    scale = q.shape[-1] ** -0.5 if call.scale is None else call.scale
    if q.dtype == dtype or (isinstance(scale, float) and math.frexp(scale)[0] == 0.5):
        # Scaling q is exact or rounds as finely as scaling the logits, and saves a multiplication per tile.
        q, scale = (q * scale).astype(q.dtype), None
    return call.replace(
        q=q,
        scale=None if scale is None else jnp.asarray(scale, dtype),
        bias=None if bias is None else _padded_bias(bias, rank=len(call.batch) + 3, lengths=padded_lengths),
        score_mods=tuple(mod.for_tiles(dtype) for mod in call.score_mods),
        mask=None if mask is None else mask.for_tiles(*padded_lengths),
        dropout_keys=dropout.key_words(call.dropout_keys) if call.dropout_rate else None,
        block_sizes=tuple(block_sizes),
    )


def _padded_bias(bias: Array, rank: int, lengths: tuple[int, int]) -> Array:
    """The bias with all axes of the scores, padded to whole tiles."""
    bias = jnp.reshape(bias, (1,) * (rank - bias.ndim) + bias.shape)
    return padded(padded(bias, 1 if bias.shape[-2] == 1 else lengths[0], axis=-2), lengths[1])
