"""The kernels: for each block of rows, two warpgroups compute 64 rows each, and a third streams tiles by TMA.

Each block has a list of 128 × 128 tiles, FULL tiles first; a kernel with narrower tiles visits each of them in parts.
No two blocks add to the same result, so sums have a fixed order and equal inputs give equal bits.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mg

from attnlab.ops.mosaic.programs import LOG2E, ROWS, TILE, Program, evaluate, with_pullback

GROUPS = TILE // ROWS  # warpgroups that compute
WGMMA = mg.Layout.WGMMA
LOWEST = float(np.finfo(np.float32).min)  # the first running max: no finite score is lower, and LOWEST − LOWEST is 0
# By features per head: (columns per tile, tiles in flight) of the forward, dq and dk/dv kernels, on an H100.
TILES = {64: ((128, 3), (128, 2), (64, 3)), 128: ((128, 2), (64, 2), (64, 2))}


class KernelPlan(NamedTuple):
    """The static part of a call with its batch axes merged into one.

    Attributes:
      mask, mod: the programs of mask and score mods; the mask's operands come first.
      group: query heads per key head.
      interpret: parameters of JAX's interpreter; None for the device.
    """

    mask: Program | None
    mod: Program | None
    scale: float
    group: int
    has_sinks: bool = False
    interpret: Any = None

    __hash__ = object.__hash__  # programs are functions, so a plan equals only itself
    __eq__ = object.__eq__

    @property
    def unit(self) -> float:
        """The factor from scores to exponents of 2; it includes `scale` unless the scores are scaled already."""
        return LOG2E * (1.0 if self.mod or self.scale <= 0 else self.scale)

    @property
    def per_logit(self) -> float:
        """The unit of a row's max, per logit: 1 with a mod, otherwise log₂ e, for a max in exponents of 2.

        A mod can return scores of any size, such as −1e30 instead of a mask. In logits, a score minus the row's max is
        exact. A max in exponents is rounded, and 2 to the power of the rounding error can overflow. Without a mod,
        this would take a score beyond 2³⁰ in exponents, and a max in exponents saves one operation per pair.
        """
        return 1.0 if self.mod else LOG2E

    def maximum(self, scores):
        """The max of each row of scores, in the unit of `per_logit`."""
        largest = scores.max(axis=1)
        return largest if self.mod else largest * self.unit

    def power(self, scores, maximum):
        """e^(logit − max) for scores and their rows' maxima, in the same shape."""
        return jnp.exp2((scores - maximum) * self.unit if self.mod else scores * self.unit - maximum)

    def shrink(self, before, after):
        """The factor that rescales the sums of a row when its max changes from `before` to `after`."""
        return jnp.exp2((before - after) * LOG2E if self.mod else before - after)

    @property
    def learned(self) -> tuple[int, ...]:
        """The indices of the mods' operands that have gradients."""
        operands = self.mod.operands if self.mod else ()
        return tuple(n for n, x in enumerate(operands) if x.is_learned)

    def learned_of(self, keys: bool) -> tuple[int, ...]:
        """The `learned` operands whose gradients `backward_keys` sums if `keys`, otherwise `backward_queries`."""
        return tuple(n for n in self.learned if (self.mod.operands[n].along == "keys") == keys)


class _Tile(NamedTuple):
    """A tile of scores within a kernel; `starts` are the indices of its first row and column."""

    plan: KernelPlan
    refs: tuple  # references to the operands
    example: Any
    head: Any
    starts: tuple
    shape: tuple[int, int]
    q_axis: int

    def values(self, program: Program) -> list:
        """The indices of queries and of keys, and the program's operands, each in the shape of the tile."""
        index = [self.starts[at] + mg.broadcasted_iota(jnp.int32, self.shape, at, layout=WGMMA) for at in (0, 1)]
        is_mask = program is self.plan.mask
        first = 0 if is_mask or self.plan.mask is None else len(self.plan.mask.operands)
        refs = self.refs[first : first + len(program.operands)]
        q, k = index[self.q_axis], index[1 - self.q_axis]
        return [q, k, *(self._loaded(ref, operand) for ref, operand in zip(refs, program.operands))]

    def _loaded(self, ref, operand):
        at = tuple(x if size > 1 else 0 for x, size in zip((self.example, self.head), ref.shape))
        if operand.along == "":
            return lax.broadcast_in_dim(ref[at], self.shape, [])
        axis = self.q_axis if operand.along == "queries" else 1 - self.q_axis
        if operand.along == "blocks":
            at += (lax.div(self.starts[self.q_axis], operand.rows),)
        ref = ref.at[(*at, pl.ds(self.starts[axis], self.shape[axis]))]
        x = mg.load(ref, layout=WGMMA.reduce(1 - axis), optimized=False)
        return lax.broadcast_in_dim(x, self.shape, [axis])

    def masked(self, x, other, is_partial):
        """`x` at visible pairs, `other` elsewhere."""
        if self.plan.mask is None:
            return x

        def select(x):
            q, k, *operands = self.values(self.plan.mask)
            [visible] = evaluate(self.plan.mask.trace(self.shape), q, k, *operands)
            return jnp.where(visible, x, other)

        return lax.cond(is_partial, select, lambda x: x, x)

    def modified(self, scores):
        """The scores after the score mods, before the mask."""
        scores = self._scaled(scores)
        if self.plan.mod is None:
            return scores
        q, k, *operands = self.values(self.plan.mod)
        return evaluate(self.plan.mod.trace(self.shape), q, k, scores, *operands)[0]

    def modified_with_pullback(self, scores):
        """Return (the modified scores, their pullback d → (d scores, d operands))."""
        scores = self._scaled(scores)
        if self.plan.mod is None:
            return scores, lambda d: (d, [])
        q, k, *operands = self.values(self.plan.mod)
        forward, backward = with_pullback(self.plan.mod.trace, self.shape, self.plan.learned)
        out, residuals = forward(q, k, scores, *operands)

        def pull(d):
            d_scores, *d_learned = backward(residuals, d)
            return d_scores, d_learned

        return out, pull

    def pulled(self, pull, d, at, is_partial):
        """The gradients of the scores and, summed along each row, of the learned operands `at`."""
        d_scores, d_learned = pull(d)
        if self.plan.mod is None:
            return d_scores, []
        # At masked pairs a mod's derivative may be NaN, even times 0.
        d_learned = [self.masked(d_learned[n], 0.0, is_partial).sum(axis=1) for n in at]
        return self.masked(d_scores, 0.0, is_partial), d_learned

    def _scaled(self, scores):
        return scores * self.plan.scale if self.plan.mod or self.plan.scale <= 0 else scores


def _rows(x, shape):
    return lax.broadcast_in_dim(x, shape, [0])


def _full(shape, value, layout=WGMMA):
    return mg.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def _vector(value):
    return _full((ROWS,), value, WGMMA.reduce(1))


def _product(a, b, shape):
    """Compute a @ b in new accumulators and wait for it."""

    def run(acc):
        mg.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(run, mg.ACC(shape, jnp.float32))


def _accumulated(plan: KernelPlan, *products: tuple) -> list:
    """Compute acc + a @ b for each (acc, a, b), with one wait for all."""
    if plan.interpret is not None:  # JAX's interpreter has neither run_state nor WGMMA on registers
        return [acc + jnp.dot(*(x[...].astype(jnp.float32) for x in factors)) for acc, *factors in products]

    def run(refs):
        for ref, (_, a, b) in zip(refs, products):
            mg.wgmma(ref, a, b)

    return list(pl.run_state(run)(tuple(mg.ACC.init(acc) for acc, *_ in products)))


def _tiled(shape, dtype):
    return mg.SMEM(shape, dtype, transforms=(mg.TilingTransform((8, 64)), mg.SwizzleTransform(128)))


def _store(results, me, b, h, rows) -> None:
    """Write warpgroup `me`'s rows of each result: (value, buffer, reference to `[B, T, H, D]` or `[B, H, T]`)."""
    for x, smem, _ in results:
        smem.at[me][...] = x
    mg.commit_smem()
    for x, smem, ref in results:
        mg.copy_smem_to_gmem(smem.at[me], ref.at[b, rows, h] if x.ndim == 2 else ref.at[b, h, rows])
    mg.wait_smem_to_gmem(0)


def _streamed(count, stages: int, consumed, fetch: Callable) -> None:
    """Run the copying warpgroup's loop: fetch(step, slot, waits) for all steps, as slots are released."""
    mg.set_max_registers(40, action="decrease")
    for slot in range(stages):
        pl.when(slot < count)(functools.partial(fetch, slot, slot, (lambda: None,) * len(consumed)))

    @pl.loop(0, count - stages)
    def _(step):
        slot = lax.rem(step, stages)
        waits = [functools.partial(mg.barrier_wait, barrier.at[slot]) for barrier in consumed]
        fetch(step + stages, slot, waits)

    @pl.loop(jnp.maximum(count - stages, 0), count)  # each phase of a barrier must be awaited
    def _(step):
        for barrier in consumed:
            mg.barrier_wait(barrier.at[lax.rem(step, stages)])


class _List(NamedTuple):
    """The tiles that a block of rows visits, in `parts` steps per tile, once for each of `heads` heads."""

    refs: tuple  # columns `[B or 1, H or 1, n, m]`, counts `[B or 1, H or 1, n, 2]` of FULL and not EMPTY tiles
    at: tuple
    parts: int
    heads: int = 1

    @classmethod
    def of(cls, refs, example, head, block, parts, heads=1):
        lead = (x if size > 1 else 0 for x, size in zip((example, head), refs[1].shape))
        return cls(refs, (*lead, block), parts, heads)

    @property
    def steps(self):
        """Steps over this head's list of tiles."""
        return self.refs[1][(*self.at, 1)] * self.parts

    def head(self, step):
        return lax.div(step, jnp.maximum(self.steps, 1)) if self.heads > 1 else 0

    def start(self, step):
        """The first column of a step's part of a tile."""
        step = step - self.head(step) * self.steps
        column = self.refs[0][(*self.at, lax.div(step, self.parts))]
        return column * TILE + lax.rem(step, self.parts) * (TILE // self.parts)

    def is_partial(self, step):
        step = step - self.head(step) * self.steps
        return step >= self.refs[1][(*self.at, 0)] * self.parts


def forward(plan: KernelPlan, q, k, v, sinks, lists, operands):
    """Return (out `[B, T, H, D]`, max `[B, H, T]` in the unit of `plan.per_logit`, sum `[B, H, T]`)."""
    batch, length, heads, size = q.shape
    columns, stages = TILES[size][0]
    shape, blocks = (ROWS, columns), length // TILE

    def body(q_ref, k_ref, v_ref, sinks_ref, columns_ref, counts_ref, *rest):
        *refs, o_ref, m_ref, l_ref, buffers, barriers = rest
        (qo_smem, k_smem, v_smem, m_smem, l_smem), (q_in, k_in, v_in, k_out, v_out, turn) = buffers, barriers
        b, h, i, me = (lax.axis_index(name) for name in ("b", "h", "i", "wg"))
        i = blocks - 1 - i  # start with the longest lists of a causal mask
        tiles = _List.of((columns_ref, counts_ref), b, h, i, TILE // columns)
        count = tiles.steps

        def switch():  # hands the tensor cores to the other warpgroup
            mg.barrier_arrive(turn)
            mg.barrier_wait(turn)

        @pl.when(me < GROUPS)
        def _compute():
            mg.set_max_registers(232, action="increase")
            start = i * TILE + me * ROWS
            rows, mine = pl.ds(start, ROWS), qo_smem.at[me]
            mg.copy_gmem_to_smem(q_ref.at[b, rows, h], mine, q_in.at[me])
            mg.barrier_wait(q_in.at[me])
            pl.when(count > 0)(lambda: mg.barrier_wait(k_in.at[0]))
            pl.when(me == 1)(switch)

            def step(j, carry):
                acc, m, l = carry
                slot = lax.rem(j, stages)
                tile = _Tile(plan, refs, b, h, (start, tiles.start(j)), shape, 0)

                def scores(acc_ref):
                    mg.wgmma(acc_ref, mine, k_smem.at[slot].transpose((1, 0)))
                    switch()
                    return acc_ref[...]

                s = pl.run_scoped(scores, mg.ACC(shape, jnp.float32))
                mg.barrier_arrive(k_out.at[slot])
                s = tile.masked(tile.modified(s), -jnp.inf, tiles.is_partial(j))
                m_next = jnp.maximum(m, plan.maximum(s))
                p = plan.power(s, _rows(m_next, shape))
                shrink = plan.shrink(m, m_next)
                acc *= _rows(shrink, acc.shape)
                l = l * shrink + p.sum(axis=1)
                acc, l, m_next, p = lax.optimization_barrier((acc, l, m_next, p.astype(v.dtype)))
                mg.barrier_arrive(turn)
                mg.barrier_wait(v_in.at[slot])
                mg.barrier_wait(turn)
                next_keys = functools.partial(mg.barrier_wait, k_in.at[lax.rem(j + 1, stages)])

                def weigh(acc_ref):
                    mg.wgmma(acc_ref, p, v_smem.at[slot])
                    pl.when(j + 1 < count)(next_keys)

                if plan.interpret is not None:
                    [acc] = _accumulated(plan, (acc, p, v_smem.at[slot]))
                    pl.when(j + 1 < count)(next_keys)
                else:
                    acc = pl.run_state(weigh)(mg.ACC.init(acc))
                mg.barrier_arrive(v_out.at[slot])
                return acc, m_next, l

            m, l = _vector(LOWEST), _vector(0.0)
            if plan.has_sinks:
                sink = jnp.maximum(sinks_ref[b if sinks_ref.shape[0] > 1 else 0, h] * plan.per_logit, LOWEST)
                m, l = mg.layout_cast(lax.broadcast_in_dim(sink, (ROWS,), []), WGMMA.reduce(1)), _vector(1.0)
            acc, m, l = lax.fori_loop(0, count, step, (_full((ROWS, size), 0.0), m, l))
            pl.when(me == 0)(switch)
            acc *= _rows(1 / jnp.maximum(l, 1e-30), acc.shape)
            results = (acc.astype(q.dtype), qo_smem, o_ref), (m, m_smem, m_ref), (l, l_smem, l_ref)
            _store(results, me, b, h, rows)

        @pl.when(me == GROUPS)
        def _copy():
            keys = (k_ref, v_ref), (k_smem, v_smem), (k_in, v_in)
            _streamed(count, stages, (k_out, v_out), _fetch_keys(*keys, b, lax.div(h, plan.group), tiles, columns))

    vector = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
    keys, mine = _tiled((stages, columns, size), k.dtype), mg.SMEM((GROUPS, ROWS), jnp.float32)
    buffers = (_tiled((GROUPS, ROWS, size), q.dtype), keys, keys, mine, mine)
    ready, released = mg.Barrier(num_barriers=stages), mg.Barrier(num_arrivals=GROUPS, num_barriers=stages)
    barriers = (mg.Barrier(num_barriers=GROUPS), ready, ready, released, released, mg.Barrier(num_arrivals=GROUPS))
    out = [jax.ShapeDtypeStruct(q.shape, q.dtype), vector, vector]
    run = _kernel(plan, "forward", body, out, (batch, heads, blocks), [buffers, barriers])
    return tuple(run(q, k, v, sinks, *lists, *operands))


def _fetch_keys(refs, buffers, barriers, b, kv_head, tiles: _List, columns: int) -> Callable:
    """Return a `fetch` for `_streamed` that copies keys and values."""

    def fetch(step, slot, waits):
        keys = pl.ds(tiles.start(step), columns)
        for wait, ref, buffer, barrier in zip(waits, refs, buffers, barriers):
            wait()
            mg.copy_gmem_to_smem(ref.at[b, keys, kv_head], buffer.at[slot], barrier.at[slot])

    return fetch


def _kernel(plan: KernelPlan, name: str, body: Callable, out_type, grid: tuple[int, ...], scratch: list):
    body.__name__ = f"attention_{name}"
    options = {} if plan.interpret is None else {"interpret": plan.interpret}
    return mg.kernel(
        body,
        out_type=out_type,
        grid=grid,
        grid_names=("b", "h", "i"),  # the last axis varies fastest
        num_threads=GROUPS + 1,
        thread_name="wg",
        scratch_types=scratch,
        compiler_params=mg.CompilerParams(approx_math=True),
        **options,
    )


def backward_queries(plan: KernelPlan, q, k, v, do, m, delta, lists, operands):
    """Return (dq, sums `[B, H, T]` of gradients of `learned` operands not along keys); m is as in `forward`."""
    batch, length, heads, size = q.shape
    columns, stages = TILES[size][1]
    shape, blocks, learned = (ROWS, columns), length // TILE, plan.learned_of(keys=False)
    at = [plan.learned.index(n) for n in learned]

    def body(q_ref, k_ref, v_ref, do_ref, m_ref, delta_ref, columns_ref, counts_ref, *rest):
        *refs, buffers, barriers = rest
        refs, (dq_ref, *sum_refs) = refs[: len(operands)], refs[len(operands) :]
        (q_smem, do_smem, k_smem, v_smem, *sums_smem), (mine_in, k_in, v_in, k_out, v_out) = buffers, barriers
        b, h, i, me = (lax.axis_index(name) for name in ("b", "h", "i", "wg"))
        i = blocks - 1 - i
        tiles = _List.of((columns_ref, counts_ref), b, h, i, TILE // columns)

        @pl.when(me < GROUPS)
        def _compute():
            mg.set_max_registers(232, action="increase")
            start = i * TILE + me * ROWS
            rows = pl.ds(start, ROWS)
            mg.copy_gmem_to_smem(q_ref.at[b, rows, h], q_smem.at[me], mine_in.at[me])
            mg.copy_gmem_to_smem(do_ref.at[b, rows, h], do_smem.at[me], mine_in.at[me])
            m, delta = (
                mg.load(ref.at[b, h, rows], layout=WGMMA.reduce(1), optimized=False) for ref in (m_ref, delta_ref)
            )
            mg.barrier_wait(mine_in.at[me])

            def step(j, carry):
                dq, *sums = carry
                slot, is_partial = lax.rem(j, stages), tiles.is_partial(j)
                tile = _Tile(plan, refs, b, h, (start, tiles.start(j)), shape, 0)
                mg.barrier_wait(k_in.at[slot])
                s = _product(q_smem.at[me], k_smem.at[slot].transpose((1, 0)), shape)
                mg.barrier_wait(v_in.at[slot])
                s, pull = tile.modified_with_pullback(s)
                p = tile.masked(plan.power(s, _rows(m, shape)), 0.0, is_partial)
                dp = _product(do_smem.at[me], v_smem.at[slot].transpose((1, 0)), shape)
                mg.barrier_arrive(v_out.at[slot])
                ds, d_sums = tile.pulled(pull, p * (dp - _rows(delta, shape)), at, is_partial)
                [dq] = _accumulated(plan, (dq, ds.astype(k.dtype), k_smem.at[slot]))
                mg.barrier_arrive(k_out.at[slot])
                return dq, *map(jnp.add, sums, d_sums)

            zeros = (_full((ROWS, size), 0.0), *(_vector(0.0) for _ in learned))
            dq, *sums = lax.fori_loop(0, tiles.steps, step, zeros)
            dq = (dq * plan.scale).astype(q.dtype)
            _store([(dq, q_smem, dq_ref), *zip(sums, sums_smem, sum_refs)], me, b, h, rows)

        @pl.when(me == GROUPS)
        def _copy():
            keys = (k_ref, v_ref), (k_smem, v_smem), (k_in, v_in)
            _streamed(
                tiles.steps, stages, (k_out, v_out), _fetch_keys(*keys, b, lax.div(h, plan.group), tiles, columns)
            )

    mine, keys = _tiled((GROUPS, ROWS, size), q.dtype), _tiled((stages, columns, size), k.dtype)
    ready, released = mg.Barrier(num_barriers=stages), mg.Barrier(num_arrivals=GROUPS, num_barriers=stages)
    buffers = (mine, mine, keys, keys, *(mg.SMEM((GROUPS, ROWS), jnp.float32) for _ in learned))
    barriers = (mg.Barrier(num_barriers=GROUPS, num_arrivals=2), ready, ready, released, released)
    sums = [jax.ShapeDtypeStruct((batch, heads, length), jnp.float32) for _ in learned]
    out = [jax.ShapeDtypeStruct(q.shape, q.dtype), *sums]
    run = _kernel(plan, "dq", body, out, (batch, heads, blocks), [buffers, barriers])
    dq, *sums = run(q, k, v, do, m, delta, *lists, *operands)
    return dq, sums


def backward_keys(plan: KernelPlan, q, k, v, do, m, delta, lists, operands):
    """Return (dk, dv, sums `[B, Hk, Tk]` of gradients of `learned` operands along keys); m is as in `forward`."""
    (batch, length, kv_heads, size), group = k.shape, plan.group
    columns, stages = TILES[size][2]
    shape, blocks, learned = (ROWS, columns), length // TILE, plan.learned_of(keys=True)
    at = [plan.learned.index(n) for n in learned]

    def body(q_ref, k_ref, v_ref, do_ref, m_ref, delta_ref, rows_ref, counts_ref, *rest):
        *refs, buffers, barriers = rest
        refs, (dk_ref, dv_ref, *sum_refs) = refs[: len(operands)], refs[len(operands) :]
        k_smem, v_smem, q_smem, do_smem, m_smem, delta_smem, *sums_smem = buffers
        mine_in, q_in, do_in, q_out, do_out = barriers
        b, h, i, me = (lax.axis_index(name) for name in ("b", "h", "i", "wg"))
        tiles = _List.of((rows_ref, counts_ref), b, h, i, TILE // columns, group)

        @pl.when(me < GROUPS)
        def _compute():
            mg.set_max_registers(232, action="increase")
            start = i * TILE + me * ROWS
            keys = pl.ds(start, ROWS)
            mg.copy_gmem_to_smem(k_ref.at[b, keys, h], k_smem.at[me], mine_in.at[me])
            mg.copy_gmem_to_smem(v_ref.at[b, keys, h], v_smem.at[me], mine_in.at[me])
            mg.barrier_wait(mine_in.at[me])

            def step(j, carry):
                dk, dv, *sums = carry
                slot, is_partial = lax.rem(j, stages), tiles.is_partial(j)
                tile = _Tile(plan, refs, b, h * group + tiles.head(j), (start, tiles.start(j)), shape, 1)

                def across(ref):
                    x = mg.load(ref.at[slot], layout=WGMMA.reduce(0), optimized=False)
                    return lax.broadcast_in_dim(x, shape, [1])

                mg.barrier_wait(q_in.at[slot])
                s = _product(k_smem.at[me], q_smem.at[slot].transpose((1, 0)), shape)
                s, pull = tile.modified_with_pullback(s)
                p = tile.masked(plan.power(s, across(m_smem)), 0.0, is_partial)
                mg.barrier_wait(do_in.at[slot])
                dp_operands = (v_smem.at[me], do_smem.at[slot].transpose((1, 0)))
                if plan.interpret is not None:
                    [dv] = _accumulated(plan, (dv, p.astype(q.dtype), do_smem.at[slot]))
                    dp = _product(*dp_operands, shape)
                else:
                    zeros = _full(shape, 0.0)
                    dv, dp = _accumulated(plan, (dv, p.astype(q.dtype), do_smem.at[slot]), (zeros, *dp_operands))
                ds, d_sums = tile.pulled(pull, p * (dp - across(delta_smem)), at, is_partial)
                mg.barrier_arrive(do_out.at[slot])
                [dk] = _accumulated(plan, (dk, ds.astype(q.dtype), q_smem.at[slot]))
                mg.barrier_arrive(q_out.at[slot])
                return dk, dv, *map(jnp.add, sums, d_sums)

            zeros = (*(_full((ROWS, size), 0.0) for _ in "kv"), *(_vector(0.0) for _ in learned))
            dk, dv, *sums = lax.fori_loop(0, tiles.steps * group, step, zeros)
            dk, dv = (dk * plan.scale).astype(k.dtype), dv.astype(v.dtype)
            results = (dk, k_smem, dk_ref), (dv, v_smem, dv_ref), *zip(sums, sums_smem, sum_refs)
            _store(results, me, b, h, keys)

        @pl.when(me == GROUPS)
        def _copy():
            def fetch(step, slot, waits):
                rows, head = pl.ds(tiles.start(step), columns), h * group + tiles.head(step)
                waits[0]()
                mg.copy_gmem_to_smem(q_ref.at[b, rows, head], q_smem.at[slot], q_in.at[slot])
                mg.copy_gmem_to_smem(m_ref.at[b, head, rows], m_smem.at[slot], q_in.at[slot])
                waits[1]()
                mg.copy_gmem_to_smem(do_ref.at[b, rows, head], do_smem.at[slot], do_in.at[slot])
                mg.copy_gmem_to_smem(delta_ref.at[b, head, rows], delta_smem.at[slot], do_in.at[slot])

            _streamed(tiles.steps * group, stages, (q_out, do_out), fetch)

    mine, queries = _tiled((GROUPS, ROWS, size), k.dtype), _tiled((stages, columns, size), q.dtype)
    vectors, ready = mg.SMEM((stages, columns), jnp.float32), mg.Barrier(num_barriers=stages, num_arrivals=2)
    released = mg.Barrier(num_arrivals=GROUPS, num_barriers=stages)
    buffers = (mine, mine, queries, queries, vectors, vectors)
    buffers += tuple(mg.SMEM((GROUPS, ROWS), jnp.float32) for _ in learned)
    barriers = (mg.Barrier(num_barriers=GROUPS, num_arrivals=2), ready, ready, released, released)
    sums = [jax.ShapeDtypeStruct((batch, kv_heads, length), jnp.float32) for _ in learned]
    out = [jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype), *sums]
    run = _kernel(plan, "dkv", body, out, (batch, kv_heads, blocks), [buffers, barriers])
    dk, dv, *sums = run(q, k, v, do, m, delta, *lists, *operands)
    return dk, dv, sums
