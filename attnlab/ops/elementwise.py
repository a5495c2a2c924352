"""User functions of scalars, vectorized over tiles: the body of `MaskFn` and `ScoreFn`."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal

from attnlab.types import Array, DType


@dataclass(frozen=True, init=False)
class Function:
    """Fields of a mask or score mod that is a user function: `fn(*coordinates, *arrays)`, compared by position."""

    fn: Callable
    arrays: tuple[Array, ...]
    positional = True

    def __init__(self, fn, *arrays):
        object.__setattr__(self, "fn", fn)
        object.__setattr__(self, "arrays", arrays)


def apply(fn: Callable, coordinates: tuple[Array, ...], arrays: tuple[Array, ...], kind: type) -> Array:
    """fn(*scalars, *arrays), a scalar of `kind`, at every point; a coordinate that `fn` ignores adds no axis."""
    jaxpr = _traced(fn, coordinates, arrays).jaxpr
    result = jaxpr.outvars[0].aval if len(jaxpr.outvars) == 1 else None
    if result is None or result.shape != () or not jnp.issubdtype(result.dtype, kind):
        got = f"{len(jaxpr.outvars)} values" if result is None else f"{result.dtype}{list(result.shape)}"
        raise ValueError(
            f"{_name(fn)} returned {got}, expected one {kind.__name__} scalar: it is called with scalars, "
            "once for each query and key"
        )
    used = {id(variable) for equation in jaxpr.eqns for variable in equation.invars} | {id(jaxpr.outvars[0])}
    arrays = tuple(map(jnp.asarray, arrays))  # traced coordinates cannot index NumPy arrays
    points = [x if id(variable) in used else 0 for x, variable in zip(coordinates, jaxpr.invars)]
    return jnp.vectorize(lambda *point: fn(*point, *arrays))(*points)


def without_closure(
    fn: Callable, coordinates: tuple[DType, ...], arrays: tuple[Array, ...]
) -> tuple[Callable, tuple[Array, ...]]:
    """(fn, arrays) with closed-over tracers passed as arrays: a derivative rule must not keep them in `fn`."""
    closed = _traced(fn, tuple(jax.ShapeDtypeStruct((), dtype) for dtype in coordinates), arrays)
    if not any(isinstance(value, jax.core.Tracer) for value in closed.consts):
        return fn, arrays
    num_arguments = len(coordinates) + len(arrays)

    def closed_fn(*values):
        consts, arguments = values[num_arguments:], values[:num_arguments]
        return _evaluate(ClosedJaxpr(closed.jaxpr, consts), arguments)[0]

    return closed_fn, (*arrays, *closed.consts)


def bind(equation, operands) -> list:
    params = equation.primitive.get_bind_params(equation.params)
    functions, params = params if isinstance(params, tuple) else ((), params)  # depends on JAX's version
    results = equation.primitive.bind(*functions, *operands, **params)
    return results if equation.primitive.multiple_results else [results]


def _evaluate(closed: ClosedJaxpr, arguments) -> list:
    """The results of a jaxpr on the mesh in context, where JAX would use the mesh of the trace."""
    jaxpr = closed.jaxpr  # functions with a derivative rule, as `jax.nn.relu`, stay on the mesh of the trace
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *arguments)))

    def read(atom):
        return atom.val if isinstance(atom, Literal) else known[atom]

    for equation in jaxpr.eqns:
        operands, is_call = [read(atom) for atom in equation.invars], equation.primitive.name in ("jit", "pjit")
        results = _evaluate(equation.params["jaxpr"], operands) if is_call else bind(equation, operands)
        known |= dict(zip(equation.outvars, results))
    return [read(atom) for atom in jaxpr.outvars]


def _traced(fn, coordinates, arrays):
    scalars = [jax.ShapeDtypeStruct((), x.dtype) for x in coordinates]
    try:
        return jax.make_jaxpr(fn)(*scalars, *arrays)
    except TypeError as error:
        if "positional argument" not in str(error):
            raise
        raise ValueError(f"{_name(fn)} does not take the arguments it is called with: {error}") from error


def _name(fn):
    return getattr(fn, "__name__", repr(fn))
