"""The `vmap` rule of the passes: q, k, v and all arrays that differ between examples get a leading mapped axis."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from attnlab.ops.blockwise.plans import TilePlan
from attnlab.ops.call import AttentionCall
from attnlab.ops.cpu import stacks
from attnlab.ops.cpu.plans import mapped_at_once
from attnlab.ops.platforms import platform_of
from attnlab.ops.schedule import EMPTY, FULL, block_mask_of


def per_example(plan: TilePlan, fn: Callable, call: AttentionCall, *arrays):
    """Call fn(call, *arrays), mapped over the leading axis if `vmap` has added one."""
    if plan.mapped is None:
        return fn(call, *arrays)
    axes = jax.tree.unflatten(jax.tree.structure(call), [0 if mapped else None for mapped in plan.mapped])
    return jax.vmap(fn, in_axes=(axes, *(0 for _ in arrays)))(call, *arrays)


def with_mapped(plan: TilePlan, call: AttentionCall, chosen: AttentionCall) -> tuple[TilePlan, AttentionCall]:
    """Add the mapped axis to the chosen leaves that lack it, because each example has its own gradient."""
    if plan.mapped is None:
        return plan, call
    leaves, structure = jax.tree.flatten(call)
    chosen = jax.tree.leaves(chosen)
    leaves = [
        jnp.broadcast_to(x, (call.q.shape[0], *x.shape)) if choose and not mapped else x
        for x, choose, mapped in zip(leaves, chosen, plan.mapped)
    ]
    mapped = tuple(map(max, chosen, plan.mapped))
    return plan._replace(mapped=mapped), jax.tree.unflatten(structure, leaves)


def batched_explicitly(run_pass):
    """Add a `vmap` rule to `run_pass(plan, call, block_mask, …)`: all examples share one loop, which skips EMPTY tiles.

    If the plan keeps scores in the CPU's caches, only as many examples as fit there are computed at a time.
    """

    def run_batched(plan, *operands):
        q, k, v = operands[0].q, operands[0].k, operands[0].v
        as_integers = q.dtype == jnp.bfloat16 and platform_of(q, k, v) == "cpu"

        @custom_vmap
        def unmapped(*operands):
            run_plan = functools.partial(run_pass, plan)
            return (stacks.moved_as_integers(run_plan) if as_integers else run_plan)(*operands)

        @unmapped.def_vmap
        def mapped(axis_size, is_batched, *operands):
            at_once = mapped_at_once(plan, operands[0], is_batched[0].q, axis_size)
            if plan.together is not None or at_once < axis_size:
                results = _some_at_a_time(functools.partial(run, plan), operands, is_batched, at_once)
                return results, jax.tree.map(lambda _: True, results)
            results = run(*_with_mapped_axis(plan, operands, is_batched, axis_size))
            if plan.mapped is not None:
                results = jax.tree.map(lambda x: x.reshape(axis_size, -1, *x.shape[1:]), results)
            return results, jax.tree.map(lambda _: True, results)

        return unmapped(*operands)

    def refuse(*_):
        raise ValueError("impl = 'blockwise' has no derivatives of second order: use impl='dense'")

    # This rule exists only for its message: JAX's own error would not name an alternative.
    run = jax.custom_jvp(run_batched, nondiff_argnums=(0,))
    run.defjvp(refuse)
    return run


def _some_at_a_time(fn: Callable, operands: Sequence, is_batched: Sequence, size: int):
    """Map fn over the examples, `size` at a time."""
    leaves, structure = jax.tree.flatten(tuple(operands))
    is_batched = jax.tree.leaves(tuple(is_batched))

    def one(batched):
        batched = iter(batched)
        return fn(*structure.unflatten([next(batched) if is_b else x for x, is_b in zip(leaves, is_batched)]))

    batched = [x for x, is_b in zip(leaves, is_batched) if is_b]
    return lax.map(one, batched, batch_size=size if size > 1 else None)


def _with_mapped_axis(plan: TilePlan, operands: Sequence, is_batched: Sequence, size: int) -> tuple:
    """Return (plan, *operands) with a new mapped axis, merged with the existing mapped axis, if any."""
    (call, block_mask, *others), (batched, block_mask_is_batched, *others_are_batched) = operands, is_batched
    leaves, structure = jax.tree.flatten(call)
    batched, had_axis = jax.tree.leaves(batched), plan.mapped or (False,) * len(leaves)
    old_size = call.q.shape[int(batched[0])] if plan.mapped else 1

    def merged(x, batched, had_axis=plan.mapped is not None):
        x = x if batched else x[None]
        x = x if had_axis else x[:, None]
        return jnp.broadcast_to(x, (size, old_size, *x.shape[2:])).reshape(size * old_size, *x.shape[2:])

    # q, k and v always have the axis, because examples share the loops over their blocks.
    needs = jax.tree.leaves(jax.tree.map(lambda _: False, call).replace(q=True, k=True, v=True))
    mapped = tuple(map(max, needs, batched, had_axis))
    leaves = [merged(x, *has) if mapped else x for x, mapped, *has in zip(leaves, mapped, batched, had_axis)]
    if block_mask_is_batched:
        block_mask = block_mask_of(block_mask > EMPTY, block_mask == FULL)
    others = jax.tree.map(merged, others, others_are_batched)
    plan = plan._replace(mapped=mapped)
    return plan, jax.tree.unflatten(structure, leaves), block_mask, *others
