"""The forward and the backward pass, a block of queries or of keys at a time."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from attnlab.ops.blockwise import layout
from attnlab.ops.blockwise.batching import batched_explicitly
from attnlab.ops.blockwise.operands import Operands, Plan, SplitTerms, Terms, combine, partition
from attnlab.ops.blockwise.scores import dropout_keeps, masked_logits
from attnlab.ops.logsumexp import finite_shift, normalizer
from attnlab.ops.meshes import varying_like
from attnlab.ops.schedule import FULL, PARTIAL, VisitOrder, visit_order
from attnlab.types import Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(plan: Plan, operands: Operands) -> tuple[Array, tuple[Array, Array]]:
    """(out, (max, log_sum)), with gradients of q, k, v, sinks, scale, bias and score mods; the max has no gradient."""
    return forward(plan, operands)


def _attention_forward(plan, operands):
    out, log_sums = checkpoint_name(forward(plan, operands), "attention")  # see GPT's remat
    return (out, log_sums), operands._replace(out=out, log_sums=log_sums)


def _attention_backward(plan, operands, cotangents):
    d_out, (_, d_lse) = cotangents
    dq, dk, dv, d_sinks, d_terms = backward(plan, operands._replace(d_out=d_out, d_lse=d_lse))
    no_terms = jax.tree.map(lambda _: None, operands.terms.mapped)
    return (Operands(dq, dk, dv, d_sinks, None, SplitTerms(d_terms, no_terms)),)


attention.defvjp(_attention_forward, _attention_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def part_of(plan: Plan, operands: Operands) -> tuple[Array, tuple[Array, Array]]:
    """The results in `operands`, of a softmax over more keys, with the gradients of these keys."""
    return operands.out, operands.log_sums


part_of.defvjp(lambda plan, operands: (part_of(plan, operands), operands), _attention_backward)


def _visit(plan: Plan, order: VisitOrder, row, tile: Callable, state):
    """`state` after tile(kind, column, state) for each tile of the row that is not EMPTY."""
    columns, num_full, num_visible = (x[row] for x in order)
    for kind, start, stop in ((FULL, 0, num_full), (PARTIAL, num_full, num_visible)):
        if kind in plan.tile_kinds:
            state = lax.fori_loop(start, stop, lambda t, state, kind=kind: tile(kind, columns[t], state), state)
    return state


def _tile_terms(plan: Plan, terms: SplitTerms, i, j) -> SplitTerms:
    return SplitTerms(*(x._replace(bias=layout.bias_tile(x.bias, plan.block_sizes, i, j)) for x in terms))


def _sinks(plan: Plan, q: Array, sinks: Array) -> Array:
    """Sinks `[H]`, or `[axis, H]` under `vmap`, as `[..., H]` in the accumulators' type."""
    sinks = sinks.astype(_accumulator_type(q))
    between = q.ndim - 3 - int(plan.is_mapped)
    return sinks.reshape(*sinks.shape[:-1], *(1,) * between, sinks.shape[-1])


def _accumulator_type(x: Array):
    return jnp.promote_types(x.dtype, jnp.float32)


# Forward


class _ForwardBlocks(NamedTuple):
    q: Array  # [..., nQ, size, H, D]
    k: Array  # [..., nK, size, Hk, D]
    v: Array
    sinks: Array | None  # [..., H]
    terms: SplitTerms


class _Softmax(NamedTuple):
    """The running softmax of a block of queries, over the keys visited so far."""

    running_max: Array  # [..., H, queries]
    denominator: Array  # [..., H, queries]
    accumulator: Array  # [..., H, Dv, queries]


@batched_explicitly
@functools.partial(jax.jit, static_argnums=0)
def forward(plan: Plan, operands: Operands) -> tuple[Array, tuple[Array, Array]]:
    """(out, (max, log_sum))."""
    (q_size, kv_size), (q_length, _) = plan.block_sizes, plan.lengths
    q, k, v, sinks = operands.q, operands.k, operands.v, operands.sinks
    blocks = _ForwardBlocks(
        q=layout.blocked(q, q_size),
        k=layout.blocked(k, kv_size),
        v=layout.blocked(v, kv_size),
        sinks=None if sinks is None else _sinks(plan, q, sinks),
        terms=operands.terms,
    )
    order = visit_order(operands.block_mask)
    query_block = functools.partial(_forward_query_block, plan, blocks, order)
    out, log_sums = lax.map(query_block, jnp.arange(operands.block_mask.shape[0]))
    log_sums = tuple(layout.joined_transposed(x, q_length)[..., 0] for x in log_sums)
    return layout.joined_transposed(out, q_length), log_sums


def _forward_query_block(plan: Plan, blocks: _ForwardBlocks, order: VisitOrder, i) -> tuple[Array, tuple[Array, Array]]:
    q_i = layout.block_at(blocks.q, i)
    (*leading, q_size), dtype = q_i.shape[:-1], _accumulator_type(q_i)
    state = _Softmax(
        running_max=jnp.full((*leading, q_size), -jnp.inf, dtype),
        denominator=jnp.zeros((*leading, q_size), dtype),
        accumulator=jnp.zeros((*leading, blocks.v.shape[-1], q_size), dtype),
    )
    tile = functools.partial(_forward_tile, plan, blocks, q_i, i)
    state = _visit(plan, order, i, tile, varying_like(q_i, state))
    if blocks.sinks is not None:
        state = _with_sinks(state, blocks.sinks[..., None])
    denominator, log_sum = normalizer(state.denominator)
    out = state.accumulator / (denominator * (1 - plan.dropout_rate))[..., None, :]
    return out.astype(q_i.dtype), (finite_shift(state.running_max)[..., None, :], log_sum[..., None, :])


def _forward_tile(plan: Plan, blocks: _ForwardBlocks, q_i: Array, i, kind: int, j, state: _Softmax) -> _Softmax:
    dtype, num_heads = _accumulator_type(q_i), q_i.shape[-3]
    k_j, v_j = (layout.per_query_head(layout.block_at(x, j), num_heads) for x in (blocks.k, blocks.v))
    raw = layout.product("kd,qd->kq", k_j, q_i, dtype)
    logits, key_is_visible = masked_logits(plan, kind, i, j, raw, _tile_terms(plan, blocks.terms, i, j))
    if kind == PARTIAL:
        logits = lax.optimization_barrier(logits)  # or XLA would compute the mask again for each use
        v_j = jnp.where(key_is_visible[..., None], v_j, 0)
    running_max = jnp.maximum(state.running_max, logits.max(axis=-2))
    shift = finite_shift(running_max)
    p = jnp.exp(logits - shift[..., None, :])
    rescale = jnp.exp(state.running_max - shift)
    denominator = state.denominator * rescale + p.sum(axis=-2)
    if plan.dropout_rate:
        p = jnp.where(dropout_keeps(plan, i, j, logits.shape, blocks.terms), p, 0)
    accumulator = state.accumulator * rescale[..., None, :]
    accumulator = accumulator + layout.product("kd,kq->dq", v_j, p.astype(v_j.dtype), dtype)
    return _Softmax(running_max, denominator, accumulator)


def _with_sinks(state: _Softmax, sinks: Array) -> _Softmax:
    """The softmax with one more logit per head, which has no value."""
    running_max = jnp.maximum(state.running_max, sinks)
    shift = finite_shift(running_max)
    rescale = jnp.exp(state.running_max - shift)
    return _Softmax(
        running_max,
        denominator=state.denominator * rescale + jnp.exp(sinks - shift),
        accumulator=state.accumulator * rescale[..., None, :],
    )


# Backward


class _BackwardBlocks(NamedTuple):
    q: Array  # [..., nQ, size, H, D]
    k: Array  # [..., nK, size, Hk, D]
    v: Array
    d_out: Array
    shift: Array  # [..., nQ, size, H, 1], the max
    log_sum: Array  # +inf for fully masked rows and padding, so that e^(logit − shift − log_sum) is 0
    delta: Array  # [..., nQ, size, H, 1]
    terms: SplitTerms  # without the leaves in `learned`
    learned: Terms  # the leaves of scale and score mods that have gradients


class _KeyBlock(NamedTuple):
    """A block of keys, repeated for each query head."""

    index: Array
    k: Array  # [..., H, keys, D]
    v: Array


class _Gradients(NamedTuple):
    """Gradients summed over the tiles of a block of keys; dk and dv belong to this block alone."""

    dk: Array  # [..., H, keys, D]
    dv: Array
    dq: Array  # [nQ, ..., H, D, queries]
    d_learned: Terms


@batched_explicitly
@functools.partial(jax.jit, static_argnums=0)
def backward(plan: Plan, operands: Operands) -> tuple:
    """Gradients of q, k, v, sinks and the terms, None for terms that have none."""
    q, k, v, dtype = operands.q, operands.k, operands.v, _accumulator_type(operands.q)
    (q_size, kv_size), (q_length, kv_length) = plan.block_sizes, plan.lengths
    shift, log_sum, delta = _log_sums_and_delta(operands)
    learned, terms = _learned_and_others(plan, operands.terms, q.shape[0])
    blocks = _BackwardBlocks(
        q=layout.blocked(q, q_size),
        k=layout.blocked(k, kv_size),
        v=layout.blocked(v, kv_size),
        d_out=layout.blocked(operands.d_out.astype(v.dtype), q_size),
        shift=layout.blocked(shift, q_size),
        log_sum=layout.blocked(log_sum, q_size, fill=jnp.inf),
        delta=layout.blocked(delta, q_size),
        terms=terms,
        learned=learned,
    )
    order = visit_order(operands.block_mask.T)
    bias = terms.shared.bias if terms.mapped.bias is None else terms.mapped.bias
    d_learned = jax.tree.map(lambda x: jnp.zeros(x.shape, _accumulator_type(x)), learned)
    if bias is not None:
        d_learned = d_learned._replace(bias=jnp.zeros_like(_own_bias(plan, terms, q.shape[0]), dtype))
    num_q_blocks, num_kv_blocks = operands.block_mask.shape
    dq = jnp.zeros((num_q_blocks, *q.shape[:-3], q.shape[-2], q.shape[-1], q_size), dtype)
    state = varying_like(q, (jnp.zeros_like(blocks.k), jnp.zeros_like(blocks.v), dq, d_learned))
    key_block = functools.partial(_backward_key_block, plan, blocks, order)
    dk, dv, dq, d_learned = lax.fori_loop(0, num_kv_blocks, key_block, state)
    d_terms = jax.tree.map(lambda total, x: total.astype(x.dtype), d_learned, learned._replace(bias=bias))
    return (
        layout.joined_transposed(dq, q_length).astype(q.dtype),
        layout.joined(dk, kv_length),
        layout.joined(dv, kv_length),
        None if operands.sinks is None else _d_sinks(plan, q, operands.sinks, shift, log_sum, delta),
        d_terms,
    )


def _backward_key_block(plan: Plan, blocks: _BackwardBlocks, order: VisitOrder, j, totals: tuple) -> tuple:
    dk, dv, dq, d_learned = totals
    num_heads, kv_heads = blocks.q.shape[-2], blocks.k.shape[-2]
    keys = _KeyBlock(j, *(layout.per_query_head(layout.block_at(x, j), num_heads) for x in (blocks.k, blocks.v)))
    zeros = (jnp.zeros(x.shape, _accumulator_type(blocks.q)) for x in (keys.k, keys.v))
    state = _Gradients(*varying_like(blocks.q, tuple(zeros)), dq, d_learned)
    state = _visit(plan, order, j, functools.partial(_backward_tile, plan, blocks, keys), state)
    dk, dv = (
        layout.with_block(total, j, layout.per_kv_head(x, kv_heads)) for total, x in ((dk, state.dk), (dv, state.dv))
    )
    return dk, dv, state.dq, state.d_learned


def _backward_tile(plan: Plan, blocks: _BackwardBlocks, keys: _KeyBlock, kind: int, i, state: _Gradients) -> _Gradients:
    q_i, d_out_i = layout.block_at(blocks.q, i), layout.block_at(blocks.d_out, i)
    of_rows = (blocks.shift, blocks.log_sum, blocks.delta)
    shift_i, log_sum_i, delta_i = (layout.block_at(x, i).swapaxes(-1, -2) for x in of_rows)
    v_dtype, dtype, j = keys.v.dtype, _accumulator_type(q_i), keys.index
    terms = _tile_terms(plan, blocks.terms, i, j)
    learned = blocks.learned._replace(bias=_own_bias(plan, terms, q_i.shape[0]))
    terms = SplitTerms(*(x._replace(bias=None) for x in terms))

    def logits_of(raw, learned):
        return masked_logits(plan, kind, i, j, raw, terms._replace(mapped=combine(terms.mapped, learned)))

    raw = layout.product("kd,qd->kq", keys.k, q_i, dtype)
    logits, pull_back, key_is_visible = jax.vjp(logits_of, raw, learned, has_aux=True)
    p = jnp.exp(logits - shift_i - log_sum_i)  # not their sum: see `logsumexp`
    kept_p, dp = p, layout.product("kd,qd->kq", keys.v, d_out_i, dtype)
    if plan.dropout_rate:
        keeps = dropout_keeps(plan, i, j, logits.shape, terms)
        kept_p, dp = (jnp.where(keeps, x / (1 - plan.dropout_rate), 0) for x in (p, dp))
    d_raw, d_tile = pull_back(p * (dp - delta_i))
    d_raw = d_raw.astype(q_i.dtype)
    visible_k = jnp.where(key_is_visible[..., None], keys.k, 0) if kind == PARTIAL else keys.k
    dq_i = state.dq[i] + layout.product("kd,kq->dq", visible_k, d_raw, dtype)
    d_bias = layout.add_bias_tile(state.d_learned.bias, d_tile.bias, plan.block_sizes, i, j)
    d_learned = jax.tree.map(jnp.add, state.d_learned._replace(bias=None), d_tile._replace(bias=None))
    return _Gradients(
        dk=state.dk + layout.product("kq,qd->kd", d_raw, q_i, dtype),
        dv=state.dv + layout.product("kq,qd->kd", kept_p.astype(v_dtype), d_out_i, dtype),
        dq=lax.dynamic_update_index_in_dim(state.dq, dq_i, i, axis=0),
        d_learned=d_learned._replace(bias=d_bias),
    )


def _log_sums_and_delta(operands: Operands) -> tuple[Array, Array, Array]:
    """max, log_sum and δ, `[..., Tq, H, 1]`; log_sum +inf and δ 0 for fully masked rows: nothing flows into them."""
    (shift, log_sum), dtype = operands.log_sums, _accumulator_type(operands.q)
    is_visible = ~jnp.isneginf(log_sum)
    # A product with ones, because XLA's CPU backend takes ten times as long to sum along the last axis.
    products, ones = operands.out.astype(dtype) * operands.d_out.astype(dtype), jnp.ones(operands.v.shape[-1], dtype)
    delta = jnp.matmul(products, ones, precision=lax.Precision.HIGHEST) - operands.d_lse
    delta, log_sum = jnp.where(is_visible, delta, 0), jnp.where(is_visible, log_sum, jnp.inf)
    return shift[..., None], log_sum[..., None], delta[..., None]


def _d_sinks(plan: Plan, q: Array, sinks: Array, shift: Array, log_sum: Array, delta: Array) -> Array:
    p = jnp.exp(_sinks(plan, q, sinks)[..., None, :, None] - shift - log_sum)
    d_sinks = -(p * delta)[..., 0]
    return d_sinks.sum(axis=tuple(range(int(plan.is_mapped), d_sinks.ndim - 1))).astype(sinks.dtype)


# Each example of a `vmap` has its gradients, though it may share the value: shared leaves are broadcast.


def _learned_and_others(plan: Plan, terms: SplitTerms, axis_size: int) -> tuple[Terms, SplitTerms]:
    """The floating leaves of scale and score mods, and all other leaves."""
    (shared, other_shared), (mapped, other_mapped) = (partition(x, _is_learned(x)) for x in terms)
    if plan.is_mapped:
        shared = jax.tree.map(lambda x: jnp.broadcast_to(x, (axis_size, *x.shape)), shared)
    return combine(shared, mapped), SplitTerms(other_shared, other_mapped)


def _is_learned(terms: Terms) -> Terms:
    """For each leaf, whether it is floating and of scale or score mods; the bias is sliced tile by tile."""
    is_floating = functools.partial(jax.tree.map, lambda x: jnp.issubdtype(x.dtype, jnp.inexact))
    nothing = jax.tree.map(lambda _: False, terms)
    return nothing._replace(scale=is_floating(terms.scale), score_mods=is_floating(terms.score_mods))


def _own_bias(plan: Plan, terms: SplitTerms, axis_size: int) -> Array | None:
    """The bias, broadcast along the mapped axis if its examples share it."""
    bias = terms.shared.bias
    if bias is None:
        return terms.mapped.bias
    return jnp.broadcast_to(bias, (axis_size, *bias.shape)) if plan.is_mapped else bias
