"""The derivative and `vmap` rules of the kernels, for arrays with one batch axis, `[B, T, H, D]`."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap

from attnlab.ops.mosaic import kernels
from attnlab.ops.mosaic.kernels import KernelPlan
from attnlab.ops.mosaic.programs import LOG2E
from attnlab.types import Array


def _mapped(plan: KernelPlan, run: Callable, batched: tuple, others: tuple):
    """Call run(plan, *batched, *others) with a `vmap` rule that merges the mapped axis into the batch.

    Args:
      batched, others: arrays whose first axis is the batch; in `others` its size may be 1.
    """

    @custom_vmap
    def unmapped(batched, others):
        return run(plan, *batched, *others)

    @unmapped.def_vmap
    def mapped(size, is_batched, batched, others):
        batch = batched[0].shape[int(is_batched[0][0])]

        def joined(x, is_mapped, is_whole):
            if not is_mapped and x.shape[0] == 1 and not is_whole:
                return x
            x = x if is_mapped else x[None]
            return jnp.broadcast_to(x, (size, batch, *x.shape[2:])).reshape(size * batch, *x.shape[2:])

        whole = functools.partial(jax.tree.map, functools.partial(joined, is_whole=True))
        shared = functools.partial(jax.tree.map, functools.partial(joined, is_whole=False))
        results = _mapped(plan, run, whole(batched, is_batched[0]), shared(others, is_batched[1]))
        results = jax.tree.map(lambda x: x.reshape(size, batch, *x.shape[1:]), results)
        return results, jax.tree.map(lambda _: True, results)

    return unmapped(batched, others)


def _refuse(*_):
    raise ValueError("impl = 'mosaic' has no derivatives of second order: use impl='dense'")


# This rule exists only for its message: JAX's own error would not name an alternative.
_once = jax.custom_jvp(_mapped, nondiff_argnums=(0, 1))
_once.defjvp(_refuse)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(plan: KernelPlan, q, k, v, sinks, learned: list[Array], fixed: list[Array], lists: tuple):
    """Return (out `[B, T, H, D]`, (max, log_sum) `[B, T, H]`).

    Args:
      sinks: `[B or 1, H]`; zeros if the plan has none.
      learned, fixed: the programs' operands that have gradients; all operands, some replaced by `learned`.
      lists: the tiles that each block of queries visits, and that each block of keys visits; see `kernels`.
    """
    out, log_sums, _ = _run(plan, q, k, v, sinks, learned, fixed, lists)
    return out, log_sums


def _run(plan, q, k, v, sinks, learned, fixed, lists):
    others = (sinks, lists[0], _operands(plan, learned, fixed))
    out, m, total = _once(plan, kernels.forward, (q, k, v), others)
    is_visible = total > 0
    log_sum = jnp.where(is_visible, jnp.log(jnp.where(is_visible, total, 1)), -jnp.inf)
    maximum = jnp.where(is_visible, m / plan.per_logit, 0)
    return out, (maximum.swapaxes(1, 2), log_sum.swapaxes(1, 2)), (m, total)


def _operands(plan: KernelPlan, learned, fixed) -> list[Array]:
    operands, first = list(fixed), len(plan.mask.operands) if plan.mask else 0
    for n, x in zip(plan.learned, learned):
        operands[first + n] = x
    return operands


def _attention_forward(plan, q, k, v, sinks, learned, fixed, lists):
    out, log_sums, sums = _run(plan, q, k, v, sinks, learned, fixed, lists)
    out, log_sums, sums = checkpoint_name((out, log_sums, sums), "attention")  # see GPT's remat
    return (out, log_sums), (q, k, v, sinks, learned, fixed, lists, out, sums)


def _attention_backward(plan, residuals, cotangents):
    q, k, v, sinks, learned, fixed, lists, out, (m, total) = residuals
    d_out, (_, d_log_sum) = cotangents
    m, inverse = _normalized(m, total, plan.per_logit)
    d_out, d_log_sum = d_out.astype(jnp.float32), d_log_sum.swapaxes(1, 2)
    delta = (d_out * out.astype(jnp.float32)).sum(-1).swapaxes(1, 2)
    delta = (delta - jnp.where(total > 0, d_log_sum, 0)) * inverse
    d_out = (d_out * inverse.swapaxes(1, 2)[..., None]).astype(q.dtype)
    operands, batched = _operands(plan, learned, fixed), (q, k, v, d_out, m, delta)
    dq, sums_q = _once(plan, kernels.backward_queries, batched, (lists[0], operands))
    dk, dv, sums_k = _once(plan, kernels.backward_keys, batched, (lists[1], operands))
    sums = dict(zip(plan.learned_of(keys=False), sums_q)) | dict(zip(plan.learned_of(keys=True), sums_k))
    d_learned = [_like(sums[n], x) for n, x in zip(plan.learned, learned)]
    d_sinks = jnp.zeros_like(sinks)
    if plan.has_sinks:
        d_sinks = _like(-plan.shrink(sinks[..., None] * plan.per_logit, m) * delta, sinks)
    return dq, dk, dv, d_sinks, d_learned, None, None


def _normalized(m: Array, total: Array, per_logit: float) -> tuple[Array, Array]:
    """Return (m', c), from max and sum, such that p = c·e^(s − m'); c scales the rows of d_out and δ, not each p.

    c is 1 unless a row's max is so large that float32 would lose log Σ beside it. Fully masked rows: c = 0, m' = +∞.
    """
    is_visible, is_moderate = total > 0, abs(m) < 2**13  # where float32 resolves 2⁻¹¹ of an exponent
    total = jnp.where(is_visible, total, 1)
    c = jnp.where(is_visible, jnp.where(is_moderate, 1, 1 / total), 0)
    return jnp.where(is_visible, jnp.where(is_moderate, m + jnp.log2(total) * (per_logit / LOG2E), m), jnp.inf), c


def _like(x: Array, operand: Array) -> Array:
    """Sum `[B, H, T]` over the axes that the operand lacks or has with size 1."""
    x = x if operand.ndim == 3 else x.sum(-1)
    return x.sum([n for n in (0, 1) if operand.shape[n] == 1], keepdims=True)


attention.defvjp(_attention_forward, _attention_backward)
