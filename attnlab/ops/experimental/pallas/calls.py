"""The calls of the kernels: which block of which array a kernel has at each step of its grid.

The visits (`attnlab.ops.schedule.Visits`) are prefetched into scalar memory, where the index maps read them. Arrays
are padded to whole blocks here, and results are cut.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import ManualAxisType

from attnlab.ops.experimental.pallas import kernels
from attnlab.ops.experimental.pallas.kernel_types import Cotangents, Operands, Plan, Terms
from attnlab.ops.experimental.pallas.kernels import LANES, Refs, Tile
from attnlab.ops.schedule import Visit, Visits, read_visit
from attnlab.types import Array

_Shaped = Array | jax.ShapeDtypeStruct


class _Step(NamedTuple):
    example: Array
    head: Array
    kv_head: Array
    visit: Visit


class _Walk:
    """The grid of a kernel that goes along the tiles of one block of queries after another: (B, H, visits)."""

    of_keys = False
    axes = 3  # of the grid
    reduces = 1  # how many of the last axes of the grid go one after another on one core

    def __init__(self, plan: Plan, operands: Operands):
        self.plan, self.operands = plan, operands
        self.batch, self.heads = operands.q.shape[:2]
        self.kv_heads = operands.k.shape[1]
        self.group = self.heads // self.kv_heads
        self.counts = tuple(-(-length // size) for length, size in zip(plan.lengths, plan.block_sizes))
        self.outer, self.inner = plan.block_sizes[::-1] if self.of_keys else plan.block_sizes

    @property
    def words(self) -> Array:
        return self.operands.others.by_query.words

    @property
    def grid(self) -> tuple:
        return self.batch, self.heads, self._steps(self.operands.others.by_query)

    def _steps(self, visits: Visits):
        return visits.words.shape[-1] if visits.counts is None else visits.counts.max()

    def heads_at(self, ids) -> tuple:
        """(example, query head, head of keys, head of the visits)."""
        example, head, _ = ids
        return example, head, head // self.group, head

    def step(self, *ids_and_tables) -> _Step:
        """The step at these indices of the grid; the first table is the visits, in scalar memory."""
        ids, table = ids_and_tables[: self.axes], ids_and_tables[self.axes]
        example, head, kv_head, of_visits = self.heads_at(ids)
        batch, heads, steps = self.words.shape
        at = (example if batch > 1 else 0) * heads + (of_visits if heads > 1 else 0)
        return _Step(example, head, kv_head, read_visit(table[at * steps + ids[2]]))

    # Blocks of arrays

    def _spec(self, shape: tuple, place: Callable) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda *ids: place(self.step(*ids)))

    def _at(self, step: _Step, of_keys: bool) -> Array:
        return step.visit.column if of_keys != self.of_keys else step.visit.row

    def block(self, x: _Shaped, of_keys: bool) -> pl.BlockSpec:
        """A block of queries or of keys, of `[B, heads, T, features]`."""

        def place(step):
            return step.example, step.kv_head if x.shape[1] == self.kv_heads else step.head, self._at(step, of_keys), 0

        return self._spec((None, None, self.plan.block_sizes[of_keys], x.shape[-1]), place)

    def vector(self, x: _Shaped, of_keys: bool) -> pl.BlockSpec:
        """A block of `[B or 1, H or 1, 1, T]`."""

        def place(step):
            return *_shared(x, step.example, step.head), 0, self._at(step, of_keys)

        return self._spec((None, None, 1, self.plan.block_sizes[of_keys]), place)

    def pairs(self, x: _Shaped) -> pl.BlockSpec:
        """A tile of `[B or 1, H or 1, outer, inner]`."""

        def place(step):
            return *_shared(x, step.example, step.head), step.visit.row, step.visit.column

        return self._spec((None, None, self.outer, self.inner), place)

    def drawn_tile(self) -> pl.BlockSpec:
        """One of the tiles `[1, 1, n, outer, inner]`."""
        batch, heads, *counts = self.operands.others.drawn.shape

        def place(*ids):
            step, table = self.step(*ids), ids[self.axes + 1]
            i, j = (step.visit.column, step.visit.row) if self.of_keys else (step.visit.row, step.visit.column)
            example, head = (at if size > 1 else 0 for at, size in ((step.example, batch), (step.head, heads)))
            return 0, 0, table[((example * heads + head) * counts[0] + i) * counts[1] + j], 0, 0

        return pl.BlockSpec((None, None, None, self.outer, self.inner), place)

    def of_head(self, x: _Shaped) -> pl.BlockSpec:
        """All of `[B or 1, H or 1, 1, n]` for an example and a head."""

        return self._spec((None, None, 1, x.shape[-1]), lambda step: (*_shared(x, step.example, step.head), 0, 0))

    # The arrays of terms

    def inputs(self, cotangents: Cotangents | None) -> tuple[Refs, Refs]:
        """The arrays that a kernel reads, padded, and their blocks."""
        q, k, v, others = self.operands
        q, k, v = (self.padded(x, of_keys) for x, of_keys in zip((q, k, v), (False, True, True)))
        terms = [self._terms(*of_one) for of_one in zip(self.plan.programs, others.terms)]
        arrays = Refs(q, k, v, others.sinks, Terms(*([x for x, _ in of_term] for of_term in terms)))
        blocks = Refs(
            *(self.block(x, of_keys) for x, of_keys in zip((q, k, v), (False, True, True))),
            None if others.sinks is None else pl.BlockSpec(memory_space=pltpu.SMEM),
            Terms(*([spec for _, spec in of_term] for of_term in terms)),
        )
        if cotangents is None:
            return arrays, blocks
        d_out = self.padded(cotangents.d_out, of_keys=False)
        fills = {"shift": 0.0, "log_sum": jnp.inf, "delta": 0.0}
        of_rows = {name: self._vector(getattr(cotangents, name), False, fill) for name, fill in fills.items()}
        blocks_of_rows = {name: self.vector(x, False) for name, x in of_rows.items()}
        arrays = arrays._replace(d_out=d_out, **of_rows)
        return arrays, blocks._replace(d_out=self.block(d_out, False), **blocks_of_rows)

    def _terms(self, program, arrays) -> list[tuple]:
        """(array, block) of each input of a program."""
        found = []
        for described, x in zip(program.inputs if program else (), arrays or ()):
            if x is None:
                found.append((None, None))
            elif described.varies == "scalar":
                found.append((x, pl.BlockSpec(memory_space=pltpu.SMEM)))
            elif described.varies == "distance":
                x = self.distances(x)
                found.append((x, self.of_head(x)))
            elif described.varies == "tile":
                found.append((x.swapaxes(3, 4) if self.of_keys else x, self.drawn_tile()))
            elif described.varies == "pair":
                x = self.padded(self.padded(x, of_keys=False, fill=None), of_keys=True, axis=3, fill=None)
                x = x.swapaxes(2, 3) if self.of_keys else x
                found.append((x, self.pairs(x)))
            else:
                of_keys = described.varies == "key"
                x = self._vector(x, of_keys)
                found.append((x, self.vector(x, of_keys)))
        return found

    def distances(self, x: Array) -> Array:
        """`[B or 1, H or 1, Tq + Tk − 1]`, by keys − queries, reordered by inner − outer, see `diagonals`."""
        ends = [count * size for count, size in zip(self.counts, self.plan.block_sizes)]
        before, after = (end - length for end, length in zip(ends, self.plan.lengths))
        x = jnp.pad(x, [(0, 0), (0, 0), (before + 1, after)], mode="edge")
        # Reversed, the entry of distance 0 moves from the end of the queries to the end of the keys.
        return (jnp.roll(x[..., ::-1], 1, axis=-1) if self.of_keys else x)[:, :, None]

    def _vector(self, x: Array, of_keys: bool, fill: float | None = None) -> Array:
        return self.padded(x[:, :, None], of_keys, axis=3, fill=fill)

    def padded(self, x: Array, of_keys: bool, axis: int = 2, fill: float | None = 0.0) -> Array:
        """x up to the end of the last block; by its last entry when `fill` is None."""
        missing = self.counts[of_keys] * self.plan.block_sizes[of_keys] - x.shape[axis]
        widths = [(0, missing if at == axis else 0) for at in range(x.ndim)]
        if not missing:
            return x
        return jnp.pad(x, widths, mode="edge") if fill is None else jnp.pad(x, widths, constant_values=fill)

    def columns(self) -> Terms:
        """Scratch for the vectors of the outer side among the inputs of each term."""
        outer = "key" if self.of_keys else "query"

        def scratch(described):
            if described.varies != outer:
                return None
            whole = jnp.issubdtype(described.dtype, jnp.inexact)
            return pltpu.VMEM((self.outer, LANES), jnp.float32 if whole else jnp.int32)

        return Terms(*([scratch(x) for x in program.inputs] if program else [] for program in self.plan.programs))

    def call(
        self, kernel, name: str, outputs: list, scratch: list, cotangents: Cotangents | None = None
    ) -> Sequence[Array]:
        """The results of kernel(tile, results, scratch, ids); `outputs` are (shape, type, block)."""
        arrays, blocks = self.inputs(cotangents)
        varying = (jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(arrays))
        axes = ManualAxisType(varying=frozenset().union(*varying))
        drawn = self.operands.others.drawn
        tables = [self.words.reshape(-1), *([] if drawn is None else [drawn.reshape(-1)])]

        def body(*tables_and_others):
            refs, *others = tables_and_others[len(tables) :]
            results, (columns, *more) = others[: len(outputs)], others[len(outputs) :]
            ids = [pl.program_id(axis) for axis in range(self.axes)]
            example, head, _, visit = self.step(*ids, tables_and_others[0])
            kernel(Tile(self.plan, self.of_keys, visit, example, head, refs, columns), results, more, ids)

        return pl.pallas_call(
            body,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(tables),
                grid=self.grid,
                in_specs=[blocks],
                out_specs=[block for _, _, block in outputs],
                scratch_shapes=[self.columns(), *scratch],
            ),
            out_shape=[jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=axes) for shape, dtype, _ in outputs],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel",) * (self.axes - self.reduces) + ("arbitrary",) * self.reduces
            ),
            name=name,
        )(*tables, arrays)


class _WalkOfKeys(_Walk):
    """One block of keys after another: (B, Hk, visits, query heads of a group)."""

    of_keys = True
    axes = 4
    reduces = 2

    @property
    def words(self):
        return self.operands.others.by_key.words

    @property
    def grid(self):
        return self.batch, self.kv_heads, self._steps(self.operands.others.by_key), self.group

    def heads_at(self, ids):
        example, kv_head, _, member = ids
        return example, kv_head * self.group + member, kv_head, kv_head


class _WalkOfPairs(_Walk):
    """All tiles of an array `[B or 1, H or 1, Tq, Tk]`, and for each the examples and heads that share it."""

    axes = 5
    reduces = 2

    def __init__(self, plan, operands, shape):
        super().__init__(plan, operands)
        self.own = shape[:2]

    @property
    def words(self):
        return self.operands.others.of_pairs

    @property
    def grid(self):
        shared = (n // own for n, own in zip((self.batch, self.heads), self.own))
        return *self.own, self.words.shape[-1], *shared

    def heads_at(self, ids):
        example, head = ids[0] + ids[3], ids[1] + ids[4]  # of each sum one is always 0
        return example, head, head // self.group, head


def _shared(x: _Shaped, *at) -> tuple:
    """Indices of the leading axes, 0 where they have size 1."""
    return tuple(i if size > 1 else 0 for i, size in zip(at, x.shape))


def forward(plan: Plan, operands: Operands) -> tuple[Array, tuple[Array, Array]]:
    """out `[B, H, Tq, Dv]`, and max and log_sum `[B, H, Tq]` in the kernel's logits."""
    walk, (q_size, _), value_dim = _Walk(plan, operands), plan.block_sizes, operands.v.shape[-1]
    padded = walk.counts[0] * q_size
    out = jax.ShapeDtypeStruct((walk.batch, walk.heads, padded, value_dim), operands.q.dtype)
    of_rows = jax.ShapeDtypeStruct((walk.batch, walk.heads, 1, padded), jnp.float32)
    softmax = [pltpu.VMEM((q_size, width), jnp.float32) for width in (LANES, LANES, value_dim)]

    def kernel(tile, results, scratch, _):
        kernels.forward(tile, results[0], results[1:], kernels.Softmax(*scratch))

    outputs = [(out.shape, out.dtype, walk.block(out, False))]
    outputs += [(of_rows.shape, of_rows.dtype, walk.vector(of_rows, False))] * 2
    out, *log_sums = walk.call(kernel, "attnlab_forward", outputs, softmax)
    return out[:, :, : plan.lengths[0]], tuple(x[:, :, 0, : plan.lengths[0]] for x in log_sums)


def backward(plan: Plan, operands: Operands, cotangents: Cotangents) -> tuple[Array, Array, Array, tuple]:
    """(dq, dk, dv, gradients of the inputs of logits, None for those without)."""
    dq, gradients = _d_queries(plan, operands, cotangents)
    dk, dv, of_keys = _d_keys(plan, operands, cotangents)
    gradients |= of_keys
    for at in plan.learned("pair"):
        gradients[at] = _d_pairs(plan, operands, cotangents, at)
    inputs = operands.others.terms.logits
    return dq, dk, dv, tuple(_summed(gradients[at], x) if at in gradients else None for at, x in enumerate(inputs))


def _summed(gradient: Array, x: Array) -> Array:
    """The gradient summed along the axes of examples and heads that x lacks."""
    axes = tuple(at for at in (0, 1) if x.shape[at] < gradient.shape[at])
    return gradient.sum(axis=axes, keepdims=True).astype(x.dtype)


def _d_queries(plan: Plan, operands: Operands, cotangents: Cotangents) -> tuple[Array, dict[int, Array]]:
    walk, (q_size, kv_size), q = _Walk(plan, operands), plan.block_sizes, operands.q
    padded, leading = walk.counts[0] * q_size, (walk.batch, walk.heads)
    scalars, distances, vectors = (plan.learned(varies) for varies in ("scalar", "distance", "query"))
    dq = jax.ShapeDtypeStruct((*leading, padded, q.shape[-1]), q.dtype)
    d_vector = jax.ShapeDtypeStruct((*leading, 1, padded), jnp.float32)
    ends = [count * size for count, size in zip(walk.counts, plan.block_sizes)]
    d_scalar, d_distance = (jax.ShapeDtypeStruct((*leading, 1, n), jnp.float32) for n in (kv_size, sum(ends)))
    columns = [pltpu.VMEM((q_size, LANES), jnp.float32)] * 3
    sums = [pltpu.VMEM((q_size, width), jnp.float32) for width in (q.shape[-1], *[_lanes(kv_size)] * len(vectors))]

    def kernel(tile, results, scratch, ids):
        kernels.d_queries(tile, ids[2] == 0, grouped(results), scratch[:3], (scratch[3], scratch[4:]))

    def grouped(results):
        results = iter(results)
        return next(results), *([next(results) for _ in some] for some in (scalars, distances, vectors))

    outputs = [(dq.shape, dq.dtype, walk.block(dq, False))]
    outputs += [(d_scalar.shape, jnp.float32, walk.of_head(d_scalar))] * len(scalars)
    outputs += [(d_distance.shape, jnp.float32, walk.of_head(d_distance))] * len(distances)
    outputs += [(d_vector.shape, jnp.float32, walk.vector(d_vector, False))] * len(vectors)
    results = walk.call(kernel, "attnlab_dq", outputs, [*columns, *sums], cotangents)
    dq, d_scalars, d_distances, d_vectors = grouped(results)
    start, (q_length, kv_length) = ends[0] - plan.lengths[0] + 1, plan.lengths
    found = [x[:, :, 0].sum(axis=-1) for x in d_scalars]
    found += [x[:, :, 0, start : start + q_length + kv_length - 1] for x in d_distances]
    found += [x[:, :, 0, :q_length] for x in d_vectors]
    return dq[:, :, :q_length], dict(zip((*scalars, *distances, *vectors), found))


def _d_keys(plan: Plan, operands: Operands, cotangents: Cotangents) -> tuple[Array, Array, dict[int, Array]]:
    walk, (q_size, kv_size), kv = _WalkOfKeys(plan, operands), plan.block_sizes, (operands.k, operands.v)
    padded, vectors = walk.counts[1] * kv_size, plan.learned("key")
    dk, dv = (jax.ShapeDtypeStruct((*x.shape[:2], padded, x.shape[-1]), x.dtype) for x in kv)
    sums = [pltpu.VMEM((kv_size, x.shape[-1]), jnp.float32) for x in kv]
    sums += [pltpu.VMEM((walk.group, kv_size, _lanes(q_size)), jnp.float32)] * len(vectors)

    def kernel(tile, results, scratch, ids):
        kernels.d_keys(tile, (ids[3], walk.group), (*results[:2], results[2:]), (*scratch[:2], scratch[2:]))

    outputs = [(x.shape, x.dtype, walk.block(x, True)) for x in (dk, dv)]
    of_group = walk._spec((None, walk.group, 1, kv_size), lambda step: (step.example, step.kv_head, 0, step.visit.row))
    d_vector = ((walk.batch, walk.heads, 1, padded), jnp.float32, of_group)
    dk, dv, *others = walk.call(kernel, "attnlab_dkv", [*outputs, *[d_vector] * len(vectors)], sums, cotangents)
    dk, dv = (x[:, :, : plan.lengths[1]] for x in (dk, dv))
    return dk, dv, {at: x[:, :, 0, : plan.lengths[1]] for at, x in zip(vectors, others)}


def _d_pairs(plan: Plan, operands: Operands, cotangents: Cotangents, at: int) -> Array:
    x = operands.others.terms.logits[at]
    walk = _WalkOfPairs(plan, operands, x.shape)
    padded = (count * size for count, size in zip(walk.counts, plan.block_sizes))
    result = jax.ShapeDtypeStruct((*x.shape[:2], *padded), jnp.float32)

    def kernel(tile, results, _, ids):
        kernels.d_pairs(tile, (ids[3] == 0) & (ids[4] == 0), at, results[0])

    outputs = [(result.shape, result.dtype, walk.pairs(result))]
    (result,) = walk.call(kernel, "attnlab_dpairs", outputs, [], cotangents)
    return result[:, :, : plan.lengths[0], : plan.lengths[1]]


def _lanes(width: int) -> int:
    """The lanes of partial sums along an axis, see `kernels`."""
    return width if width % LANES else LANES
