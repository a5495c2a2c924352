"""FLOPs of the matrix products and convolutions in a traced program; a call of an attnlab operator counts as a whole.

An operator's operations depend on its backend, and its loop bounds on data. Operations within a call are therefore in a
named scope and are not counted. Instead, a marker on the call's result, which costs nothing, holds the call's FLOPs.
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
_ROWS = 1024  # most rows of a mask to evaluate; they are evenly spaced


class _Marker(str):
    """The name of a call's result; `per_element` returns the FLOPs per element of this result."""

    per_element: Callable[[], float]


def scope() -> contextlib.AbstractContextManager:
    """Context whose operations are not counted; `marked` adds their FLOPs as a whole."""
    return jax.named_scope(_SCOPE)


def marked(out: Array, per_element: Callable[[], float]) -> Array:
    """Mark a call's result as taking `per_element()` FLOPs per element; it is evaluated only when FLOPs are counted."""
    marker = _Marker("operations")
    marker.per_element = per_element
    return checkpoint_name(out, marker)


def of_attention(out: Array, call) -> Array:
    """Mark the result of an attention call with its FLOPs: q·k and p·v for each visible key."""
    (q_length, kv_length), features, values = call.lengths, call.q.shape[-1], call.v.shape[-1]
    # `for_tiles` turns closed-over tracers into leaves, so that such masks are dropped: tracers expire before counting.
    mask = None if call.mask is None else _without_arrays(call.mask.for_tiles(q_length, kv_length))
    return marked(out, lambda: 2 * (features + values) / values * _keys_of_queries(mask, q_length, kv_length))


def _keys_of_queries(mask: Mask | None, q_length: int, kv_length: int) -> float:
    """Average number of keys that a query may attend to, if the queries are at the last positions of the keys."""
    if mask is None:
        return float(kv_length)
    stride = -(-q_length // _ROWS)
    rows = np.arange(q_length)[stride // 2 :: stride] + kv_length - q_length
    visible = mask.visible(whole(len(rows), kv_length, q_positions=rows, xp=np))
    return float(np.broadcast_to(visible, (1, len(rows), kv_length)).sum() / len(rows))


def _without_arrays(mask: Mask | None) -> Mask | None:
    """The mask without parts that hold arrays, e.g. segments; keys that only such parts hide count as visible."""
    if isinstance(mask, And):
        a, b = _without_arrays(mask.a), _without_arrays(mask.b)
        return b if a is None else a if b is None else a & b
    return None if jax.tree.leaves(mask) else mask


def operations(function: Callable, *args) -> float:
    """Count the FLOPs of a function of arrays or shapes, without running it.

    A `while` loop counts as one iteration, with a warning, because the number of iterations may depend on data. A
    condition counts as its most expensive branch. Elementwise operations, sums and lookups do not count.

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
