"""Rules for `vmap`, `shard_map`, forward mode and second-order derivatives."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from attnlab.ops.blockwise.operands import Operands, Plan, SplitTerms, combine, partition
from attnlab.ops.schedule import EMPTY, FULL, block_mask_of
from attnlab.types import Array

REVERSE_MODE_ONLY = (
    "impl = 'blockwise' has first derivatives in reverse mode only: for forward mode or second order use impl='dense'"
)


def reverse_mode_only(tree):
    """`tree`, such that forward-mode derivatives of what is computed from it raise ValueError, under `jit` as well."""
    floats, others = partition(tree, jax.tree.map(lambda x: jnp.issubdtype(x.dtype, jnp.inexact), tree))
    leaves, treedef = jax.tree.flatten(floats)
    return combine(jax.tree.unflatten(treedef, _identity(leaves)), others)


@jax.custom_jvp
def _identity(leaves):
    return leaves


@_identity.defjvp
def _identity_jvp(primals, tangents):
    return primals[0], _tangents_p.bind(*tangents[0])


def _refuse(*_, **__):
    raise ValueError(REVERSE_MODE_ONLY)


# The identity on tangents. Reverse mode transposes it without computing it, so computing it means forward mode.
_tangents_p = Primitive("reverse_mode_only")
_tangents_p.multiple_results = True
_tangents_p.def_impl(_refuse)
_tangents_p.def_abstract_eval(lambda *tangents: tangents)
ad.deflinear2(_tangents_p, lambda cotangents, *_: cotangents)
batching.primitive_batchers[_tangents_p] = lambda tangents, axes: (_tangents_p.bind(*tangents), axes)
mlir.register_lowering(_tangents_p, _refuse)


def batched_explicitly(run_pass):
    """`run_pass(plan, operands)` with a rule for `vmap` that adds an axis to its arrays and not to its control flow.

    By default a `vmap`ped loop runs until its last example is done, and a `vmap`ped `cond` computes both branches, so
    that no tile would be skipped. Second-order derivatives raise ValueError.
    """

    @functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
    def run(plan, operands):
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

    run.defjvp(_refuse)
    return run


def _with_mapped_axis(plan: Plan, operands: Operands, is_batched: Operands, size: int) -> tuple[Plan, Operands]:
    """Plan and operands with one more mapped axis, of `size`, merged with the one there may be."""
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
        for name in ("q", "k", "v", "sinks", "out", "lse", "d_out", "d_lse")
    }
    terms = SplitTerms(shared, combine(still_mapped, newly_mapped))
    return plan._replace(is_mapped=True), Operands(block_mask=block_mask, terms=terms, **others)


def varying_like(x: Array, tree):
    """`tree` marked, within `shard_map`, as varying over the mesh axes that `x` varies over."""
    return jax.tree.map(lambda leaf: _varying(leaf, _axes(x)), tree)


def equally_varying(tree):
    """`tree` with each leaf marked as varying over the mesh axes that any leaf varies over."""
    axes = frozenset().union(*(_axes(leaf) for leaf in jax.tree.leaves(tree)))
    return jax.tree.map(lambda leaf: _varying(leaf, axes), tree)


def _varying(x, axes):
    missing = tuple(axes - _axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def _axes(x):
    """The mesh axes over which `x` varies within `shard_map`."""
    return jax.typeof(x).manual_axis_type.varying
