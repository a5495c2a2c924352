"""Many edits of one model in one compiled program.

The edits of one layer differ only by a mask, so they run in parallel by `vmap`, and everything before the edited value
is computed once. The edited block gets the residual stream of the unedited run, so XLA drops the blocks before it.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.nn import taps
from attnlab.see.edits import Add, Edit, Put, site_key
from attnlab.see.logit_metrics import Metric, traced
from attnlab.see.models import Frame
from attnlab.see.results import Effects, Run

AXES = ("layer", "head", "position")


def axes(over) -> tuple[str, ...]:
    """The axes of a result in their order; ValueError for unknown axes, or without "layer"."""
    over = (over,) if isinstance(over, str) else tuple(over)
    if "layer" not in over or not set(over) <= set(AXES):
        raise ValueError(f"over = {over}: expected 'layer', and beside it 'head', 'position' or both")
    return tuple(axis for axis in AXES if axis in over)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Take(Edit):
    """Some positions of a stream, for the part after the last block."""

    positions: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    def __call__(self, value):
        return jnp.take(value, jnp.asarray(self.positions), axis=1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Then(Edit):
    """One edit after another."""

    first: Edit
    second: Edit

    def __call__(self, value):
        return self.second(self.first(value))


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Edits of one value at all its places, and the metric of each."""

    frame: Frame
    metric: Metric | Callable
    site: str  # name of the value
    over: tuple[str, ...]  # axes of the result
    chunk: int | None = None  # edits in parallel; all of a layer when None
    positions: tuple[int, ...] | None = None  # of the result that the metric gets

    def __post_init__(self):
        if self.site not in (*taps.ATTENTION, *taps.STREAMS):
            known = ", ".join((*taps.ATTENTION, *taps.STREAMS))
            raise ValueError(f"site = {self.site!r}: expected one of {known}")
        if not self.paths:
            raise ValueError(
                f"site = {self.site!r}: the model has none that can be edited (layers of nn.scan, and layers that are "
                "called several times, can only be read)"
            )
        if self.site in taps.STREAMS and "head" in self.over:
            raise ValueError(f"site = {self.site!r} has no heads: leave 'head' out of over")
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"chunk = {self.chunk}: expected 1 or more, or None")
        if self.positions is not None and not self.frame.sites.blocks:
            raise ValueError(
                "positions need a model with blocks, layers that take and return one stream: leave them out"
            )

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the edited value, one for each layer."""
        return tuple(path for path, names in self.frame.sites.values().items() if self.site in names)

    @property
    def base_values(self) -> tuple[str, ...]:
        """The values to capture in the unedited run."""
        return tuple(dict.fromkeys([self.site] + (["in"] if self.frame.sites.blocks else [])))

    def measure(self, out):
        """The metric of a result with `edits`."""
        return self.metric(out)

    def measure_whole(self, out):
        """The metric of an unedited result."""
        return self.measure(out if self.positions is None else jnp.take(out, jnp.asarray(self.positions), axis=1))

    def edits(self, base: Run, path: str, name: str, put: Put) -> dict[str, Edit]:
        """One edit, with the unedited stream before its block, and the positions after the last block."""
        block, blocks = self.frame.sites.block_of(path), self.frame.sites.blocks
        edits = {} if block is None else {site_key(block, "in"): Put(base.values["in"][block])}
        edits = _after(edits, site_key(path, name), put)
        return edits if self.positions is None else _after(edits, site_key(blocks[-1], "out"), _Take(self.positions))

    def layer(self, inputs, base: Run, path: str, replacement):
        """The metric with `replacement` at each place of one layer, one axis for each of `over` but "layer"."""
        masks, sizes = self.masks(base.values[self.site][path])

        def one(mask):
            edits = self.edits(base, path, self.site, Put(replacement, mask))
            return self.measure(self.frame.run(inputs, edits=edits).out)

        return self.side_by_side(one, masks).reshape(sizes)

    def side_by_side(self, one: Callable, masks):
        """`one` of each mask, `chunk` at a time."""
        if self.chunk is None or self.chunk >= len(masks):
            return jax.vmap(one)(masks)
        return jax.lax.map(one, masks, batch_size=self.chunk)

    def masks(self, value) -> tuple[Any, tuple[int, ...]]:
        """Bools `[N, …]` that select each place of a value, and the sizes of the axes of N."""
        at = {"head": -3, "position": -2} if self.site == "pattern" else {"head": -2, "position": -3}
        at = {"position": -2} if self.site in taps.STREAMS else at
        mask, sizes = np.ones((1,) * (value.ndim + 1), bool), []
        for axis in self.over[1:]:
            size = value.shape[at[axis]]
            shape = [1] * value.ndim
            shape[at[axis]] = size
            chosen = np.eye(size, dtype=bool).reshape(size, *shape)
            mask = (mask[:, None] & chosen[None]).reshape(-1, *np.broadcast_shapes(mask.shape[1:], chosen.shape[1:]))
            sizes.append(size)
        return jnp.asarray(mask), tuple(sizes)

    def taken_apart(self, inputs, base: Run):
        """The largest difference that `positions` make to the result, relative to its largest element."""
        if self.positions is None:
            return jnp.zeros(())
        last = self.frame.sites.blocks[-1]
        edits = {site_key(last, "in"): Put(base.values["in"][last]), site_key(last, "out"): _Take(self.positions)}
        taken, whole = self.frame.run(inputs, edits=edits).out, jnp.take(base.out, jnp.asarray(self.positions), axis=1)
        return jnp.abs(taken - whole).max() / jnp.abs(whole).max()

    def reading(self, arrays) -> "Sweep":
        """The sweep within a program, whose metric reads these arrays."""
        return dataclasses.replace(self, metric=functools.partial(self.metric, arrays))

    def effects(self, values, baseline, target=None, apart=0.0, *, axes=None, layers=None) -> Effects:
        """The result on the host; ValueError if the positions depend on the last block's output at others."""
        if isinstance(values, jax.core.Tracer):
            raise ValueError(
                "effects are numbers on the host, of a program compiled here: call this outside of jax.jit"
            )
        if not float(apart) <= 1e-3:  # rounding, of products of other shapes, is below that in bfloat16
            raise ValueError(
                f"positions = {self.positions}: the model's result there differs by {float(apart):.1e} of its largest "
                "element when the others are left out after the last block: leave positions out"
            )
        paths = self.paths if layers is None else tuple(self.paths[layer] for layer in layers)
        target = None if target is None else float(target)
        return Effects(np.asarray(values), axes or self.over, paths, float(baseline), target)


def sweep(
    frame: Frame,
    inputs,
    metric: Callable,
    site: str,
    over: tuple[str, ...],
    chunk: int | None = None,
    positions: Sequence[int] | None = None,
) -> tuple[Sweep, list]:
    """A checked sweep, and the arrays that its metric reads."""
    positions = None if positions is None else tuple(map(int, np.atleast_1d(positions)))
    made = Sweep(frame, metric, site, over, chunk, positions)
    result = jax.eval_shape(lambda inputs: frame.run(inputs).out, inputs)
    if positions is not None:
        length = result.shape[1] if len(getattr(result, "shape", ())) > 1 else 0
        if not positions or not all(-length <= position < length for position in positions):
            raise ValueError(f"positions = {positions}: expected one or more of the {length} of the model's result")
        result = jax.ShapeDtypeStruct((result.shape[0], len(positions), *result.shape[2:]), result.dtype)
    program, arrays = traced(metric, result)
    return dataclasses.replace(made, metric=program), arrays


@functools.partial(jax.jit, static_argnums=(0, 3))
def ablated(sweep: Sweep, arrays, inputs, how: str):
    """(Metrics `[L, H]`, the unedited run's, difference of `positions`)."""
    sweep = sweep.reading(arrays)
    base = sweep.frame.run(inputs, want=sweep.base_values)
    each = [sweep.layer(inputs, base, path, _ablation(base.values["z"][path], how)) for path in sweep.paths]
    return _stacked(each, sweep), sweep.measure_whole(base.out), sweep.taken_apart(inputs, base)


@functools.partial(jax.jit, static_argnums=0)
def patched(sweep: Sweep, arrays, source, edited):
    """(Metrics, the edited run's, the source's, difference of `positions`)."""
    sweep = sweep.reading(arrays)
    base = sweep.frame.run(edited, want=sweep.base_values)
    other = sweep.frame.run(source, want=(sweep.site,))
    each = [sweep.layer(edited, base, path, other.values[sweep.site][path]) for path in sweep.paths]
    measured = (sweep.measure_whole(run.out) for run in (base, other))
    return _stacked(each, sweep), *measured, sweep.taken_apart(edited, base)


@functools.partial(jax.jit, static_argnums=0)
def attributed(sweep: Sweep, arrays, source, edited):
    """(Metrics to first order, the edited run's, the source's)."""
    sweep = sweep.reading(arrays)
    other = sweep.frame.run(source, want=(sweep.site,))
    deltas = jax.tree.map(jnp.zeros_like, {path: other.values[sweep.site][path] for path in sweep.paths})

    def measured(deltas):
        edits = {site_key(path, sweep.site): Add(delta) for path, delta in deltas.items()}
        run = sweep.frame.run(edited, want=(sweep.site,), edits=edits)
        return sweep.measure(run.out), run.values[sweep.site]

    (baseline, values), gradients = jax.value_and_grad(measured, has_aux=True)(deltas)
    each = []
    for path in sweep.paths:
        change = gradients[path] * (other.values[sweep.site][path] - values[path])
        masks, sizes = sweep.masks(change)
        kept = [n for n in range(change.ndim) if masks.shape[1 + n] > 1]
        summed = change.sum(axis=[n for n in range(change.ndim) if n not in kept])
        order = np.argsort(np.argsort([-n for n in kept])) if sweep.site != "pattern" else range(len(kept))
        each.append(jnp.transpose(summed, order).reshape(sizes))
    return baseline + _stacked(each, sweep), baseline, sweep.measure(other.out)


@functools.partial(jax.jit, static_argnums=(0, 4, 5, 6))
def along_paths(sweep: Sweep, arrays, clean, corrupt, into: str, senders: tuple[int, ...], receivers: tuple[int, ...]):
    """(Metrics `[S, H, R, H]` or `[S, H]`, the clean run's, the corrupt run's, difference of `positions`)."""
    sweep = sweep.reading(arrays)
    want = sweep.base_values + ((into,) if receivers else ())
    base, other = sweep.frame.run(clean, want=want), sweep.frame.run(corrupt, want=("z",))
    baseline = sweep.measure_whole(base.out)
    receiving = dataclasses.replace(sweep, site=into) if receivers else None
    each = []
    for sender in senders:
        path = sweep.paths[sender]
        frozen = {site_key(p, "z"): Put(base.values["z"][p]) for p in sweep.paths[sender + 1 :]}
        later = [receiver for receiver in receivers if receiver > sender]

        def sent(mask, path=path, frozen=frozen, later=later):
            edits = frozen | sweep.edits(base, path, "z", Put(other.values["z"][path], mask))
            run = sweep.frame.run(clean, want=(into,) if later else (), edits=edits)
            if not receivers:
                return sweep.measure(run.out)
            reached = {r: receiving.layer(clean, base, sweep.paths[r], run.values[into][sweep.paths[r]]) for r in later}
            heads = base.values[into][path].shape[-2]
            return jnp.stack([reached.get(r, jnp.full(heads, baseline)) for r in receivers])

        each.append(sweep.side_by_side(sent, sweep.masks(base.values["z"][path])[0]))
    measured = baseline, sweep.measure_whole(other.out)
    return _stacked(each, sweep), *measured, sweep.taken_apart(clean, base)


def _ablation(z, how: str):
    if how == "zero":
        return jnp.zeros((), z.dtype)
    if how == "mean":  # over examples and positions: all axes but heads and features
        return z.mean(axis=tuple(range(z.ndim - 2)), keepdims=True)
    if z.ndim < 4:
        raise ValueError(
            f"how = 'resample' takes z of another example, and z {z.shape} has none: expected [B, T, H, D]"
        )
    return jnp.roll(z, 1, axis=0)


def _after(edits: dict, key: str, edit: Edit) -> dict:
    return {**edits, key: _Then(edits[key], edit) if key in edits else edit}


def _stacked(each, sweep):
    shapes = [x.shape for x in each]
    if len(set(shapes)) > 1:
        raise ValueError(f"the layers have {shapes} places of {sweep.site!r}: expected equal numbers of heads")
    return jnp.stack(each)
