"""Slice and stack bfloat16 arrays as integers, for CPUs.

Seen in jaxlib 0.10.2; XLA's tracker has no issue. XLA's CPU backend cannot slice bfloat16: it converts the *whole*
array to float32 to read a part, and also back to write a part. A loop over layers would convert the values stored for
all layers in each layer; a loop over blocks, all blocks in each block. Integers are moved without conversion.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from attnlab.ops import jaxprs


def moved_as_integers(function: Callable) -> Callable:
    """Wrap a function of trees of arrays so that it slices bfloat16 arrays, and stacks them in loops, as uint16.

    The results have the same bits. Take derivatives first, because integers have none.
    """

    @functools.wraps(function)
    def moved(*args):
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        results = jaxprs.evaluate(closed, jax.tree.leaves(args), _visit)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return moved


def _visit(equation, values) -> list | None:
    """The results of an equation that moves bfloat16; None for other equations."""
    name, params = equation.primitive.name, equation.params
    if not _moves_bfloat16(equation):
        return None
    if name in SLICES:
        return _restored(jaxprs.bind(equation, _integers(values)), values)
    if name in CALLS:
        return jaxprs.evaluate(jaxprs.inner(equation), values, _visit)
    if name == "cond":
        branches = [functools.partial(_call, branch) for branch in params["branches"]]
        return lax.switch(values[0], branches, *values[1:])
    return (_scan if name == "scan" else _while)(params, values)


SLICES = ("dynamic_slice", "dynamic_update_slice")
CALLS = ("jit", "pjit")


def _moves_bfloat16(equation) -> bool:
    name, atoms = equation.primitive.name, (*equation.invars, *equation.outvars)
    if name in (*SLICES, "scan") and any(_is_bfloat16(atom.aval) for atom in atoms):
        return True
    programs = jaxprs.called(equation) if name in (*CALLS, "scan", "while", "cond") else []
    return any(_moves_bfloat16(inner) for program in programs for inner in program.jaxpr.eqns)


def _call(closed, *values) -> list:
    return jaxprs.evaluate(closed, values, _visit)


def _scan(params, values) -> list:
    body, (consts, carried) = params["jaxpr"], jaxprs.consts_and_carry(params)
    consts, looped = values[:consts], values[consts:]

    def step(carry, rows):
        results = _integers(_call(body, *consts, *_restored([*carry, *rows], looped)))
        return results[:carried], results[carried:]

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, stacks = lax.scan(step, _integers(looped[:carried]), _integers(looped[carried:]), **options)
    return _restored([*carry, *stacks], body.out_avals)


def _while(params, values) -> list:
    first, last = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    consts, body_consts, carry = values[:first], values[first:last], values[last:]

    def continues(integers):
        return _call(params["cond_jaxpr"], *consts, *_restored(integers, carry))[0]

    def step(integers):
        return _integers(_call(params["body_jaxpr"], *body_consts, *_restored(integers, carry)))

    return _restored(lax.while_loop(continues, step, _integers(carry)), carry)


def _is_bfloat16(x) -> bool:
    return getattr(x, "dtype", None) == jnp.bfloat16


def _integers(arrays) -> list:
    return [lax.bitcast_convert_type(x, jnp.uint16) if _is_bfloat16(x) else x for x in arrays]


def _restored(integers, like) -> list:
    return [lax.bitcast_convert_type(x, jnp.bfloat16) if _is_bfloat16(y) else x for x, y in zip(integers, like)]
