"""Jaxprs evaluated equation by equation, with the differences between JAX's versions."""

import contextlib
from collections.abc import Callable

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal


def evaluate(closed: ClosedJaxpr, arguments, visit: Callable = lambda equation, values: None) -> list:
    """The results of a jaxpr; visit(equation, values) returns an equation's results, or None to have JAX compute them.

    All is computed on the mesh in context, but functions with a derivative rule, as `jax.nn.relu`, on the trace's mesh;
    and in the equations' scopes of names, by which profiles tell it.
    """
    jaxpr = closed.jaxpr
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *arguments)))

    def read(atom):
        return atom.val if isinstance(atom, Literal) else known[atom]

    for equation in jaxpr.eqns:
        values = [read(atom) for atom in equation.invars]
        scopes = str(equation.source_info.name_stack)
        with jax.named_scope(scopes) if scopes else contextlib.nullcontext():
            results = visit(equation, values)
            known |= dict(zip(equation.outvars, bind(equation, values) if results is None else results))
    return [read(atom) for atom in jaxpr.outvars]


def bind(equation, values) -> list:
    """The results of an equation's primitive."""
    params = equation.primitive.get_bind_params(equation.params)
    functions, params = params if isinstance(params, tuple) else ((), params)  # depends on JAX's version
    results = equation.primitive.bind(*functions, *values, **params)
    return list(results) if equation.primitive.multiple_results else [results]


def inner(equation) -> ClosedJaxpr | None:
    """The jaxpr that an equation calls, or None."""
    names = (name for name in ("jaxpr", "call_jaxpr", "fun_jaxpr") if name in equation.params)
    found = equation.params.get(next(names, None))
    return found if found is None else _closed(found)


def called(equation) -> list[ClosedJaxpr]:
    """All jaxprs that an equation may run, such as the branches of a condition."""
    kinds = (ClosedJaxpr, Jaxpr)
    leaves = jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: isinstance(x, kinds))
    return [_closed(x) for x in leaves if isinstance(x, kinds)]


def _closed(jaxpr: Jaxpr | ClosedJaxpr) -> ClosedJaxpr:
    """The jaxpr with its constants: since JAX 0.12 the two classes are one."""
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())


def consts_and_carry(params: dict) -> tuple[int, int]:
    """The numbers of a scan's constants and carried values."""
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # since JAX 0.12
    return len(consts), len(carry)
