"""Masks and score mods, split by the coordinates that each part varies with.

Inside a kernel only arithmetic is possible, but `Mask.visible` and `ScoreMod.apply` may index their arrays by head or
gather from them by position. So a function is traced for one query and one key of every example and head, and each
value varies with neither (a scalar per example and head, as ALiBi's slope), with queries or keys alone (a vector, as
segment ids), or with both (pairs, as the distance i − j).

XLA computes scalars and vectors beforehand, in O(T); a `Program` computes the pairs from them within the kernel. Pairs
that it cannot compute, as entries of a table, XLA computes too: as a vector by distance of indices if they allow it.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Primitive
from jax.extend.core import Literal as Constant
from jax.interpreters import batching

from attnlab.ops.jaxprs import bind
from attnlab.ops.tiles import WHOLE, Shard, Side, SideOfCall, Tile, examples, heads
from attnlab.types import Array

Varies = Literal["q_index", "kv_index", "scalar", "query", "key", "distance", "pair", "tile"]

# Primitives that Mosaic lowers elementwise on every generation of TPUs, as it does their derivatives.
# fmt: off
_ELEMENTWISE = frozenset((
    "abs", "add", "and", "ceil", "clamp", "convert_element_type", "copy", "cos", "div", "eq", "exp", "exp2", "floor",
    "ge", "gt", "integer_pow", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or",
    "pow", "rem", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign",
    "sin", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
))
# fmt: on
_RESHAPES = frozenset(("broadcast_in_dim", "expand_dims", "pcast", "pvary", "reshape", "squeeze", "transpose"))
_ENTRIES_AT_A_TIME = 2**22  # of an array of pairs that is gathered: the indices take far more than the entries
_CALLS = dict.fromkeys(("closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"), "call_jaxpr")
_CALLS |= dict.fromkeys(("jit", "pjit", "checkpoint", "remat2"), "jaxpr")  # where each has its jaxpr
_NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


class UnsupportedError(Exception):
    """A function that the kernel cannot compute; its text is the reason, for `reason_against`."""


class Scores(NamedTuple):
    batch: tuple[int, ...]  # q's batch axes
    num_heads: int
    lengths: tuple[int, int]  # Tq, Tk
    q_positions: Array | None = None  # [Tq] or [..., Tq]; None for indices
    kv_positions: Array | None = None  # likewise
    shard: Shard = WHOLE

    @property
    def sides(self) -> tuple[Array | None, ...]:
        """Positions of queries and keys, then their indices in the whole call; None where they equal the indices."""
        return self.q_positions, self.kv_positions, self.shard.queries, self.shard.keys


class Input(NamedTuple):
    varies: Varies  # the kernel counts "q_index" and "kv_index"; other inputs are arrays
    dtype: np.dtype  # within the program, see `_stored`

    @property
    def is_learned(self) -> bool:
        return jnp.issubdtype(self.dtype, jnp.inexact)


class _Equation(NamedTuple):
    """A primitive applied to values, which are numbers, or constants."""

    primitive: Primitive
    params: dict[str, Any]
    operands: tuple[int | Constant, ...]
    results: tuple[int, ...]

    @property
    def values(self) -> set[int]:
        return {x for x in self.operands if not isinstance(x, Constant)}

    def compute(self, operands: list[Array]) -> Array:
        if self.primitive.name == "select_n" and len(operands) == 3 and operands[1].dtype == jnp.bool_:
            which, no, yes = operands  # Mosaic selects numbers only
            return (which & yes) | (~which & no)
        return self.primitive.bind(*operands, **self.params)

    def read(self, known: dict[int, Array]) -> list[Array]:
        return [jnp.asarray(x.val, x.aval.dtype) if isinstance(x, Constant) else known[x] for x in self.operands]


@dataclass(frozen=True)
class Program:
    """The part of a function that varies with pairs, as elementwise operations; equal programs have equal texts."""

    text: str  # all that follows, as text
    inputs: tuple[Input, ...]  # without the raw scores
    equations: tuple[_Equation, ...] = field(compare=False)
    places: tuple[int, ...] = field(compare=False)  # values of the inputs, then of the raw scores
    result: int = field(compare=False)

    def __call__(self, *values: Array) -> Array:
        """The function of a tile, from values that broadcast against the tile, in the order of `places`."""
        known = dict(zip(self.places, values))
        for equation in self.equations:
            operands = equation.read(known)
            if equation.primitive.name in _RESHAPES:  # a tile has other axes
                known[equation.results[0]] = operands[0]
                continue
            shape = jnp.broadcast_shapes(*map(jnp.shape, operands))
            known[equation.results[0]] = equation.compute([jnp.broadcast_to(x, shape) for x in operands])
        return known[self.result]


class Split(NamedTuple):
    """A program and its inputs `[*batch or 1s, H or 1, sides]`: none, Tq, Tk, Tq + Tk − 1 distances j − i, or both."""

    program: Program
    arrays: Callable[[], tuple[Array | None, ...]]  # None for indices
    drawn_bytes: int  # bytes of computed pairs


def split(function: Callable, scores: Scores, of_raw: bool = False) -> Split:
    """`function(tile)`, or `function(tile, raw)` with `of_raw`, as arrays to compute now and a program for tiles."""
    graph, coordinates, raw, result = _traced(function, scores, of_raw)
    varies = _Variation(graph, coordinates, raw)
    equations, values = _of_pairs(graph, varies, result)
    axes = _axes(graph, equations, result)
    for dtype in {graph.avals[x].dtype for x in (*values, *(e.results[0] for e in equations))}:
        if dtype.itemsize == 8 or dtype == jnp.float16:
            raise UnsupportedError(f"it has no {dtype} in masks and score mods")
    values = [x for x in values if x != raw]
    kinds = [varies.kind(x) for x in values]
    inputs = tuple(Input(kind, graph.avals[x].dtype) for kind, x in zip(kinds, values))
    places = (*values, *(() if raw is None else (raw,)))
    entries = {e.results[0]: e.operands[0] for e in graph.equations if e.primitive is _pair_p}
    drawn = [graph.avals[x] for x, kind in zip(values, kinds) if kind == "pair" and x not in entries]
    return Split(
        Program(_text(equations, inputs, places, result), inputs, equations, places, result),
        functools.partial(_evaluated, graph, coordinates, scores, values, kinds, axes, entries),
        math.prod(scores.lengths) * sum(aval.size * aval.dtype.itemsize for aval in drawn),
    )


# A function as a list of equations


class _Graph:
    """All equations of a traced function, with the equations of its calls, over numbered values."""

    def __init__(self):
        self.avals, self.constants, self.equations = [], {}, []

    def value(self, aval) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def constant(self, x) -> int:
        at = self.value(jax.typeof(x))
        self.constants[at] = x
        return at

    def inline(self, closed: ClosedJaxpr, arguments: Sequence, keeps_rules: bool) -> list:
        """The results of a jaxpr, whose equations are appended; `keeps_rules` keeps functions with rules whole."""
        known = dict(zip(closed.jaxpr.constvars, map(self.constant, closed.consts)))
        known |= dict(zip(closed.jaxpr.invars, arguments))

        def read(atom):
            return atom if isinstance(atom, Constant) else known[atom]

        for equation in closed.jaxpr.eqns:
            operands, name = tuple(map(read, equation.invars)), equation.primitive.name
            inner = equation.params.get(_CALLS.get(name))
            if inner is not None and not (keeps_rules and name.startswith("custom_")):
                inner = inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())
                results = self.inline(inner, operands, keeps_rules)
            else:
                results = tuple(self.value(x.aval) for x in equation.outvars)
                self.equations.append(_Equation(equation.primitive, equation.params, operands, results))
            known |= dict(zip(equation.outvars, results))
        return [read(x) for x in closed.jaxpr.outvars]


class _OnePair(Tile):
    """The tile of one query and one key, of every example and head."""

    def of_pairs(self, x):
        if 1 in x.shape[-2:] or isinstance(self.queries, SideOfCall):  # broadcast along a side, or a part of x
            return super().of_pairs(x)
        return _pair_p.bind(jnp.asarray(x), self.queries.index, self.keys.index)


# The entry of an array `[..., Tq, Tk]` for one query and one key, `[..., 1, 1]`.
_pair_p = Primitive("entry_of_pair")
_pair_p.def_abstract_eval(lambda x, q, k: jax.core.ShapedArray((*x.shape[:-2], 1, 1), x.dtype))


@_pair_p.def_impl
def _entry(x, q_index, kv_index):
    return jnp.take(jnp.take(x, q_index, axis=-2), kv_index, axis=-1)


# `vmap` maps over queries or keys only: a gather from the array.
batching.primitive_batchers[_pair_p] = lambda operands, axes: (jax.vmap(_entry, in_axes=axes)(*operands), 0)


def _traced(function, scores: Scores, of_raw: bool):
    """(graph, values of the coordinates, value of the raw scores or None, value of the result)."""
    heads = (*scores.batch, scores.num_heads, 1, 1)

    def of_one_pair(q_index, kv_index, *sides_and_raw):
        sides, raw = sides_and_raw[:4], sides_and_raw[4:]
        return jnp.asarray(function(_one_pair(scores, q_index, kv_index, *sides), *raw))

    index = jax.ShapeDtypeStruct((1,), jnp.int32)
    sides = [index if x is None else jax.ShapeDtypeStruct((*x.shape[:-1], 1), jnp.int32) for x in scores.sides]
    raw = (jax.ShapeDtypeStruct(heads, jnp.float32),) if of_raw else ()
    try:
        closed = jax.make_jaxpr(of_one_pair)(index, index, *sides, *raw)
    except _NEEDS_VALUES as error:
        raise UnsupportedError("a mask or score mod needs the values of arrays while it is traced") from error
    graph = _Graph()
    arguments = [graph.value(x.aval) for x in closed.jaxpr.invars]
    for at, x in enumerate(scores.sides, 2):  # where no positions are given, they are the indices
        arguments[at] = arguments[at % 2] if x is None else arguments[at]
    (result,) = graph.inline(closed, arguments, keeps_rules=of_raw)  # a mask has no derivative
    if isinstance(result, Constant):
        result = graph.constant(jnp.asarray(result.val, result.aval.dtype))
    return graph, tuple(arguments[:6]), arguments[6] if of_raw else None, result


def _one_pair(scores, q_index, kv_index, *sides) -> Tile:
    q_position, kv_position, q_in_call, kv_in_call = (
        index if given is None else x
        for index, given, x in zip((q_index, kv_index, q_index, kv_index), scores.sides, sides)
    )
    return _OnePair(
        examples(scores.batch, scores.shard, np),
        heads(scores.num_heads, scores.shard, np),
        Side(q_index, q_position, -2, whole_index=q_in_call),
        Side(kv_index, kv_position, -1, whole_index=kv_in_call),
    )


# Which values vary with which coordinates


class _Variation:
    """Analysis of a graph: the coordinates each value depends on, and the equations that kernels can compute."""

    def __init__(self, graph, coordinates, raw):
        self.avals, self.coordinates = graph.avals, coordinates
        self.sides = {x: {"query"} for x in coordinates[::2]} | {x: {"key"} for x in coordinates[1::2]}
        self.sides |= {} if raw is None else {raw: {"query", "key", "raw"}}
        for equation in graph.equations:
            sides = set().union(*(self.sides.get(x, ()) for x in equation.values))
            self.sides |= dict.fromkeys(equation.results, sides)
        self.distances = self._distances(graph)

    def _distances(self, graph) -> set[int]:
        """The values that vary with the difference of two indices alone."""
        found, indices = set(), set(self.coordinates[:2])
        for equation in graph.equations:
            varying = {x for x in equation.values if self.sides.get(x)}
            is_difference = equation.primitive.name == "sub" and self.is_pair(equation.results[0])
            if not varying:
                continue
            if varying <= indices and self._only_moves_ones(equation):
                indices |= set(equation.results)
            elif varying <= found or (varying <= indices and is_difference):
                found |= set(equation.results)
        return found

    def is_pair(self, value) -> bool:
        return {"query", "key"} <= self.sides.get(value, set())

    def kind(self, value) -> Varies:
        if value in self.coordinates[:2]:
            return ("q_index", "kv_index")[self.coordinates.index(value)]
        if value in self.distances:
            return "distance"
        return "pair" if self.is_pair(value) else next(iter(self.sides.get(value, ())), "scalar")

    def is_computed(self, equation) -> bool:
        """Whether the kernel computes an equation with a needed result."""
        if self._only_moves_ones(equation):
            return True  # it costs nothing, and its operand may be smaller
        result, name = equation.results[0], equation.primitive.name
        if not self.is_pair(result):
            return False
        of_raw = "raw" in self.sides[result]
        if of_raw and name.startswith("custom_"):
            raise UnsupportedError("of score mods it has none with a derivative rule of its own, as jax.nn.relu")
        if of_raw and name not in _ELEMENTWISE:
            raise UnsupportedError(f"of primitives of JAX it has no {name} of scores")
        return name in _ELEMENTWISE

    def _only_moves_ones(self, equation) -> bool:
        """Whether an equation permutes axes, and adds and removes axes of size 1 or broadcasts along them."""
        if not equation.values:
            return False
        if equation.primitive.name == "reshape":
            before, after = (self.avals[x].shape for x in (*equation.values, *equation.results))
            return [n for n in before if n != 1] == [n for n in after if n != 1]
        return equation.primitive.name in _RESHAPES


def _of_pairs(graph, varies, result) -> tuple[tuple[_Equation, ...], list[int]]:
    needed, equations = {result}, []
    for equation in reversed(graph.equations):
        if needed & set(equation.results) and varies.is_computed(equation):
            equations.append(equation)
            needed |= equation.values
    made = {x for equation in equations for x in equation.results}
    return tuple(reversed(equations)), sorted(needed - made)


def _axes(graph, equations, result) -> dict[int, tuple[int | None, ...]]:
    """For each axis of a value, the axis of the result that it becomes, counted from the last; None where size 1."""
    found = {result: tuple(range(-graph.avals[result].ndim, 0))}
    for equation in reversed(equations):
        of_result, name, params = found[equation.results[0]], equation.primitive.name, equation.params
        for x in equation.values:
            shape = graph.avals[x].shape
            if name == "broadcast_in_dim":
                axes = tuple(of_result[at] for at in params["broadcast_dimensions"])
            elif name == "transpose":
                axes = tuple(of_result[params["permutation"].index(at)] for at in range(len(shape)))
            elif name in _RESHAPES:
                sizes = graph.avals[equation.results[0]].shape
                kept = iter([axis for axis, size in zip(of_result, sizes) if size != 1])
                axes = tuple(None if size == 1 else next(kept) for size in shape)
            else:
                axes = of_result[len(of_result) - len(shape) :]
            axes = tuple(None if size == 1 else axis for axis, size in zip(axes, shape))
            if found.setdefault(x, axes) != axes:
                raise UnsupportedError("an array of its mask or score mods is laid out along two axes of the scores")
    return found


# Values computed beforehand


def _evaluated(graph, coordinates, scores: Scores, values, kinds, axes, entries) -> tuple[Array | None, ...]:
    """The arrays of the values, None for indices; `entries` are the pairs that are arrays already."""
    arrays = {}
    whole = [x for x in values if x in entries]
    for x, array in zip(whole, _evaluate(graph, coordinates, [entries[x] for x in whole], *(None,) * 6)):
        arrays[x] = jnp.moveaxis(array, (-2, -1), (0, 1))[..., None, None]
    for kind in ("scalar", "query", "key", "distance", "pair"):
        wanted = [x for x, found in zip(values, kinds) if found == kind and x not in entries]
        if wanted:
            run = functools.partial(_evaluate, graph, coordinates, wanted)
            arrays |= dict(zip(wanted, _over_sides(run, scores, kind)))
    return tuple(
        _stored(_laid_out(arrays[x], axes[x], len(scores.batch) + 1), kind) if x in arrays else None
        for x, kind in zip(values, kinds)
    )


def _over_sides(run, scores: Scores, kind: Varies) -> list[Array]:
    """`run` of one pair, over all coordinates that the values vary with; these axes come first."""
    (q_length, kv_length), one = scores.lengths, jnp.zeros(1, jnp.int32)
    queries, keys = kind in ("query", "pair"), kind in ("key", "pair")
    if kind == "distance":
        distance = jnp.arange(1 - q_length, kv_length, dtype=jnp.int32)[:, None]
        q_index, kv_index = jnp.maximum(-distance, 0), jnp.maximum(distance, 0)
        return jax.vmap(lambda *indices: run(*indices * 3))(q_index, kv_index)

    def side(length, position, in_call):
        """Index, position and index in the whole call, row by row."""
        index = jnp.arange(length, dtype=jnp.int32)
        given = (index, index if position is None else position, index if in_call is None else in_call)
        return tuple(jnp.moveaxis(jnp.asarray(x, jnp.int32), -1, 0)[..., None] for x in given)

    def of_keys(*of_query):
        def pair(*of_key):
            return run(*(x for both in zip(of_query, of_key) for x in both))

        return jax.vmap(pair)(*side(kv_length, *scores.sides[1::2])) if keys else pair(one, one, one)

    if not queries:
        return of_keys(one, one, one)
    of_queries = side(q_length, *scores.sides[::2])
    if not keys:
        return jax.vmap(of_keys)(*of_queries)
    rows = max(1, _ENTRIES_AT_A_TIME // (kv_length * scores.num_heads * math.prod(scores.batch)))
    return jax.lax.map(lambda x: of_keys(*x), of_queries, batch_size=min(rows, q_length))


def _evaluate(graph, coordinates, wanted, *given) -> list[Array]:
    known, needed, equations = dict(graph.constants), set(wanted), []
    for at in (2, 3, 4, 5, 0, 1):  # where no positions are given they are the indices, which come last
        known[coordinates[at]] = given[at]
    for equation in reversed(graph.equations):
        if needed & set(equation.results):
            equations.append(equation)
            needed |= equation.values
    for equation in reversed(equations):
        known |= dict(zip(equation.results, bind(equation, equation.read(known))))
    return [known[x] for x in wanted]


def _laid_out(x: Array, axes: tuple[int | None, ...], leading: int) -> Array:
    """`[sides, *axes]` as `[*batch or 1s, H or 1, sides]`; `leading` counts the batch axes and the head axis."""
    sides = x.ndim - len(axes)
    named = sorted((axis, at + sides) for at, axis in enumerate(axes) if axis is not None)
    x = jnp.transpose(
        x, (*(at for _, at in named), *range(sides), *(at + sides for at, axis in enumerate(axes) if axis is None))
    )
    sizes = dict(zip((axis for axis, _ in named), x.shape))
    shape = [sizes.get(axis - leading - 2, 1) for axis in range(leading)]
    return x.reshape(*shape, *x.shape[len(named) : len(named) + sides])


def _stored(x: Array, kind: Varies) -> Array:
    """An array in a type that kernels load; see `Input`."""
    if kind == "pair" and x.dtype in (jnp.bool_, jnp.bfloat16):
        return x.astype(jnp.int8) if x.dtype == jnp.bool_ else x
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return x.astype(jnp.float32)
    return jax.lax.bitcast_convert_type(x, jnp.int32) if x.dtype == jnp.uint32 else x.astype(jnp.int32)


def loaded(x: Array, dtype) -> Array:
    if dtype == jnp.bool_:
        return x.astype(jnp.int32) != 0
    if dtype == jnp.uint32:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)
    return x.astype(dtype)


def _text(equations, inputs, places, result) -> str:
    def show(x):
        return f"{x.val}:{x.aval.dtype}" if isinstance(x, Constant) else f"v{x}"

    lines = [
        f"v{equation.results[0]} = {equation.primitive.name}{sorted((k, str(v)) for k, v in equation.params.items())} "
        + " ".join(map(show, equation.operands))
        for equation in equations
    ]
    return "\n".join([f"{inputs} {places}", *lines, f"v{result}"])
