"""Trace metrics to programs, so that metrics with the same program share a compiled sweep.

The identity of a Python function cannot decide this: a lambda in a loop is new each time, and a function that reads a
global variable stays the same when the variable changes.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend import core

from attnlab.ops import jaxprs


def traced(metric: Callable, result: Any) -> tuple[str, Callable, list]:
    """Return (key shared by metrics with the same program, `program(arrays, result)`, arrays it reads).

    The metric is traced with the shapes and types of `result`.
    """
    # A new lambda, because JAX caches the program of a function that it has traced.
    closed, shape = jax.make_jaxpr(lambda out: metric(out), return_shape=True)(result)
    if getattr(shape, "shape", None) != ():
        actual = getattr(shape, "shape", type(shape).__name__)
        raise ValueError(f"metric returned {actual}, expected shape (): one number, e.g. a mean")
    digest = hashlib.sha256(str(closed.jaxpr).encode())
    for array in _inner_arrays(closed.jaxpr):
        digest.update(np.asarray(array).tobytes())

    def program(arrays, out):
        (value,) = core.jaxpr_as_fun(core.ClosedJaxpr(closed.jaxpr, arrays))(*jax.tree.leaves(out))
        return value

    return digest.hexdigest(), program, closed.consts


def _inner_arrays(jaxpr):
    """Arrays that a program's text omits: literals, and the constants of the functions that the program calls."""
    for eqn in jaxpr.eqns:
        for var in eqn.invars:
            if isinstance(var, core.Literal) and np.ndim(var.val):
                yield var.val
        for called in jaxprs.called(eqn):
            yield from called.consts
            yield from _inner_arrays(called.jaxpr)
