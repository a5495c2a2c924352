"""Derivatives of the kernels, and their rule for `vmap`."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap

from attnlab.ops.experimental.pallas import calls
from attnlab.ops.experimental.pallas.kernel_types import Cotangents, Operands, Others, Plan
from attnlab.ops.meshes import equally_varying
from attnlab.ops.reverse_mode import once
from attnlab.types import Array

# Number of axes of an input after the head axis.
_SIDES = {"q_index": 0, "kv_index": 0, "scalar": 0, "query": 1, "key": 1, "distance": 1, "pair": 2, "tile": 3}


def attention(plan: Plan, q: Array, k: Array, v: Array, others: Others, given=None):
    """(out, (max, log_sum)); or `given`, such results over more keys, with the gradients of these keys."""
    batch = q.shape[:-3]
    q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in (q, k, v))
    operands = Operands(q, k, v, _with_one_batch_axis(plan, others, batch))
    operands = equally_varying(jax.tree.map(jnp.asarray, operands))
    if given is None:
        out, log_sums = _attention(plan, operands)
    else:
        out, log_sums = given
        log_sums = tuple(x.reshape(-1, *x.shape[-2:]).swapaxes(1, 2) for x in log_sums)
        out, log_sums = _part_of(plan, operands, out.reshape(-1, *out.shape[-3:]), log_sums)
    log_sums = tuple(x.swapaxes(1, 2).reshape(*batch, *out.shape[1:3]) for x in log_sums)
    return out.reshape(*batch, *out.shape[1:]), log_sums


def _with_one_batch_axis(plan: Plan, others: Others, batch: tuple[int, ...]) -> Others:
    def flat(x, sides):
        """`[*batch or 1s, H or 1, *sides]` as `[B or 1, H or 1, *sides]`."""
        if x is None:
            return None
        cut = x.ndim - sides - 1
        if math.prod(x.shape[:cut]) not in (1, math.prod(batch)):
            x = jnp.broadcast_to(x, (*batch, *x.shape[cut:]))
        return x.reshape(-1, *x.shape[cut:])

    terms = (
        tuple(flat(x, _SIDES[one.varies]) for one, x in zip(program.inputs if program else (), arrays))
        for program, arrays in zip(plan.programs, others.terms)
    )
    visits = (x._replace(words=flat(x.words, 1), counts=flat(x.counts, 0)) for x in others[2:4])
    terms = type(others.terms)(*terms)
    return Others(flat(others.sinks, 0), terms, *visits, flat(others.of_pairs, 1), flat(others.drawn, 2))


# q, k, v and out are `[B, T, H, D]` here and `[B, H, T, D]` for the kernels, where a TPU pads D to a multiple of 128.
# They are transposed inside the rule for gradients, so that its residuals are not padded.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(plan: Plan, operands: Operands) -> tuple[Array, tuple[Array, Array]]:
    return _attention_forward(plan, operands)[0]


def _attention_forward(plan, operands):
    out, log_sums = _forward(plan, _by_head(operands))
    out, log_sums = checkpoint_name((out.swapaxes(1, 2), log_sums), "attention")  # see GPT's remat
    return (out, tuple(x / plan.unit for x in log_sums)), (operands, out, log_sums)


def _attention_backward(plan, saved, cotangents):
    """The max is treated as a constant, so log_sum and the lse have the same gradient."""
    (operands, out, (shift, log_sum)), (d_out, (_, d_lse)) = saved, cotangents
    is_visible = ~jnp.isneginf(log_sum)
    products = out.astype(jnp.float32) * d_out.astype(jnp.float32)
    delta = jnp.where(is_visible, products.sum(axis=-1).swapaxes(1, 2) - d_lse, 0)
    d_out = d_out.astype(operands.v.dtype).swapaxes(1, 2)
    given = Cotangents(d_out, shift, jnp.where(is_visible, log_sum, jnp.inf), delta)
    *gradients, d_logits = _backward(plan, _by_head(operands), given)
    sinks, d_sinks = operands.others.sinks, None
    if sinks is not None:
        p = jnp.exp((sinks[..., None] * plan.unit - given.shift - given.log_sum) / plan.unit)
        d_sinks = -(p * delta).sum(axis=(0, -1))[None]
    nothing = jax.tree.map(lambda _: None, operands.others)
    others = nothing._replace(sinks=d_sinks, terms=nothing.terms._replace(logits=d_logits))
    return (Operands(*(x.swapaxes(1, 2) for x in gradients), others),)


def _by_head(operands: Operands) -> Operands:
    return Operands(*(x.swapaxes(1, 2) for x in operands[:3]), operands.others)


_attention.defvjp(_attention_forward, _attention_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _part_of(plan: Plan, operands: Operands, out: Array, log_sums: tuple[Array, Array]):
    return out, log_sums


def _part_of_forward(plan, operands, out, log_sums):
    return (out, log_sums), (operands, out, tuple(x * plan.unit for x in log_sums))


def _part_of_backward(plan, saved, cotangents):
    return (*_attention_backward(plan, saved, cotangents), None, None)


_part_of.defvjp(_part_of_forward, _part_of_backward)


def _merged(x: Array, is_batched: bool, size: int, batch: int, is_shareable: bool) -> Array:
    """An array with the mapped axis merged into the examples: `[size·batch, …]`, or `[1, …]` if it is shared."""
    own = x.shape[int(is_batched)]
    if is_shareable and not is_batched and own == 1:
        return x
    x = x if is_batched else x[None]
    return jnp.broadcast_to(x, (size, batch, *x.shape[2:])).reshape(size * batch, *x.shape[2:])


_once = functools.partial(once, impl="pallas")

# `vmap` merges the mapped axis with the batch axis, so that nothing is added to the kernels' grids. Arrays that all
# examples share stay shared, but for the inputs of logits in the backward pass: each mapped example has gradients of
# its own.


@_once
def _forward(plan: Plan, operands: Operands) -> tuple[Array, tuple[Array, Array]]:
    @custom_vmap
    def unmapped(operands):
        return calls.forward(plan, operands)

    @unmapped.def_vmap
    def mapped(size, is_batched, operands):
        (is_batched,) = is_batched if isinstance(is_batched, list) else (is_batched,)
        results = _forward(plan, _merged_operands(operands, is_batched, size))
        results = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), results)
        return results, jax.tree.map(lambda _: True, results)

    return unmapped(operands)


@_once
def _backward(plan: Plan, operands: Operands, cotangents: Cotangents) -> tuple[Array, Array, Array, tuple]:
    @custom_vmap
    def unmapped(operands, cotangents):
        return calls.backward(plan, operands, cotangents)

    @unmapped.def_vmap
    def mapped(size, is_batched, operands, cotangents):
        batch = operands.q.shape[int(is_batched[0].q)]
        merge = functools.partial(_merged, size=size, batch=batch, is_shareable=False)
        merged = _merged_operands(operands, is_batched[0], size)
        logits = jax.tree.map(merge, operands.others.terms.logits, is_batched[0].others.terms.logits)
        merged = merged._replace(others=merged.others._replace(terms=merged.others.terms._replace(logits=logits)))
        results = _backward(plan, merged, jax.tree.map(merge, cotangents, is_batched[1]))
        *gradients, d_logits = jax.tree.map(lambda x: x.reshape(size, batch, *x.shape[1:]), results)
        d_logits = tuple(
            d.sum(axis=1, keepdims=True) if d is not None and x.shape[int(batched)] < batch else d
            for d, x, batched in zip(d_logits, operands.others.terms.logits, is_batched[0].others.terms.logits)
        )
        results = (*gradients, d_logits)
        return results, jax.tree.map(lambda _: True, results)

    return unmapped(operands, cotangents)


def _merged_operands(operands: Operands, is_batched: Operands, size: int) -> Operands:
    batch = operands.q.shape[int(is_batched.q)]
    *qkv, others = (
        jax.tree.map(functools.partial(_merged, size=size, batch=batch, is_shareable=shareable), x, batched)
        for x, batched, shareable in zip(operands, is_batched, (False, False, False, True))
    )
    return Operands(*qkv, others)
