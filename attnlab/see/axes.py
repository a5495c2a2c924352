"""The origin of each axis of the arrays in a jaxpr: whether its size is a size of the variables or of the inputs."""

import math

from jax.extend import core

from attnlab.ops import jaxprs

# Origins, in the order in which they prevail where arrays of one shape meet. An axis that a softmax has normalized has
# NORMALIZED more.
UNKNOWN, WEIGHTS, INPUTS = range(3)
NORMALIZED = 3

Axes = tuple[int, ...]  # an origin for each axis


def of_rank(rank: int, origin: int = UNKNOWN) -> Axes:
    """Axes of one origin."""
    return (origin,) * rank


def normalized(axes: Axes, axis: int) -> Axes:
    """The axes of a softmax over one of them."""
    return (*axes[:axis], origin(axes[axis]) + NORMALIZED, *axes[axis + 1 :])


def origin(axis: int) -> int:
    """The origin of an axis, normalized or not."""
    return axis % NORMALIZED


def is_of_other_than(axes: Axes, axis: int) -> bool:
    """Whether a softmax was over another axis than this one."""
    return axes[axis] < NORMALIZED <= max(axes)


def through(jaxpr: core.Jaxpr, given: list[Axes], calls: set[str]) -> list[Axes]:
    """The axes of a jaxpr's outputs, from the axes of its inputs; `calls` are primitives that run a jaxpr once."""
    known = dict(zip(jaxpr.invars, given))

    def axes_of(atom):
        return of_rank(atom.aval.ndim) if isinstance(atom, core.Literal) else known.get(atom, of_rank(atom.aval.ndim))

    for eqn in jaxpr.eqns:
        known |= dict(zip(eqn.outvars, after(eqn, [axes_of(atom) for atom in eqn.invars], calls)))
    return [axes_of(atom) for atom in jaxpr.outvars]


def after(eqn: core.JaxprEqn, given: list[Axes], calls: set[str]) -> list[Axes]:
    """The axes of an equation's outputs, from the axes of its inputs."""
    name, called = eqn.primitive.name, jaxprs.inner(eqn)
    if name in calls and called is not None:
        return through(called.jaxpr, given, calls)
    if name in _RULES:
        return [_RULES[name](eqn, *given)] * len(eqn.outvars)
    if name.startswith(("reduce_", "arg")) and "axes" in eqn.params:
        return [_without(given[0], eqn.params["axes"])]
    # Elementwise, or a part or a sum of its inputs.
    return [_joined([axes for axes in given if len(axes) == out.aval.ndim], out.aval.ndim) for out in eqn.outvars]


def _joined(given: list[Axes], rank: int) -> Axes:
    return tuple(map(max, *given)) if len(given) > 1 else given[0] if given else of_rank(rank)


def _without(axes: Axes, dropped) -> Axes:
    return tuple(origin for axis, origin in enumerate(axes) if axis not in dropped)


def _product(eqn, left: Axes, right: Axes) -> Axes:
    contracted, batch = eqn.params["dimension_numbers"]
    shared = tuple(max(left[a], right[b]) for a, b in zip(*batch))
    free = (_without(axes, (*contracted[n], *batch[n])) for n, axes in enumerate((left, right)))
    return (*shared, *next(free), *next(free))


def _broadcast(eqn, axes: Axes, *_) -> Axes:
    places, (old, new) = eqn.params["broadcast_dimensions"], _shapes(eqn)
    kept = {place: origin for place, origin, size in zip(places, axes, old) if size == new[place]}
    return tuple(kept.get(axis, UNKNOWN) for axis in range(len(new)))


def _reshape(eqn, axes: Axes, *_) -> Axes:
    """An axis is the same if it has its size, and as many elements before it."""
    old, new = _shapes(eqn)
    known = {(math.prod(old[:axis]), size): axes[axis] for axis, size in enumerate(old) if size > 1}
    return tuple(known.get((math.prod(new[:axis]), size), UNKNOWN) for axis, size in enumerate(new))


def _gather(eqn, operand: Axes, indices: Axes) -> Axes:
    """Rows of a table: the axes of the indices, and the table's others."""
    numbers, rank = eqn.params["dimension_numbers"], eqn.outvars[0].aval.ndim
    dropped = (*numbers.collapsed_slice_dims, *getattr(numbers, "operand_batching_dims", ()))
    of_table, of_indices = iter(_without(operand, dropped)), iter(indices[:-1])
    return tuple(next(of_table if axis in numbers.offset_dims else of_indices) for axis in range(rank))


def _shapes(eqn):
    return eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape


_RULES = {
    "dot_general": _product,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "gather": _gather,
    "transpose": lambda eqn, axes: tuple(axes[axis] for axis in eqn.params["permutation"]),
    "squeeze": lambda eqn, axes: _without(axes, eqn.params["dimensions"]),
}
