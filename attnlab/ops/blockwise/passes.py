"""The forward pass, one block of queries at a time, and the backward pass, one block of keys at a time."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from attnlab.ops.blockwise import layout
from attnlab.ops.blockwise.batching import batched_explicitly, with_mapped
from attnlab.ops.blockwise.layout import Range
from attnlab.ops.blockwise.plans import TilePlan
from attnlab.ops.blockwise.scores import dropout_keeps, masked_logits
from attnlab.ops.call import AttentionCall, Result
from attnlab.ops.cpu import parts
from attnlab.ops.logsumexp import finite_shift, normalizer
from attnlab.ops.meshes import varying_like
from attnlab.ops.nodes import combine, partition
from attnlab.ops.schedule import FULL, PARTIAL, runs, visit_order
from attnlab.types import Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(plan: TilePlan, call: AttentionCall, block_mask: Array) -> Result:
    """Return (out, (max, log_sum)), differentiable in q, k, v, sinks, scale, bias and score mods; max is a constant."""
    return forward(plan, call, block_mask)


def _attention_forward(plan, call, block_mask):
    results = checkpoint_name(forward(plan, call, block_mask), "attention")  # see GPT's remat
    return results, (call, block_mask, *results)


def _attention_backward(plan, residuals, cotangents):
    d_out, (_, d_lse) = cotangents
    return backward(plan, *residuals, d_out, d_lse), None


attention.defvjp(_attention_forward, _attention_backward)


def _visit(plan: TilePlan, order: tuple, row, size: int, tile: Callable, state):
    """Return the state after state = tile(kind, range, state) has run for each tile of the row that is not EMPTY."""
    if plan.tiles is not None:
        for kind, first, count in runs(order[row]):
            state = tile(kind, Range(first * size, count * size), state)
        return state
    columns, num_full, num_visible = (x[row] for x in order)
    for kind, start, stop in ((FULL, 0, num_full), (PARTIAL, num_full, num_visible)):
        if kind in plan.tile_kinds:
            state = lax.fori_loop(
                start, stop, lambda t, state, kind=kind: tile(kind, Range(columns[t] * size, size), state), state
            )
    return state


def _order(plan: TilePlan, block_mask: Array, *, by_column: bool = False) -> tuple:
    """The tiles of each row or column of the block mask, in the form that `_visit` takes."""
    if plan.tiles is not None:
        return tuple(zip(*plan.tiles)) if by_column else plan.tiles
    return visit_order(block_mask.T if by_column else block_mask)


def _with_bias_tile(call: AttentionCall, rows: Range, columns: Range) -> AttentionCall:
    return call.replace(bias=layout.bias_tile(call.bias, rows, columns))


def _sinks(plan: TilePlan, call: AttentionCall) -> Array:
    """The sinks, `[H]` or under `vmap` `[n, H]`, in the accumulators' type and shaped to broadcast to `[..., H]`."""
    sinks = call.sinks.astype(_accumulator_type(call.q))
    if plan.mapped is None:
        return sinks
    return sinks.reshape(-1, *(1,) * (call.q.ndim - 4), sinks.shape[-1])  # n = 1 if all examples share the sinks


def _accumulator_type(x: Array):
    return jnp.promote_types(x.dtype, jnp.float32)


# Forward


class _Softmax(NamedTuple):
    """The running softmax of a block of queries, over the keys visited so far."""

    running_max: Array  # [..., H, queries]
    denominator: Array  # [..., H, queries]
    accumulator: Array  # [..., H, queries, Dv]


@batched_explicitly
@functools.partial(jax.jit, static_argnums=0)
def forward(plan: TilePlan, call: AttentionCall, block_mask: Array) -> Result:
    """Return (out, (max, log_sum))."""
    if plan.together is not None:
        return parts.in_parts(lambda part: _forward(plan, part, block_mask), plan.together, call)
    return _forward(plan, call, block_mask)


def _forward(plan: TilePlan, call: AttentionCall, block_mask: Array) -> Result:
    (q_size, kv_size), length = call.block_sizes, call.lengths[0]
    q, *keys = (layout.by_head(x, size) for x, size in ((call.q, q_size), (call.k, kv_size), (call.v, kv_size)))
    query_block = functools.partial(_forward_query_block, plan, call, q, keys, _order(plan, block_mask))
    if plan.tiles is None:
        out, log_sums = lax.map(query_block, jnp.arange(block_mask.shape[0]))
    else:
        out, log_sums = jax.tree.map(lambda *blocks: jnp.stack(blocks), *map(query_block, range(len(plan.tiles))))
    log_sums = tuple(layout.joined_rows(x[..., None], length)[..., 0] for x in log_sums)
    return layout.joined_rows(out, length), log_sums


def _forward_query_block(plan: TilePlan, call: AttentionCall, q: Array, keys: list[Array], order: tuple, i) -> tuple:
    q_size, kv_size = call.block_sizes
    rows = Range(i * q_size, q_size)
    q_i = layout.rows_at(q, rows)
    leading, dtype = q_i.shape[:-2], _accumulator_type(q_i)
    state = _Softmax(
        running_max=jnp.full((*leading, q_size), -jnp.inf, dtype),
        denominator=jnp.zeros((*leading, q_size), dtype),
        accumulator=jnp.zeros((*leading, q_size, call.v.shape[-1]), dtype),
    )
    tile = functools.partial(_forward_tile, plan, call, q_i, keys, rows)
    state = _visit(plan, order, i, kv_size, tile, varying_like(q_i, state))
    if call.sinks is not None:
        state = _with_sinks(state, _sinks(plan, call)[..., None])
    denominator, log_sum = normalizer(state.denominator)
    out = state.accumulator / (denominator * (1 - call.dropout_rate))[..., None]
    return out.astype(q_i.dtype), (finite_shift(state.running_max), log_sum)


def _forward_tile(
    plan: TilePlan,
    call: AttentionCall,
    q_i: Array,
    keys: list[Array],
    rows: Range,
    kind: int,
    columns: Range,
    state: _Softmax,
) -> _Softmax:
    dtype, num_heads = _accumulator_type(q_i), q_i.shape[-3]
    k_j, v_j = (layout.per_query_head(layout.rows_at(x, columns), num_heads) for x in keys)
    raw = layout.product("qd,kd->qk", q_i, k_j, dtype)
    at = (rows, columns)
    logits, key_is_visible = masked_logits(plan, kind, *at, raw, _with_bias_tile(call, *at), queries=-2)
    if kind == PARTIAL:
        logits = lax.optimization_barrier(logits)  # otherwise XLA would recompute the mask for each use
        v_j = v_j if key_is_visible is None else jnp.where(key_is_visible[..., None], v_j, 0)
    running_max = jnp.maximum(state.running_max, logits.max(axis=-1))
    shift = finite_shift(running_max)
    p = jnp.exp(logits - shift[..., None])
    rescale = jnp.exp(state.running_max - shift)
    denominator = state.denominator * rescale + p.sum(axis=-1)
    if call.dropout_rate:
        p = jnp.where(dropout_keeps(plan, *at, logits, call, queries=-2), p, 0)
    accumulator = state.accumulator * rescale[..., None]
    accumulator = accumulator + layout.product("qk,kd->qd", p.astype(v_j.dtype), v_j, dtype)
    return _Softmax(running_max, denominator, accumulator)


def _with_sinks(state: _Softmax, sinks: Array) -> _Softmax:
    """Add one logit per head, without a value, to the softmax."""
    running_max = jnp.maximum(state.running_max, sinks)
    shift = finite_shift(running_max)
    rescale = jnp.exp(state.running_max - shift)
    return _Softmax(
        running_max,
        denominator=state.denominator * rescale + jnp.exp(sinks - shift),
        accumulator=state.accumulator * rescale[..., None],
    )


# Backward


class _Gradients(NamedTuple):
    """Running sums of the gradients: dk and dv of the current block of keys, dq and `learned` of all blocks so far."""

    dk: Array  # [..., H, keys, D]
    dv: Array
    dq: Array  # [..., H, D, Tq]
    learned: AttentionCall  # gradients of scale, bias and score mods; None for the rest of the call


@batched_explicitly
@functools.partial(jax.jit, static_argnums=0)
def backward(
    plan: TilePlan, call: AttentionCall, block_mask: Array, out: Array, log_sums: tuple, d_out: Array, d_lse: Array
) -> AttentionCall:
    """The gradients of the call's arrays; None for arrays without a gradient."""
    # On CPUs, jaxlib 0.10.2 would fuse a broadcast cotangent, as of `out.sum()`, with its products with v and with
    # sums over axes along which a bias or mod is shared, and the fused result would be wrong (JAX issue 39103).
    d_out = lax.optimization_barrier(d_out)
    shift, log_sum, delta = _log_sums_and_delta(call, out, log_sums, d_out, d_lse)
    arrays = d_out.astype(call.v.dtype), shift, log_sum, delta
    d_sinks = None if call.sinks is None else _d_sinks(plan, call, shift, log_sum, delta)
    if plan.together is None:
        return _backward(plan, block_mask, call, *arrays).replace(sinks=d_sinks)

    def part(call, *arrays):
        gradients = _backward(plan, block_mask, call, *arrays)
        return gradients.q, gradients.k, gradients.v, gradients.scale

    dq, dk, dv, d_scale = parts.in_parts(part, plan.together, call.replace(sinks=None), *arrays)
    nothing, _ = partition(call, jax.tree.map(lambda _: False, call))
    return nothing.replace(q=dq, k=dk, v=dv, scale=d_scale, sinks=d_sinks)


def _backward(
    plan: TilePlan, block_mask: Array, call: AttentionCall, d_out: Array, shift: Array, log_sum: Array, delta: Array
) -> AttentionCall:
    (q_size, kv_size), (q_length, kv_length) = call.block_sizes, call.lengths
    queries = [layout.by_head(x, q_size) for x in (call.q, d_out, shift, delta)]
    queries.append(layout.by_head(log_sum, q_size, fill=jnp.inf))  # e^(logit − shift − inf) is 0
    keys = [layout.by_head(x, kv_size) for x in (call.k, call.v)]
    plan, call = with_mapped(plan, call, _is_learned(call))
    learned, _ = partition(call, _is_learned(call))
    d_learned = jax.tree.map(lambda x: jnp.zeros(x.shape, _accumulator_type(x)), learned)
    dq = jnp.zeros_like(queries[0].mT, _accumulator_type(call.q))
    state = varying_like(call.q, (*map(jnp.zeros_like, keys), dq, d_learned))
    order = _order(plan, block_mask, by_column=True)
    key_block = functools.partial(_backward_key_block, plan, call, queries, keys, order)
    if plan.tiles is None:
        state = lax.fori_loop(0, block_mask.shape[1], key_block, state)
    else:
        for j in range(block_mask.shape[1]):
            state = key_block(j, state)
    dk, dv, dq, d_learned = state
    return jax.tree.map(lambda total, x: total.astype(x.dtype), d_learned, learned).replace(
        q=jnp.moveaxis(dq, -1, -3)[..., :q_length, :, :].astype(call.q.dtype),
        k=layout.exchanged(dk, -3)[..., :kv_length, :, :],
        v=layout.exchanged(dv, -3)[..., :kv_length, :, :],
        sinks=None,
    )


def _backward_key_block(
    plan: TilePlan, call: AttentionCall, queries: list[Array], keys: list[Array], order: tuple, j, totals: tuple
) -> tuple:
    dk, dv, dq, d_learned = totals
    num_heads, kv_heads = call.num_heads, call.k.shape[-2]
    q_size, kv_size = call.block_sizes
    columns = Range(j * kv_size, kv_size)
    k_j, v_j = (layout.per_query_head(layout.rows_at(x, columns), num_heads) for x in keys)
    keys_j = k_j, layout.exchanged(k_j, -2), v_j  # for products of rows by columns
    zeros = tuple(jnp.zeros(x.shape, _accumulator_type(call.q)) for x in (k_j, v_j))
    state = _Gradients(*varying_like(call.q, zeros), dq, d_learned)
    tile = functools.partial(_backward_tile, plan, call, queries, keys_j, columns)
    state = _visit(plan, order, j, q_size, tile, state)
    dk, dv = (
        lax.dynamic_update_slice_in_dim(
            total, layout.per_kv_head(x, kv_heads).astype(total.dtype), columns.start, axis=-2
        )
        for total, x in ((dk, state.dk), (dv, state.dv))
    )
    return dk, dv, state.dq, state.learned


def _backward_tile(
    plan: TilePlan,
    call: AttentionCall,
    queries: list[Array],
    keys_j: tuple,
    columns: Range,
    kind: int,
    rows: Range,
    state: _Gradients,
) -> _Gradients:
    k_j, k_columns, v_j = keys_j
    q_i, d_out_i, *numbers = (layout.rows_at(x, rows) for x in queries)
    shift_i, delta_i, log_sum_i = (x.mT for x in numbers)
    dtype, at = _accumulator_type(q_i), (rows, columns)
    call = _with_bias_tile(call, *at)
    learned, others = partition(call, _is_learned(call))

    def logits_of(raw, learned):
        return masked_logits(plan, kind, *at, raw, combine(learned, others), queries=-1)

    raw = layout.product("kd,qd->kq", k_j, q_i, dtype)
    logits, pull_back, key_is_visible = jax.vjp(logits_of, raw, learned, has_aux=True)
    p = jnp.exp(logits - shift_i - log_sum_i)  # not logits − lse: see `logsumexp`
    kept_p, dp = p, layout.product("kd,qd->kq", v_j, d_out_i, dtype)
    if call.dropout_rate:
        keeps = dropout_keeps(plan, *at, logits, call, queries=-1)
        kept_p, dp = (jnp.where(keeps, x / (1 - call.dropout_rate), 0) for x in (p, dp))
    d_raw, d_tile = pull_back(p * (dp - delta_i))
    d_raw = d_raw.astype(q_i.dtype)
    k_columns = k_columns if key_is_visible is None else jnp.where(key_is_visible[..., None, :], k_columns, 0)
    dq_i = lax.dynamic_slice_in_dim(state.dq, rows.start, rows.size, axis=-1)
    dq_i = dq_i + layout.product("dk,kq->dq", k_columns, d_raw, dtype)
    d_bias = layout.add_bias_tile(state.learned.bias, d_tile.bias, *at)
    d_learned = jax.tree.map(jnp.add, state.learned.replace(bias=None), d_tile.replace(bias=None))
    return _Gradients(
        dk=state.dk + layout.product("kq,qd->kd", d_raw, q_i, dtype),
        dv=state.dv + layout.product("kq,qd->kd", kept_p.astype(v_j.dtype), d_out_i, dtype),
        dq=lax.dynamic_update_slice_in_dim(state.dq, dq_i, rows.start, axis=-1),
        learned=d_learned.replace(bias=d_bias),
    )


def _is_learned(call: AttentionCall) -> AttentionCall:
    """For each array of the call, whether it is floating and belongs to scale, bias or score mods."""
    is_floating = functools.partial(jax.tree.map, lambda x: jnp.issubdtype(x.dtype, jnp.inexact))
    nothing = jax.tree.map(lambda _: False, call)
    return nothing.replace(**{name: is_floating(getattr(call, name)) for name in ("scale", "bias", "score_mods")})


def _log_sums_and_delta(call: AttentionCall, out, log_sums, d_out, d_lse) -> tuple[Array, Array, Array]:
    """Return max, log_sum and δ `[..., Tq, H, 1]`; fully masked rows get log_sum +inf and δ 0, so no gradient."""
    (shift, log_sum), dtype = log_sums, _accumulator_type(call.q)
    is_visible = ~jnp.isneginf(log_sum)
    # A matrix product with ones, because XLA's CPU backend takes ten times as long to sum along the last axis.
    products, ones = out.astype(dtype) * d_out.astype(dtype), jnp.ones(call.v.shape[-1], dtype)
    delta = jnp.matmul(products, ones, precision=lax.Precision.HIGHEST) - d_lse
    delta, log_sum = jnp.where(is_visible, delta, 0), jnp.where(is_visible, log_sum, jnp.inf)
    return shift[..., None], log_sum[..., None], delta[..., None]


def _d_sinks(plan: TilePlan, call: AttentionCall, shift: Array, log_sum: Array, delta: Array) -> Array:
    p = jnp.exp(_sinks(plan, call)[..., None, :, None] - shift - log_sum)
    d_sinks = -(p * delta)[..., 0]
    is_mapped = plan.mapped is not None
    return d_sinks.sum(axis=tuple(range(int(is_mapped), d_sinks.ndim - 1))).astype(call.sinks.dtype)
