"""FLOPs of the products and convolutions of a traced program, where a call of an attnlab operator is one node.

How an operator computes depends on its backend, and its loop bounds depend on data. So operations within a call are in
a scope and are not counted; a marker on the call's result, which costs nothing, holds the FLOPs of the call.
"""

import contextlib
import math
import warnings
from collections.abc import Callable

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr

from attnlab.ops import jaxprs
from attnlab.ops.mask_algebra import And, Mask
from attnlab.ops.tiles import whole
from attnlab.types import Array

_SCOPE = "attnlab_operator"
_ROWS = 1024  # at most this many rows of a mask are counted


class _Marker(str):
    """The name of a result; `per_element` returns the FLOPs of each of its elements."""

    per_element: Callable[[], float]


def scope() -> contextlib.AbstractContextManager:
    """Context in which operations are not counted one by one."""
    return jax.named_scope(_SCOPE)


def marked(out: Array, per_element: Callable[[], float]) -> Array:
    """Mark a call's result: each element takes `per_element()` FLOPs, which is evaluated only when they are counted."""
    marker = _Marker("operations")
    marker.per_element = per_element
    return checkpoint_name(out, marker)


def of_attention(out: Array, call) -> Array:
    """Mark the result of an attention call with its FLOPs: q·k and p·v for each visible key."""
    (q_length, kv_length), features, values = call.lengths, call.q.shape[-1], call.v.shape[-1]
    # Tracers that a mask's function closes over become leaves, because they are gone when operations are counted.
    mask = None if call.mask is None else _without_arrays(call.mask.for_tiles(q_length, kv_length))
    return marked(out, lambda: 2 * (features + values) / values * _keys_of_queries(mask, q_length, kv_length))


def _keys_of_queries(mask: Mask | None, q_length: int, kv_length: int) -> float:
    """Average number of keys that a query may attend to, where queries are at the last positions of the keys."""
    if mask is None:
        return float(kv_length)
    stride = -(-q_length // _ROWS)
    rows = np.arange(q_length)[stride // 2 :: stride] + kv_length - q_length
    visible = mask.visible(whole(len(rows), kv_length, q_positions=rows, xp=np))
    return float(np.broadcast_to(visible, (1, len(rows), kv_length)).sum() / len(rows))


def _without_arrays(mask: Mask | None) -> Mask | None:
    """The mask without parts that depend on arrays, such as segments and lengths; keys hidden only by them count."""
    if isinstance(mask, And):
        a, b = _without_arrays(mask.a), _without_arrays(mask.b)
        return b if a is None else a if b is None else a & b
    return None if jax.tree.leaves(mask) else mask


def operations(function: Callable, *args) -> float:
    """Count the FLOPs of a function of arrays or shapes, without computing it.

    A `while` loop counts as one iteration, with a warning, because the number may depend on data. Of the branches of
    a condition, the most expensive counts. Elementwise operations, sums and lookups do not count.

    >>> operations(lambda x: x @ x, jnp.ones((2, 2)))
    16.0
    """
    return _of(jax.make_jaxpr(function)(*args))


def _of(closed: ClosedJaxpr) -> float:
    return float(sum(map(_of_equation, closed.jaxpr.eqns)))


def _of_equation(equation) -> int | float:
    name, params = equation.primitive.name, equation.params
    if name == "name" and isinstance(params["name"], _Marker):
        size = equation.outvars[0].aval.size
        return size * params["name"].per_element() if size else 0
    if _SCOPE in str(equation.source_info.name_stack):
        return 0
    if name in ("dot_general", "matrix_product"):  # the second is from `attnlab.ops.cpu.products`
        contracted = params["axes"][:1] if "axes" in params else params["dimension_numbers"][0][0]
        return 2 * equation.outvars[0].aval.size * math.prod(equation.invars[0].aval.shape[x] for x in contracted)
    if name == "conv_general_dilated":
        kernel, (_, *inputs) = equation.invars[1].aval.shape, params["dimension_numbers"].rhs_spec
        return 2 * equation.outvars[0].aval.size * math.prod(kernel[axis] for axis in inputs)
    each = [_of(called) for called in jaxprs.called(equation)]
    if name == "while" and any(each):
        warnings.warn("a while loop is counted as one iteration, as their number depends on data", stacklevel=2)
    if name == "cond":
        return max(each, default=0)
    turns = {"scan": params.get("length", 1), "shard_map": getattr(params.get("mesh"), "size", 1)}
    return turns.get(name, 1) * sum(each)
