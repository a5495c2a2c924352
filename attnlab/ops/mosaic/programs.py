"""Masks and score mods as programs inside a kernel: elementwise functions of a tile and of arrays the kernel loads.

The mask's `visible` or the mod's `apply` is traced once per tile shape, on a tile that records which arrays are taken
along which axes: the operands. Elementwise programs serve tiles `[queries, keys]` and `[keys, queries]` alike.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal

from attnlab.ops import jaxprs
from attnlab.ops.call import AttentionCall
from attnlab.ops.tiles import padded
from attnlab.types import Array

LOG2E = math.log2(math.e)
TILE = 128  # queries and keys per tile of the schedule
ROWS = 64  # rows per warpgroup

# Primitives that Mosaic lowers elementwise, some after `_lowered` rewrites them. Programs with others are refused.
_ELEMENTWISE = {
    *("add", "sub", "mul", "div", "rem", "max", "min", "neg", "abs", "sign", "square", "integer_pow", "sqrt", "rsqrt"),
    *("exp", "exp2", "log", "log2", "tanh", "and", "or", "not", "xor", "eq", "ne", "lt", "le", "gt", "ge"),
    *("select_n", "clamp", "convert_element_type", "broadcast_in_dim"),
}
_PLACED = ("reshard", "pvary", "pcast")  # place a number on a mesh
CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call")


class RefusedError(Exception):
    """The reason why a mask or score mod cannot run inside a kernel."""


class Operand(NamedTuple):
    """How a kernel loads an array for a tile.

    Attributes:
      along: "queries" or "keys" for `[*batch or 1s, H or 1, length]`; "" for one number per head, `[*batch or 1s, H
        or 1]`; "blocks" for `[*batch or 1s, H or 1, blocks of queries, Tk]`.
      rows: queries per block, for "blocks".
      is_learned: whether it is a floating array of a score mod.
    """

    along: str
    rows: int
    is_learned: bool


class Program(NamedTuple):
    """`trace(shape)` returns a jaxpr of `(query index, key index, [scores,] *operands)` for tiles of that shape."""

    trace: Callable
    operands: tuple[Operand, ...]


def mask_program(call: AttentionCall) -> tuple[Program | None, list[Array]]:
    """The program for the visible pairs, and its operands; None if all are visible. Keys past the end are masked.

    Raises:
      RefusedError: the mask cannot run inside a kernel.
    """
    is_ragged = bool(call.lengths[1] % TILE)
    if call.mask is None and not is_ragged:
        return None, []
    mask = _with_handles(call.mask)

    def visible(tile):
        inside = tile.kv_index < call.lengths[1]
        seen = inside if mask is None else mask.visible(tile)
        return _filled(seen & inside if is_ragged else seen, tile)

    return _recorded(visible, call)


def mod_program(call: AttentionCall) -> tuple[Program | None, list[Array]]:
    """The program of the score mods on float32 scores, and its operands; None without mods. Raises RefusedError."""
    if not call.score_mods:
        return None, []
    mods = [_with_handles(mod) for mod in call.score_mods]

    def apply(tile):
        scores = tile.scores
        for mod in mods:
            scores = _filled(mod.apply(scores, tile), tile).astype(jnp.float32)
        return scores

    return _recorded(apply, call, scores=True)


def evaluate(program: ClosedJaxpr, *values):
    """Evaluate a traced program inside a kernel."""
    results = jaxprs.evaluate(program, values, _lowered)
    return [_full(x, aval.shape) for x, aval in zip(results, program.out_avals)]


def with_pullback(trace: Callable, shape: tuple[int, int], learned: tuple[int, ...]) -> tuple[Callable, Callable]:
    """Return (forward, backward) of a mod: forward(q, k, scores, *operands) → (scores, residuals); backward(residuals,
    d) → (d scores, *d of the `learned` operands), each in the shape of the tile."""
    program, structure = trace(shape), None

    def forward(q, k, scores, *operands):
        nonlocal structure

        def of(scores, chosen):
            values = list(operands)
            for at, x in zip(learned, chosen):
                values[at] = x
            return jaxprs.evaluate(program, (q, k, scores, *values))[0]

        out, pull = jax.vjp(of, scores, [operands[at] for at in learned])
        residuals, structure = jax.tree.flatten(pull)
        return out, residuals

    places = [jax.ShapeDtypeStruct(shape, aval.dtype) for aval in program.in_avals]
    traced, (_, residuals) = jax.make_jaxpr(forward, return_shape=True)(*places)

    def backward(residuals, d):
        d_scores, d_learned = structure.unflatten(residuals)(d)
        return d_scores, d_learned

    pulled = jax.make_jaxpr(backward)(residuals, places[2])

    def run_forward(*values):
        out, *residuals = evaluate(traced, *values)
        return out, residuals

    return run_forward, lambda residuals, d: evaluate(pulled, *residuals, d)


class _Handle:
    """Stands for an array of a mask or mod during tracing; taken along axes of the scores, it becomes an operand."""

    def __init__(self, array, index=()):
        self.array, self.index, self.tile = array, index, None
        self.dtype, self.shape, self.ndim = array.dtype, array.shape, array.ndim

    def on(self, tile):
        """The handle, or the array's value if its shape is ()."""
        if self.dtype not in (bool, jnp.int32) and not jnp.issubdtype(self.dtype, jnp.floating):
            raise RefusedError(f"an array has type {self.dtype}, which wraps differently from int32")
        self.tile = tile
        return tile.of_examples(self) if self.ndim == 0 else self

    def __jax_array__(self):
        raise RefusedError("it uses an array as a whole, not one item by its index")

    def __getitem__(self, index):
        if self.tile is None:
            raise RefusedError("it indexes an array itself, not by tile.of_queries, of_keys, of_heads or of_examples")
        handle = _Handle(self.array, (*self.index, *(index if isinstance(index, tuple) else (index,))))
        handle.tile = self.tile
        return self.tile.indexed(handle) if len(handle.index) == self.ndim else handle


def _with_handles(node):
    def handle(x):
        x = x if isinstance(x, jax.Array) else np.asarray(x)
        return _Handle(x.astype(jax.dtypes.canonicalize_dtype(x.dtype)) if isinstance(x, np.ndarray) else x)

    return jax.tree.map(handle, node)


class _Tile:
    """A stand-in for `attnlab.ops.tiles.Tile` that records the arrays taken along its axes as operands."""

    def __init__(self, call: AttentionCall, shape, q, k, scores=None, values=None):
        self.call, self.shape, self.scores, self.values = call, shape, scores, values
        self.q_index, self.kv_index, self.operands, self._known = q, k, [], {}
        self._at_point = None  # within a function of scalars: an operand's number → its scalar

    @property
    def q_position(self):
        return self.q_index if self.call.q_positions is None else self._of_length(self.call.q_positions, "queries")

    @property
    def kv_position(self):
        return self.kv_index if self.call.kv_positions is None else self._of_length(self.call.kv_positions, "keys")

    @property
    def example(self):
        batch = self.call.batch
        return self._operand("example", lambda: np.arange(math.prod(batch), dtype=np.int32).reshape(*batch, 1))

    @property
    def head(self):
        count = self.call.num_heads
        return self._operand("head", lambda: np.arange(count, dtype=np.int32).reshape(*self._ones, count))

    def of_queries(self, x, per_head=False):
        return self._of_length(x.array, "queries", per_head)

    def of_keys(self, x, per_head=False):
        return self._of_length(x.array, "keys", per_head)

    def of_examples(self, x):
        return _typed(self._operand(id(x.array), lambda: jnp.reshape(x.array, (*(x.shape or self._ones), 1))), x)

    def of_heads(self, x):
        return self._operand(id(x.array), lambda: jnp.reshape(x.array, (*self._ones, -1)))

    def of_pairs(self, x):
        raise RefusedError("an array of all pairs cannot be loaded by tiles")

    def of_blocks(self, x, size):
        if size % ROWS:
            raise RefusedError(f"blocks of {size}: their size must be a multiple of {ROWS}")

        def of_keys():
            q_length, length = self.call.lengths
            blocks = jnp.repeat(jnp.asarray(x.array), size, axis=-1)[..., :length].astype(jnp.int32)
            blocks = padded(padded(blocks, _whole(length)), -(-_whole(q_length) // size), axis=-2)
            return self._with_lead(blocks, rank=3)

        return self._operand((id(x.array), size), of_keys, "blocks", size) != 0

    def apply(self, fn, coordinates, arrays, kind):
        """Apply a function of scalars at all points; it may index its arrays only by coordinates and numbers.

        While operands are recorded, a first call at one point finds them; their scalars are then further arguments.
        """

        def at_point(coordinates, operand: Callable):
            self.coordinates, self._at_point = coordinates[-4:], operand
            try:
                return fn(*coordinates, *(x.on(self) for x in arrays))
            finally:
                self._at_point = None

        values = self.values
        if values is None:
            point = tuple(jnp.zeros((), x.dtype) for x in coordinates)
            at_point(point, lambda number: jnp.zeros((), self.operands[number][0].dtype))
            values = [jnp.zeros(self.shape, array.dtype) for array, *_ in self.operands]
        first = len(coordinates)
        vectorized = jnp.vectorize(lambda *x: at_point(x[:first], lambda number: x[first + number]))
        result = vectorized(*coordinates, *values)
        if result.shape != self.shape or not jnp.issubdtype(result.dtype, kind):
            shape = list(result.shape[len(self.shape) :])
            raise RefusedError(f"a function returned {result.dtype}{shape}, not one {kind.__name__} scalar")
        return result

    def indexed(self, handle: _Handle):
        """The operand for an array indexed by example, head, query or key (not both), and numbers, in any order."""
        names = {id(x): name for name, x in zip("bhqk", self.coordinates)}
        index = [names.get(id(x), x) for x in handle.index]
        if any(not isinstance(x, str | int | np.integer) for x in index):
            raise RefusedError("an array is indexed by something other than b, h, i, j and numbers")
        axes = [x for x in index if isinstance(x, str)]
        if {"q", "k"} <= {*axes} or len({*axes}) < len(axes):
            raise RefusedError("an array is indexed by pairs")
        for name, positions in (("q", self.call.q_positions), ("k", self.call.kv_positions)):
            if name in axes and positions is not None:
                raise RefusedError("an array is indexed by positions that are passed to the call")
        along = {"q": "queries", "k": "keys"}.get(max(axes, default=""), "")
        sizes = dict(zip("bhqk", (math.prod(self.call.batch), self.call.num_heads, *self.call.lengths)))
        for name, size in zip(index, handle.shape):
            if isinstance(name, str) and size < sizes[name] and not (size == 1 and name in "bh"):
                raise RefusedError(f"an array is indexed beyond its {size} entries")

        def in_order():
            array = handle.array[tuple(slice(None) if isinstance(x, str) else int(x) for x in index)]
            array = jnp.transpose(array, sorted(range(len(axes)), key=lambda n: "bhqk".index(axes[n])))
            batch, rest = (self.call.batch, array.shape[1:]) if "b" in axes else (self._ones, array.shape)
            array = array.reshape(*batch, *(() if "h" in axes else (1,)), *rest)
            return padded(array, _whole(array.shape[-1])) if along else array

        return _typed(self._operand((id(handle.array), *map(str, index)), in_order, along), handle)

    def _of_length(self, x, along, per_head=False):
        def by_head():
            by_head = jnp.swapaxes(jnp.asarray(x), -1, -2) if per_head else jnp.asarray(x)[..., None, :]
            return self._with_lead(padded(by_head, _whole(by_head.shape[-1])), rank=2)

        return self._operand((id(x), along), by_head, along)

    @property
    def _ones(self):
        return (1,) * len(self.call.batch)

    def _with_lead(self, x, rank):
        """Add the axes that x lacks to get `[*batch or 1s, H or 1, …]`, with `rank` axes from the head axis on."""
        if x.ndim == rank - 1:
            x = x[None]
        return x if x.ndim == rank + len(self.call.batch) else x.reshape(*self._ones, *x.shape)

    def _operand(self, key, make: Callable, along="", rows=0):
        if key not in self._known:
            self._known[key] = len(self._known)
            if self.values is None:
                self.operands.append((_as_word(make()), along, rows))
        at = self._known[key]
        if self._at_point is not None:
            return self._at_point(at)
        return jnp.zeros(self.shape, self.operands[at][0].dtype) if self.values is None else self.values[at]


def _as_word(x):
    """Convert floating types to float32, others to int32."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.asarray(x, jnp.float32)
    if x.dtype.itemsize > 4 or (x.dtype.itemsize == 4 and not jnp.issubdtype(x.dtype, jnp.signedinteger)):
        raise RefusedError(f"an array has type {x.dtype}")
    return jnp.asarray(x, jnp.int32)


def _typed(x, handle: _Handle):
    return x != 0 if handle.dtype == bool else x


def _whole(length: int) -> int:
    return -(-length // TILE) * TILE


def _filled(x, tile):
    return jnp.broadcast_to(x, tile.shape)


def _recorded(function: Callable, call: AttentionCall, scores: bool = False) -> tuple[Program, list[Array]]:
    def on_tile(shape, values, q, k, *rest):
        tile = _Tile(call, shape, q, k, *rest, values=values)
        return function(tile), tile.operands

    places = [jnp.int32, jnp.int32, *[jnp.float32] * scores]
    try:  # a user-defined function may raise anything on a tile of all points at once
        _, recorded = on_tile((ROWS, ROWS), None, *(jnp.zeros((ROWS, ROWS), dtype) for dtype in places))
    except RefusedError:
        raise
    except Exception as error:
        raise RefusedError(f"a function is not elementwise: {str(error).partition(chr(10))[0]}") from error
    arrays = [array for array, *_ in recorded]

    @functools.cache
    def trace(shape):
        def of(*values):
            return on_tile(shape, values[len(places) :], *values[: len(places)])[0]

        types = [*places, *(x.dtype for x in arrays)]
        closed = jax.make_jaxpr(of)(*(jax.ShapeDtypeStruct(shape, dtype) for dtype in types))
        _require_elementwise(closed)
        return ClosedJaxpr(closed.jaxpr, [np.asarray(x)[()] for x in closed.consts])

    trace((ROWS, ROWS))
    is_learned = [scores and bool(jnp.issubdtype(x.dtype, jnp.floating)) for x in arrays]
    operands = (Operand(along, rows, learned) for (_, along, rows), learned in zip(recorded, is_learned))
    return Program(trace, tuple(operands)), arrays


def _require_elementwise(closed) -> None:
    if any(isinstance(x, jax.core.Tracer) or np.ndim(x) for x in closed.consts):
        raise RefusedError("a function closes over an array: pass it as an argument")
    uniform = set()  # variables that repeat one number, which `_lowered` keeps as a scalar

    def repeats(x):
        return not x.aval.shape or (not isinstance(x, Literal) and x in uniform)

    for equation in closed.jaxpr.eqns:
        name = equation.primitive.name
        if name in CALLS:
            _require_elementwise(jaxprs.inner(equation))
        elif name == "broadcast_in_dim" and not repeats(equation.invars[0]):
            raise RefusedError("a function is not elementwise: it has broadcast_in_dim")
        elif name not in _ELEMENTWISE and name not in _PLACED:
            raise RefusedError(f"a function is not elementwise: it has {name}")
        elif all(map(repeats, equation.invars)):
            uniform.update(equation.outvars)


def _lowered(equation, values) -> list | None:
    """Evaluate an equation in terms that Mosaic lowers: booleans in 32 bits, tanh by one exponential."""
    name, out = equation.primitive.name, equation.outvars[0].aval
    if name in CALLS:
        return jaxprs.evaluate(jaxprs.inner(equation), values, _lowered)
    if name == "tanh":
        return [tanh(values[0])]
    if name in _PLACED or (name == "broadcast_in_dim" and not jnp.ndim(values[0])):
        return values
    if name == "reshape" and out.shape == equation.invars[0].aval.shape:  # from a derivative on a mesh
        return values
    if name == "add_any":
        return [values[0] + values[1]]
    if name == "integer_pow" and equation.params["y"] < 0:
        return [1 / lax.integer_pow(values[0], -equation.params["y"])]
    if name == "convert_element_type" and equation.invars[0].aval.dtype == bool and out.dtype != bool:
        return [_as_integer(values[0]).astype(out.dtype)]
    if out.dtype == bool and name in ("and", "or", "xor", "not"):
        x, *others = map(_as_integer, values)
        return [(1 - x if name == "not" else equation.primitive.bind(x, *others)) != 0]
    if out.dtype == bool and name == "select_n":
        which, *cases = values
        return [lax.select_n(which, *map(_as_integer, cases)) != 0]
    shape = jnp.broadcast_shapes(*map(jnp.shape, values))
    return jaxprs.bind(equation, [_full(x, shape) for x in values])


def _full(x, shape):
    return x if jnp.shape(x) == shape else jnp.full(shape, x)


def _as_integer(x):
    return jnp.where(x, 1, 0) if jnp.ndim(x) else jnp.int32(x)


def tanh(x):
    """tanh with the absolute error of rounding 1 to float32; the device's own tanh takes several times as long."""
    return 1 - 2 / (jnp.exp2(x * (2 * LOG2E)) + 1)
