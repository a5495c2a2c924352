"""Functions of scalars that users give to masks and score mods, applied to whole tiles."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from attnlab.types import Array, DType


def apply(fn: Callable, coordinates: tuple[Array, ...], arrays: tuple[Array, ...], kind: type) -> Array:
    """fn(*scalars, *arrays) at every point of the coordinates broadcast together.

    A coordinate that fn does not read adds no axis: a mask of (i, j) alone is not computed for each head.

    Raises:
      ValueError: fn does not return a scalar of `kind` (`jnp.bool_`, `jnp.floating`).

    >>> i, j = jnp.ogrid[:2, :3]
    >>> apply(lambda i, j, table: table[i] > j, (i, j), (jnp.array([1, 3]),), jnp.bool_)
    Array([[ True, False, False],
           [ True,  True,  True]], dtype=bool)
    """
    jaxpr = _traced(fn, coordinates, arrays).jaxpr
    result = jaxpr.outvars[0].aval if len(jaxpr.outvars) == 1 else None
    if result is None or result.shape != () or not jnp.issubdtype(result.dtype, kind):
        got = "nothing it should" if result is None else f"{result.dtype}{list(result.shape)}"
        raise ValueError(
            f"{_name(fn)} returned {got}, expected a {kind.__name__} scalar: it is called with scalars, "
            "once for every query and key"
        )
    read = {id(variable) for equation in jaxpr.eqns for variable in equation.invars} | {id(jaxpr.outvars[0])}
    points = [x if id(variable) in read else 0 for x, variable in zip(coordinates, jaxpr.invars)]
    return jnp.vectorize(lambda *point: fn(*point, *arrays))(*points)


def opened(fn: Callable, coordinates: tuple[DType, ...], arrays: tuple[Array, ...]) -> tuple[Callable, tuple]:
    """(fn, arrays) where the traced values that fn closes over have become arrays of the call.

    A function that a derivative rule keeps for later must not hold on to values of the trace it was made in.

    Args:
      fn: fn(*scalars, *arrays).
      coordinates: types of its scalars.
      arrays: what it is given.
    """
    closed = _traced(fn, tuple(jax.ShapeDtypeStruct((), dtype) for dtype in coordinates), arrays)
    if not any(isinstance(value, jax.core.Tracer) for value in closed.consts):
        return fn, arrays
    given = len(coordinates) + len(arrays)

    def open_fn(*values):
        return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, values[given:]))(*values[:given])[0]

    return open_fn, (*arrays, *closed.consts)


def _traced(fn, coordinates, arrays):
    scalars = [jax.ShapeDtypeStruct((), x.dtype) for x in coordinates]
    try:
        return jax.make_jaxpr(fn)(*scalars, *arrays)
    except TypeError as error:
        if "positional argument" not in str(error):
            raise
        raise ValueError(f"{_name(fn)} takes other arguments than it is given: {error}") from error


def _name(fn):
    return getattr(fn, "__name__", repr(fn))
