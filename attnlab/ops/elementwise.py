"""User functions of scalars, vectorized over tiles: the body of `MaskFn` and `ScoreFn`."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from attnlab.ops.jaxprs import evaluate
from attnlab.types import Array, DType


@dataclass(frozen=True, init=False)
class Function:
    """Base class of masks and score mods that apply a user function `fn(*coordinates, *arrays)`; always positional."""

    fn: Callable
    arrays: tuple[Array, ...]
    positional = True

    def __init__(self, fn, *arrays):
        object.__setattr__(self, "fn", fn)
        object.__setattr__(self, "arrays", arrays)
        self.__post_init__()


def apply(fn: Callable, coordinates: tuple[Array, ...], arrays: tuple[Array, ...], kind: type) -> Array:
    """Evaluate fn(*scalars, *arrays), a scalar of `kind`, at every point; coordinates that `fn` ignores add no axis."""
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
    return jnp.asarray(jnp.vectorize(lambda *point: fn(*point, *arrays))(*points))  # a number if no coordinate is used


def without_closure(
    fn: Callable, coordinates: tuple[DType, ...], arrays: tuple[Array, ...]
) -> tuple[Callable, tuple[Array, ...]]:
    """Return (fn, arrays) with closed-over tracers moved to `arrays`: derivative rules must not hold them in `fn`."""
    closed = _traced(fn, tuple(jax.ShapeDtypeStruct((), dtype) for dtype in coordinates), arrays)
    if not any(isinstance(value, jax.core.Tracer) for value in closed.consts):
        return fn, arrays
    num_arguments = len(coordinates) + len(arrays)

    def closed_fn(*values):
        consts, arguments = values[num_arguments:], values[:num_arguments]
        return evaluate(ClosedJaxpr(closed.jaxpr, consts), arguments, _inline)[0]

    return closed_fn, (*arrays, *closed.consts)


def _inline(equation, values) -> list | None:
    """Evaluate a `jit` on the mesh in context, because JAX would use the trace's mesh; None for other equations."""
    is_call = equation.primitive.name in ("jit", "pjit")
    return evaluate(equation.params["jaxpr"], values, _inline) if is_call else None


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
