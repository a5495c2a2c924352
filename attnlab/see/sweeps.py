"""Many edits of one model in one compiled program.

The edits of one layer differ only by a mask, so they run in parallel by `vmap`, and everything before the edited value
is computed once. The edited block gets the residual stream of the unedited run, so XLA drops the blocks before it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.nn import taps
from attnlab.see.edits import Add, Put, site_key
from attnlab.see.logit_metrics import Metric, traced
from attnlab.see.models import Frame
from attnlab.see.results import Run

AXES = ("layer", "head", "position")


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Edits of one value at all its places, and the metric of each."""

    frame: Frame
    metric: Metric
    site: str  # name of the value
    over: tuple[str, ...]  # axes of the result
    chunk: int | None  # edits in parallel; all of a layer when None

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the edited value, one for each layer."""
        return tuple(path for path, names in self.frame.sites.values().items() if self.site in names)

    def run(self, inputs) -> Run:
        """The unedited run, with the values that edits need."""
        return self.frame.run(inputs, want=(self.site, *(["in"] if self.frame.sites.blocks else [])))

    def layer(self, metric: Callable, inputs, base: Run, path: str, replacement):
        """The metric with `replacement` at each place of one layer, one axis for each of `over` but "layer"."""
        value, block = base.values[self.site][path], self.frame.sites.block_of(path)
        before = {} if block is None else {site_key(block, "in"): Put(base.values["in"][block])}
        places = self.places(value.ndim)
        sizes = tuple(value.shape[place] for place in places)
        masks = jnp.asarray(_masks(value.ndim, places, sizes))

        def one(mask):
            put = {site_key(path, self.site): Put(jnp.where(mask, replacement, value))}
            return metric(self.frame.run(inputs, edits=before | put).out)

        if self.chunk is None or self.chunk >= len(masks):
            return jax.vmap(one)(masks).reshape(sizes)
        return jax.lax.map(one, masks, batch_size=self.chunk).reshape(sizes)

    def places(self, rank: int) -> list[int]:
        """The axes of the value, of `rank` axes, that `over` names after "layer"."""
        at = {"head": -3, "position": -2} if self.site == "pattern" else {"head": -2, "position": -3}
        at = {"position": -2} if self.site in taps.STREAMS else at
        return [rank + at[axis] for axis in self.over[1:]]


def sweep(frame: Frame, inputs, metric: Callable, site: str, over, chunk: int | None = None) -> tuple[Sweep, list]:
    """A checked sweep, and the arrays that its metric reads."""
    over = (over,) if isinstance(over, str) else tuple(over)
    if "layer" not in over or not set(over) <= set(AXES):
        raise ValueError(f"over = {over}: expected 'layer', and beside it 'head', 'position' or both")
    if site not in (*taps.ATTENTION, *taps.STREAMS):
        known = ", ".join((*taps.ATTENTION, *taps.STREAMS))
        raise ValueError(f"site = {site!r}: expected one of {known}")
    if site in taps.STREAMS and "head" in over:
        raise ValueError(f"site = {site!r} has no heads: leave 'head' out of over")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk = {chunk}: expected 1 or more, or None")
    program, arrays = traced(metric, jax.eval_shape(lambda inputs: frame.run(inputs).out, inputs))
    made = Sweep(frame, program, site, tuple(axis for axis in AXES if axis in over), chunk)
    if not made.paths:
        raise ValueError(
            f"site = {site!r}: the model has none that can be edited (layers of nn.scan, and layers that are "
            "called several times, can only be read)"
        )
    return made, arrays


@functools.partial(jax.jit, static_argnums=0)
def ablated(sweep: Sweep, arrays, inputs):
    """(Metrics with the mean of each place's value, the unedited run's metric)."""
    metric, base = functools.partial(sweep.metric, arrays), sweep.run(inputs)
    means = {path: _mean(base.values[sweep.site][path]) for path in sweep.paths}
    each = [sweep.layer(metric, inputs, base, path, mean) for path, mean in means.items()]
    return _stacked(each, sweep), metric(base.out)


@functools.partial(jax.jit, static_argnums=0)
def patched(sweep: Sweep, arrays, source, edited):
    """(Metrics, the edited run's, the source's)."""
    metric, base = functools.partial(sweep.metric, arrays), sweep.run(edited)
    other = sweep.frame.run(source, want=(sweep.site,))
    each = [sweep.layer(metric, edited, base, path, other.values[sweep.site][path]) for path in sweep.paths]
    return _stacked(each, sweep), metric(base.out), metric(other.out)


@functools.partial(jax.jit, static_argnums=0)
def attributed(sweep: Sweep, arrays, source, edited):
    """(Metrics to first order, the edited run's, the source's)."""
    metric = functools.partial(sweep.metric, arrays)
    other = sweep.frame.run(source, want=(sweep.site,))
    deltas = jax.tree.map(jnp.zeros_like, {path: other.values[sweep.site][path] for path in sweep.paths})

    def measured(deltas):
        edits = {site_key(path, sweep.site): Add(delta) for path, delta in deltas.items()}
        run = sweep.frame.run(edited, want=(sweep.site,), edits=edits)
        return metric(run.out), run.values[sweep.site]

    (baseline, values), gradients = jax.value_and_grad(measured, has_aux=True)(deltas)
    each = []
    for path in sweep.paths:
        change = gradients[path] * (other.values[sweep.site][path] - values[path])
        each.append(jnp.einsum(change, list(range(change.ndim)), sweep.places(change.ndim)))
    return baseline + _stacked(each, sweep), baseline, metric(other.out)


def _masks(rank: int, places: list[int], sizes: tuple[int, ...]) -> np.ndarray:
    """Bools `[N, …]` that select each of the N places of a value of `rank` axes."""
    each = np.eye(math.prod(sizes), dtype=bool).reshape(-1, *sizes, *[1] * (rank - len(sizes)))
    return np.moveaxis(each, range(1, 1 + len(sizes)), [1 + place for place in places])


def _mean(z):
    """The mean over examples and positions: all axes but heads and features."""
    return z.mean(axis=tuple(range(z.ndim - 2)), keepdims=True)


def _stacked(each: list, sweep: Sweep) -> Any:
    shapes = [x.shape for x in each]
    if len(set(shapes)) > 1:
        raise ValueError(f"the layers have {shapes} places of {sweep.site!r}: expected equal numbers of heads")
    return jnp.stack(each)
