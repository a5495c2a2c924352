"""The bodies of the kernels: the computation of one tile, and of the first and last tile of a row of tiles.

A kernel goes along rows of tiles. The side that stays the same along a row, its *outer* side, lies along the sublanes
of a tile; the *inner* side lies along the lanes. Queries are the outer side in `forward`, `d_queries` and `d_pairs`,
keys in `d_keys`, so all products are of rows by columns or of rows by rows, and sums along a row need no transposition.
One number per row of the tile is kept `LANES` times, as a *column*: a vector register has as many lanes.

Logits are of base 2 where q or the products take the factor, since the hardware has a power of 2; natural where a
program makes them, which may shift a whole row so far that another rounding would change the weights.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnlab.ops.experimental.pallas.kernel_types import Plan, Terms
from attnlab.ops.experimental.pallas.splitting import loaded
from attnlab.ops.schedule import PARTIAL, Visit
from attnlab.types import Array

LANES = 128
_MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)  # not −inf, whose differences are NaN; logits are larger, or −inf


class Refs(NamedTuple):
    """The blocks of the arrays that a kernel reads; see `Operands` and `Cotangents`."""

    q: Array
    k: Array
    v: Array
    sinks: Array | None
    terms: Terms
    d_out: Array | None = None
    shift: Array | None = None
    log_sum: Array | None = None
    delta: Array | None = None


class Tile(NamedTuple):
    plan: Plan
    of_keys: bool  # whether keys are the outer side
    visit: Visit
    example: Array
    head: Array  # the query head
    refs: Refs
    columns: Terms  # scratch for the column of each vector of the outer side, per array of each term

    @property
    def shape(self) -> tuple[int, int]:
        """(outer, inner)."""
        return self.plan.block_sizes[::-1] if self.of_keys else self.plan.block_sizes

    def index(self, of_keys: bool) -> Array:
        """Indices of the queries or keys, `[outer, 1]` or `[1, inner]`; they may reach beyond the length."""
        axis = int(self.of_keys != of_keys)
        size, block = self.shape[axis], (self.visit.row, self.visit.column)[axis]
        shape = (1, size) if axis else (size, 1)
        return block * size + lax.broadcasted_iota(jnp.int32, shape, axis)

    def _existing(self, of_keys: bool) -> Array:
        """`index`, where padding repeats the last index: score mods get positions that exist."""
        length, size = self.plan.lengths[of_keys], self.plan.block_sizes[of_keys]
        index = self.index(of_keys)
        return jnp.minimum(index, length - 1) if length % size else index

    def values(self, term: str) -> list[Array]:
        """The inputs of a term's program, which broadcast against the tile."""
        program = getattr(self.plan.programs, term)
        refs, columns = (getattr(x, term) for x in (self.refs.terms, self.columns))
        return [self._value(*of_one) for of_one in zip(program.inputs, refs, columns)]

    def _value(self, described, ref, column):
        if ref is None:
            return self._existing(described.varies == "kv_index")
        if described.varies == "scalar":
            x = scalar(ref, self.example, self.head)
        elif described.varies == "distance":
            x = jnp.concatenate([one.spread(ref) for one in self.diagonals()], axis=0)
        else:
            x = ref[...] if column is None else wide(column[...], self.shape[1])
        if described.dtype == jnp.bool_ or x.dtype == jnp.int8:  # Mosaic broadcasts numbers only
            x = jnp.broadcast_to(x.astype(jnp.int32), self.shape)
        return loaded(x, described.dtype)

    def diagonals(self) -> list["Diagonals"]:
        """The parts of a vector of distances, inner − outer, that the rows of the tile need, some rows at a time."""
        outer, inner = self.shape
        rows = LANES if outer % LANES == 0 else outer
        # The vector begins where the first key meets the end of the last block of queries, or the other way round.
        blocks = pl.cdiv(self.plan.lengths[int(self.of_keys)], outer)
        start = (blocks - self.visit.row) * outer + self.visit.column * inner
        return [Diagonals(rows, inner, start - first, self.plan.rotates_rows) for first in range(0, outer, rows)]

    def visible(self) -> Array | None:
        """Which pairs of a PARTIAL tile are visible, None for all of them."""
        visible = None
        if self.plan.programs.visible is not None:
            visible = self.plan.programs.visible(*self.values("visible"))
            visible = visible if visible.shape == self.shape else jnp.broadcast_to(visible, self.shape)
        length, size = self.plan.lengths[1], self.plan.block_sizes[1]
        if length % size:
            exists = jnp.broadcast_to(self.index(of_keys=True), self.shape) < length
            visible = exists if visible is None else visible & exists
        return visible

    def existing(self, *arrays: Array) -> list[Array]:
        """The arrays, 0 beyond the lengths: there a score mod may have an infinite derivative, and 0·∞ is NaN."""
        for of_keys, (length, size) in enumerate(zip(self.plan.lengths, self.plan.block_sizes)):
            if length % size:
                exists = jnp.broadcast_to(self.index(bool(of_keys)), self.shape) < length
                arrays = [jnp.where(exists, x, 0) for x in arrays]
        return list(arrays)

    def kept(self, *arrays: Array) -> list[Array]:
        keeps = self.plan.programs.keeps(*self.values("keeps"))
        return [jnp.where(keeps, x, 0) for x in arrays]


class Diagonals(NamedTuple):
    """Some rows of a tile of a vector of distances: row r and column c take the entry at start + c − r.

    A rotation moves row r by r, so the vector is laid out with the distances of the first row first, the rest last.
    """

    rows: int
    columns: int
    start: Array
    by_hardware: bool

    def _parts(self):
        """(slice of the vector, slice of the layout)."""
        aligned = LANES if self.rows % LANES == 0 and self.columns % LANES == 0 else 1
        first, below = (pl.multiple_of(at, aligned) for at in (self.start, self.start - self.rows))
        return (
            (pl.ds(first, self.columns), slice(0, self.columns)),
            (pl.ds(below, self.rows), slice(self.columns, self.columns + self.rows)),
        )

    def spread(self, ref) -> Array:
        """`[rows, columns]` of a vector `[1, n]`."""
        laid_out = jnp.concatenate([ref[:, at] for at, _ in self._parts()], axis=1)
        laid_out = jnp.broadcast_to(laid_out, (self.rows, self.rows + self.columns))
        if self.by_hardware:
            return pltpu.roll(laid_out, 0, 1, stride=1, stride_axis=0)[:, : self.columns]
        return self._rotated(laid_out, left=False)[:, : self.columns]

    def _rotated(self, x: Array, left: bool) -> Array:
        """x with row r rotated by r lanes, one bit of r after the other."""
        row = lax.broadcasted_iota(jnp.int32, x.shape, 0)
        for bit in range((self.rows - 1).bit_length()):
            x = jnp.where(row >> bit & 1 == 1, pltpu.roll(x, x.shape[1] - 2**bit if left else 2**bit, 1), x)
        return x

    def collect(self, ref, x: Array) -> None:
        """Adds the sums of `[rows, columns]` along its diagonals to a vector: the transpose of `spread`."""
        x = jnp.concatenate([x, jnp.zeros((self.rows, self.rows), x.dtype)], axis=1)
        sums = self._rotated(x, left=True).sum(axis=0, keepdims=True)  # which no hardware does
        for at, of_layout in self._parts():
            ref[:, at] += sums[:, of_layout]


def scalar(ref, example, head):
    """The entry of an array `[B or 1, H or 1]` in scalar memory."""
    return ref[example if ref.shape[0] > 1 else 0, head if ref.shape[1] > 1 else 0]


def wide(column: Array, width: int) -> Array:
    """A column `[n, LANES]`, all of whose lanes are equal, with `width` lanes."""
    return jnp.tile(column, (1, pl.cdiv(width, LANES)))[:, :width]


def column(row: Array) -> Array:
    """`[1, n]` as a column."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def row(x: Array) -> Array:
    """A column as `[1, n]`."""
    return x.T[:1]


def fill_columns(refs: Terms, columns: Terms) -> None:
    """Makes the columns of a new row of tiles."""
    for one, scratch in zip(jax.tree.leaves(refs, is_leaf=_is_none), jax.tree.leaves(columns, is_leaf=_is_none)):
        if scratch is not None:
            scratch[...] = column(one[...])


def _is_none(x):
    return x is None


def _product(a: Array, b: Array, of_rows: bool = False) -> Array:
    """a·b, or a·bᵀ (`of_rows`), accumulated in float32."""
    return lax.dot_general(a, b, (((1,), (int(of_rows),)), ((), ())), preferred_element_type=jnp.float32)


def _products_of(tile: Tile, outer, inner) -> Array:
    """Raw logits, `[outer, inner]`."""
    products, factor = _product(outer[...], inner[...], of_rows=True), tile.plan.factor
    return products if factor == 1 else products * factor


def _each_kind(plan: Plan, kind, body) -> None:
    for one in plan.tile_kinds:
        pl.when(kind == one)(functools.partial(body, one == PARTIAL))


def _exp(plan: Plan, x: Array) -> Array:
    """e^x where the logits are natural, 2^x where they are of base 2; x is a difference of logits."""
    return jnp.exp2(x) if plan.programs.logits is None else jnp.exp(x)


# Forward


class Softmax(NamedTuple):
    """The running softmax of a row of tiles, in scratch memory; all lanes of max and denominator are equal."""

    running_max: Array  # [queries, LANES]
    denominator: Array  # [queries, LANES]
    accumulator: Array  # [queries, Dv]


def forward(tile: Tile, out, log_sums, state: Softmax) -> None:
    """out and (max, log_sum), one tile after another."""

    @pl.when(tile.visit.is_first)
    def _start():
        state.running_max[...] = jnp.full_like(state.running_max, _MASKED)
        state.denominator[...] = jnp.zeros_like(state.denominator)
        state.accumulator[...] = jnp.zeros_like(state.accumulator)
        fill_columns(tile.refs.terms, tile.columns)

    _each_kind(tile.plan, tile.visit.kind, functools.partial(_forward_tile, tile, state))

    @pl.when(tile.visit.is_last)
    def _finish():
        _write_softmax(tile, out, log_sums, state)


def _forward_tile(tile: Tile, state: Softmax, is_partial: bool) -> None:
    plan, refs = tile.plan, tile.refs
    logits = _products_of(tile, refs.q, refs.k)
    if plan.programs.logits is not None:
        logits = jnp.broadcast_to(plan.programs.logits(*tile.values("logits"), logits), tile.shape)
    visible = tile.visible() if is_partial else None
    if visible is not None:
        logits = jnp.where(visible, logits, _MASKED)
    old_max = state.running_max[...]
    running_max = jnp.maximum(old_max, logits.max(axis=1, keepdims=True))
    p = _exp(plan, logits - wide(running_max, logits.shape[1]))
    rescale = _exp(plan, old_max - running_max)
    state.running_max[...] = running_max
    state.denominator[...] = state.denominator[...] * rescale + p.sum(axis=1, keepdims=True)
    if plan.programs.keeps is not None:
        (p,) = tile.kept(p)
    v = refs.v[...]
    accumulator = state.accumulator[...] * wide(rescale, v.shape[1])
    state.accumulator[...] = accumulator + _product(p.astype(v.dtype), v)


def _write_softmax(tile: Tile, out, log_sums, state: Softmax) -> None:
    running_max, denominator, share = state.running_max[...], state.denominator[...], 1.0
    is_visible = running_max > _MASKED / 2
    if tile.refs.sinks is not None:
        sink = scalar(tile.refs.sinks, tile.example, tile.head) * tile.plan.unit
        old_max, running_max = running_max, jnp.maximum(running_max, sink)
        is_visible = running_max > _MASKED / 2
        share = _exp(tile.plan, old_max - running_max)
        denominator = denominator * share + _exp(tile.plan, sink - running_max)
    denominator = jnp.where(is_visible, denominator, 1.0)
    share = jnp.where(is_visible, share, 0.0) / (denominator * (1 - tile.plan.dropout_rate))
    out[...] = (state.accumulator[...] * wide(share, out.shape[1])).astype(out.dtype)
    shift, log_sum = log_sums
    shift[...] = row(jnp.where(is_visible, running_max, 0.0))
    log_sum[...] = row(jnp.where(is_visible, jnp.log(denominator) * tile.plan.unit, -jnp.inf))


# Backward


class _Gradients(NamedTuple):
    """A tile's contributions to the gradients; all have its shape."""

    weights: Array  # after dropout
    d_raw: Array  # of the products of queries and keys
    d_inputs: list[Array]  # of the chosen inputs of logits


def _gradients(tile: Tile, of_rows: tuple, chosen: list[int], is_partial: bool) -> _Gradients:
    """The gradients of a tile; (max, log_sum, delta) of its queries broadcast against it."""
    shift, log_sum, delta = of_rows
    plan, refs, program = tile.plan, tile.refs, tile.plan.programs.logits
    outer, inner = (refs.q, refs.d_out), (refs.k, refs.v)
    outer, inner = (inner, outer) if tile.of_keys else (outer, inner)
    raw = _products_of(tile, outer[0], inner[0])
    d_weights = _product(outer[1][...], inner[1][...], of_rows=True)
    visible = tile.visible() if is_partial else None
    logits, pull_back = raw, lambda d_logits: (d_logits, [])
    if program is not None:
        logits, pull_back = _differentiable_logits(tile, chosen, raw)
    if visible is not None:
        logits = jnp.where(visible, logits, _MASKED)
    weights = kept_weights = _exp(plan, logits - shift - log_sum)
    if plan.programs.keeps is not None:
        scale = 1 / (1 - plan.dropout_rate)
        kept_weights, d_weights = tile.kept(weights * scale, d_weights * scale)
    d_raw, d_inputs = pull_back(weights * (d_weights - delta))
    if is_partial and program is not None:
        d_raw, *d_inputs = tile.existing(d_raw, *d_inputs)
    return _Gradients(kept_weights, d_raw, d_inputs)


def _differentiable_logits(tile: Tile, chosen: list[int], raw: Array):
    """(natural logits, their VJP)."""
    program, values = tile.plan.programs.logits, tile.values("logits")

    def natural(raw, inputs):
        given = dict(zip(chosen, inputs))
        return jnp.broadcast_to(program(*(given.get(at, x) for at, x in enumerate(values)), raw), tile.shape)

    inputs = [jnp.broadcast_to(values[at], tile.shape) for at in chosen]
    return jax.vjp(natural, raw, inputs)


def _along_lanes(x: Array) -> Array:
    """Partial sums of `[n, m]` along m: `[n, LANES]`, or x where m is no multiple of LANES."""
    width = x.shape[1]
    if width % LANES:
        return x
    return sum(x[:, start : start + LANES] for start in range(0, width, LANES))


def d_queries(tile: Tile, is_first: Array, results, columns, accumulators) -> None:
    """Gradients of q, and of the scalars and the vectors of distances and queries among the inputs of logits."""
    plan, refs = tile.plan, tile.refs
    dq, d_scalars, d_distances, d_vectors = results
    dq_sum, vector_sums = accumulators
    chosen = [plan.learned(varies) for varies in ("scalar", "distance", "query")]

    @pl.when(is_first)
    def _start_head():
        for ref in (*d_scalars, *d_distances):
            ref[...] = jnp.zeros_like(ref)

    @pl.when(tile.visit.is_first)
    def _start():
        for ref in (dq_sum, *vector_sums):
            ref[...] = jnp.zeros_like(ref)
        for ref, scratch in zip((refs.shift, refs.log_sum, refs.delta), columns):
            scratch[...] = column(ref[...])
        fill_columns(refs.terms, tile.columns)

    def body(is_partial):
        of_rows = tuple(wide(x[...], tile.shape[1]) for x in columns)
        of_tile = _gradients(tile, of_rows, [at for some in chosen for at in some], is_partial)
        k = refs.k[...]
        dq_sum[...] += _product(of_tile.d_raw.astype(k.dtype), k)
        d_inputs = iter(of_tile.d_inputs)
        for ref, x in zip(d_scalars, d_inputs):
            ref[...] += x.sum(axis=0, keepdims=True)
        for ref, x in zip(d_distances, d_inputs):
            for first, one in enumerate(tile.diagonals()):
                one.collect(ref, x[first * one.rows : (first + 1) * one.rows])
        for ref, x in zip(vector_sums, d_inputs):
            ref[...] += _along_lanes(x)

    _each_kind(plan, tile.visit.kind, body)

    @pl.when(tile.visit.is_last)
    def _finish():
        dq[...] = (dq_sum[...] * plan.derivative).astype(dq.dtype)
        for ref, x in zip(d_vectors, vector_sums):
            ref[...] = x[...].T.sum(axis=0, keepdims=True)


def d_keys(tile: Tile, group: tuple, results, accumulators) -> None:
    """Gradients of k and v, summed over a group's query heads, and of the key vectors among the inputs of logits."""
    plan, refs = tile.plan, tile.refs
    dk, dv, d_vectors = results
    dk_sum, dv_sum, vector_sums = accumulators
    (member, size), vectors = group, plan.learned("key")

    @pl.when(tile.visit.is_first & (member == 0))
    def _start():
        for ref in (dk_sum, dv_sum, *vector_sums):
            ref[...] = jnp.zeros_like(ref)

    @pl.when(tile.visit.is_first | (size > 1))  # the heads of a group take turns; their vectors may differ
    def _start_head():
        fill_columns(refs.terms, tile.columns)

    def body(is_partial):
        of_rows = (refs.shift[...], refs.log_sum[...], refs.delta[...])
        of_tile = _gradients(tile, of_rows, vectors, is_partial)
        q, d_out = refs.q[...], refs.d_out[...]
        dk_sum[...] += _product(of_tile.d_raw.astype(q.dtype), q)
        dv_sum[...] += _product(of_tile.weights.astype(d_out.dtype), d_out)
        for ref, x in zip(vector_sums, of_tile.d_inputs):
            ref[member] += _along_lanes(x)

    _each_kind(plan, tile.visit.kind, body)

    @pl.when(tile.visit.is_last & (member == size - 1))
    def _finish():
        dk[...] = (dk_sum[...] * plan.derivative).astype(dk.dtype)
        dv[...] = dv_sum[...].astype(dv.dtype)
        for ref, x in zip(d_vectors, vector_sums):
            for one in range(size):
                ref[one] = x[one].T.sum(axis=0, keepdims=True)


def d_pairs(tile: Tile, is_first: Array, at: int, result) -> None:
    """Gradient of an array of pairs, input `at` of logits, summed over the examples and heads that share it."""
    refs = tile.refs

    @pl.when(is_first)
    def _start():
        result[...] = jnp.zeros_like(result)

    def body(is_partial):
        fill_columns(refs.terms, tile.columns)
        of_rows = tuple(wide(column(x[...]), tile.shape[1]) for x in (refs.shift, refs.log_sum, refs.delta))
        result[...] += _gradients(tile, of_rows, [at], is_partial).d_inputs[0]

    _each_kind(tile.plan, tile.visit.kind, body)
