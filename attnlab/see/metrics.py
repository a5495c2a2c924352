"""A metric as a program, so that compiled sweeps are told apart by what it computes.

A function in Python says nothing about that: a lambda in a loop is a new one each time, and one that reads a global
variable stays the same when the variable changes.
"""

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend import core


@dataclasses.dataclass(frozen=True)
class Metric:
    """A metric of a model's result; two are equal if they compute the same, whatever arrays they read.

    Attributes:
      key: of the program.
      program: from the arrays and the leaves of the model's result to one number.
    """

    key: str
    program: Callable = dataclasses.field(compare=False)

    def __call__(self, arrays, out):
        """The number, for the arrays that `traced` returned and a result."""
        return self.program(arrays, out)


def traced(metric: Callable, result: Any) -> tuple[Metric, list]:
    """A metric, and the arrays that it reads.

    Args:
      metric: a number of the model's result.
      result: shapes and types of that.

    Raises:
      ValueError: it is no number.

    >>> labels = jnp.array([1.0, 2.0])
    >>> weighted = lambda out: (out * labels).sum()
    >>> metric, arrays = traced(weighted, jnp.ones(2))
    >>> float(metric(arrays, jnp.ones(2)))
    3.0
    >>> labels = jnp.array([5.0, 5.0])
    >>> again, arrays = traced(weighted, jnp.ones(2))
    >>> metric == again, float(metric(arrays, jnp.ones(2)))
    (True, 10.0)
    """
    # By a function of its own, since JAX keeps the program of a function that it has traced.
    closed, shape = jax.make_jaxpr(lambda out: metric(out), return_shape=True)(result)
    if getattr(shape, "shape", None) != ():
        found = getattr(shape, "shape", type(shape).__name__)
        raise ValueError(f"metric returned {found}, expected shape (): one number, e.g. a mean")
    digest = hashlib.sha256(str(closed.jaxpr).encode())
    for array in _inner_arrays(closed.jaxpr):
        digest.update(np.asarray(array).tobytes())

    def program(arrays, out):
        (value,) = core.jaxpr_as_fun(core.ClosedJaxpr(closed.jaxpr, arrays))(*jax.tree.leaves(out))
        return value

    return Metric(digest.hexdigest(), program), closed.consts


def _inner_arrays(jaxpr):
    """Arrays that a program holds where its text does not show them: those of functions that it calls, and literals."""
    for eqn in jaxpr.eqns:
        for var in eqn.invars:
            if isinstance(var, core.Literal) and np.ndim(var.val):
                yield var.val
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_program):
            if isinstance(value, core.ClosedJaxpr):
                yield from value.consts
                yield from _inner_arrays(value.jaxpr)
            elif isinstance(value, core.Jaxpr):
                yield from _inner_arrays(value)


def _is_program(value) -> bool:
    return isinstance(value, core.ClosedJaxpr | core.Jaxpr)
