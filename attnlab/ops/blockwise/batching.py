"""Rules for `vmap` and `shard_map`."""

import functools

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from attnlab.ops.blockwise.operands import Operands, Plan, SplitTerms, combine, partition
from attnlab.ops.reverse_mode import once
from attnlab.ops.schedule import EMPTY, FULL, block_mask_of


def batched_explicitly(run_pass):
    """`run_pass(plan, operands)` with a `vmap` rule that maps arrays, not loops: EMPTY tiles stay skipped."""

    def run_batched(plan, operands):
        @custom_vmap
        def unmapped(operands):
            return run_pass(plan, operands)

        @unmapped.def_vmap
        def mapped(axis_size, is_batched, operands):
            (is_batched,) = is_batched if isinstance(is_batched, list) else (is_batched,)
            results = run(*_with_mapped_axis(plan, operands, is_batched, axis_size))
            if plan.is_mapped:
                results = jax.tree.map(lambda x: x.reshape(axis_size, -1, *x.shape[1:]), results)
            return results, jax.tree.map(lambda _: True, results)

        return unmapped(operands)

    run = once(run_batched, "blockwise")
    return run


def _with_mapped_axis(plan: Plan, operands: Operands, is_batched: Operands, size: int) -> tuple[Plan, Operands]:
    """Plan and operands with one more mapped axis, merged into an existing mapped axis."""
    old_size = operands.q.shape[int(is_batched.q)] if plan.is_mapped else 1

    def merged(x, batched, was_mapped=plan.is_mapped):
        x = x if batched else x[None]
        x = x if was_mapped else x[:, None]
        return jnp.broadcast_to(x, (size, old_size, *x.shape[2:])).reshape(size * old_size, *x.shape[2:])

    block_mask = operands.block_mask
    if is_batched.block_mask:
        block_mask = block_mask_of(block_mask > EMPTY, block_mask == FULL)
    newly_mapped, shared = partition(operands.terms.shared, is_batched.terms.shared)
    newly_mapped = jax.tree.map(lambda x: merged(x, batched=True, was_mapped=False), newly_mapped)
    still_mapped = jax.tree.map(
        functools.partial(merged, was_mapped=True), operands.terms.mapped, is_batched.terms.mapped
    )
    others = {
        name: jax.tree.map(merged, getattr(operands, name), getattr(is_batched, name))
        for name in ("q", "k", "v", "sinks", "out", "log_sums", "d_out", "d_lse")
    }
    terms = SplitTerms(shared, combine(still_mapped, newly_mapped))
    return plan._replace(is_mapped=True), Operands(block_mask=block_mask, terms=terms, **others)
