"""The effect of each head on a metric: ablation and activation patching, all edits in one compiled program.

The edits of one layer differ only by a mask, so `vmap` runs them in parallel and computes everything before the edited
value once. The edited block starts from the unedited run's residual stream, so XLA removes the blocks before it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.nn import taps
from attnlab.see.edits import Put, site_key
from attnlab.see.logit_metrics import traced
from attnlab.see.models import ModelView, adapt
from attnlab.see.results import Effects, Run

AXES = ("layer", "head", "position")


def ablate(model, variables, batch, metric: Callable, *, chunk: int | None = None, **kwargs) -> Effects:
    """Compute the metric with each head's output replaced by its mean, for all heads in one compiled program.

    The mean of z is over the batch's examples and positions. Zeros, as in Michel et al. 2019, may be far from all
    values that occurred in training; to put zeros, use `edited` with `Put(0.0, where=…)`.

    Args:
      model, variables, kwargs: as for `capture`.
      batch: the model's positional arguments, one array or a tuple of them.
      metric: a function from the model's result to a number, e.g. `lambda logits: logits[:, -1, 3].mean()`.
      chunk: number of edits (here heads) that run in parallel; fewer take less memory. None for all of a layer.

    Returns:
      `Effects` with `values` `[L, H]`, the metric without each head, and its `baseline`.

    Raises:
      ValueError: as for `capture`; or the metric is not a number, or layers differ in their number of heads.

    >>> model = GPT.of(vocab_size=10, num_layers=2, num_heads=2, width=8, context=6)
    >>> tokens = jnp.array([[1, 2, 3], [4, 5, 6]])
    >>> params = model.init(jax.random.key(0), tokens)
    >>> effects = ablate(model, params, tokens, lambda logits: logits[:, -1, 0].mean())
    >>> effects.values.shape, effects.axes
    ((2, 2), ('layer', 'head'))
    """
    view, inputs = adapt(model, variables, _args(batch), kwargs)
    sweep, arrays = _sweep(view, inputs, metric, "z", ("layer", "head"), chunk)
    return _effects(sweep, *_swept(sweep, arrays, inputs))


def patch(
    model,
    variables,
    clean,
    corrupt,
    metric: Callable,
    site: str = "z",
    over: Sequence[str] = ("layer", "head"),
    *,
    chunk: int | None = None,
    **kwargs,
) -> Effects:
    """Activation patching: the corrupt run's metric with one value from the clean run (Meng et al. 2022, section 2.1).

    Args:
      model, variables, chunk, kwargs: as for `ablate`.
      clean, corrupt: positional arguments of two runs, with equal shapes; each is one array or a tuple of arrays. Swap
        them to put values of the corrupt run into the clean run.
      metric: as for `ablate`.
      site: the patched value: "q", "k", "v", "pattern" or "z" of attention; "in" or "out" of blocks.
      over: axes of the result: "layer", alone or with "head", "position" or both. Each patch covers the whole of the
        other axes. Heads of k and v are key heads, and positions of patterns are query positions.

    Returns:
      `Effects`, whose `recovered` is 0 where a patch changes nothing and 1 where it restores the other run's metric.

    Raises:
      ValueError: as for `ablate`; or an unknown site or axis, or runs of different shapes.

    >>> model = GPT.of(vocab_size=10, num_layers=2, num_heads=2, width=8, context=6)
    >>> clean, corrupt = jnp.array([[1, 2, 3]]), jnp.array([[4, 2, 3]])
    >>> params = model.init(jax.random.key(0), clean)
    >>> metric = lambda logits: logits[0, -1, 1] - logits[0, -1, 4]
    >>> patch(model, params, clean, corrupt, metric, over=("layer", "head", "position")).values.shape
    (2, 2, 3)
    """
    clean, corrupt = _args(clean), _args(corrupt)
    shapes = [[jnp.shape(x) for x in jax.tree.leaves(args)] for args in (clean, corrupt)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"clean has shapes {shapes[0]} and corrupt {shapes[1]}: expected the same, so pad one of them")
    view, (variables, _, options) = adapt(model, variables, clean, kwargs)
    source, edited = (variables, clean, options), (variables, corrupt, options)
    sweep, arrays = _sweep(view, edited, metric, site, over, chunk)
    return _effects(sweep, *_swept(sweep, arrays, edited, source))


def _args(batch) -> tuple:
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)


@dataclasses.dataclass(frozen=True)
class _Sweep:
    """One edit of the value `site` for each place (head and position) in a layer, and the metric under each edit."""

    view: ModelView
    metric: str  # equal for metrics with the same program, whatever arrays they read
    program: Callable = dataclasses.field(compare=False)  # (arrays, result) → metric
    site: str  # name of the value
    over: tuple[str, ...]  # axes of the result
    chunk: int | None  # edits in parallel; all of a layer when None

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the layers or blocks that have the value."""
        return tuple(path for path, names in self.view.sites.values().items() if self.site in names)

    def run(self, inputs) -> Run:
        """The unedited run, with the values that edits need."""
        return self.view.run(inputs, want=(self.site, *(["in"] if self.view.sites.blocks else [])))

    def layer(self, metric: Callable, inputs, base: Run, path: str, replacement):
        """The metric with `replacement` at one place of a layer at a time; its axes are `over` without "layer"."""
        value, block = base.values[self.site][path], self.view.sites.block_of(path)
        before = {} if block is None else {site_key(block, "in"): Put(base.values["in"][block])}
        masks, sizes = self.masks(value)

        def one(mask):
            put = {site_key(path, self.site): Put(jnp.where(mask, replacement, value))}
            return metric(self.view.run(inputs, edits=before | put).out)

        if self.chunk is None or self.chunk >= len(masks):
            return jax.vmap(one)(masks).reshape(sizes)
        return jax.lax.map(one, masks, batch_size=self.chunk).reshape(sizes)

    def masks(self, value) -> tuple[jax.Array, tuple[int, ...]]:
        """Bools `[N, …]`, a mask for each of the N places of a value, and the sizes of the axes whose product is N."""
        at = {"head": -3, "position": -2} if self.site == "pattern" else {"head": -2, "position": -3}
        at = {"position": -2} if self.site in taps.STREAMS else at
        places = [value.ndim + at[axis] for axis in self.over[1:]]
        sizes = tuple(value.shape[place] for place in places)
        each = np.eye(math.prod(sizes), dtype=bool).reshape(-1, *sizes, *[1] * (value.ndim - len(sizes)))
        return jnp.asarray(np.moveaxis(each, range(1, 1 + len(sizes)), [1 + place for place in places])), sizes


def _sweep(view: ModelView, inputs, metric: Callable, site: str, over, chunk: int | None) -> tuple[_Sweep, list]:
    """A checked sweep, and the arrays that its metric reads."""
    over = (over,) if isinstance(over, str) else tuple(over)
    if "layer" not in over or not set(over) <= set(AXES):
        raise ValueError(f"over = {over}: expected 'layer', alone or with 'head', 'position' or both")
    if site not in (*taps.ATTENTION, *taps.STREAMS):
        known = ", ".join((*taps.ATTENTION, *taps.STREAMS))
        raise ValueError(f"site = {site!r}: expected one of {known}")
    if site in taps.STREAMS and "head" in over:
        raise ValueError(f"site = {site!r} has no heads: remove 'head' from over")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk = {chunk}: expected 1 or more, or None")
    key, program, arrays = traced(metric, jax.eval_shape(lambda inputs: view.run(inputs).out, inputs))
    sweep = _Sweep(view, key, program, site, tuple(axis for axis in AXES if axis in over), chunk)
    if not sweep.paths:
        raise ValueError(
            f"site = {site!r}: the model has none that can be edited (layers of nn.scan, and layers that are "
            "called several times, can only be read)"
        )
    return sweep, arrays


@functools.partial(jax.jit, static_argnums=0)
def _swept(sweep: _Sweep, arrays, inputs, source=None):
    """(Metric under each edit, in the unedited run, in the source run); without a source, edits put the mean of z."""
    metric, base, target = functools.partial(sweep.program, arrays), sweep.run(inputs), None
    if source is None:
        # All axes but heads and features are examples and positions.
        put = {path: z.mean(axis=tuple(range(z.ndim - 2)), keepdims=True) for path, z in base.values["z"].items()}
    else:
        other = sweep.view.run(source, want=(sweep.site,))
        put, target = other.values[sweep.site], metric(other.out)
    each = [sweep.layer(metric, inputs, base, path, put[path]) for path in sweep.paths]
    shapes = [x.shape for x in each]
    if len(set(shapes)) > 1:
        raise ValueError(f"the layers have {shapes} places of {sweep.site!r}: expected equal numbers of heads")
    return jnp.stack(each), metric(base.out), target


def _effects(sweep: _Sweep, values, baseline, target=None) -> Effects:
    """The result on the host."""
    if isinstance(values, jax.core.Tracer):
        raise ValueError("effects are computed by a program that is compiled here: call this outside of jax.jit")
    target = None if target is None else float(target)
    return Effects(np.asarray(values), sweep.over, sweep.paths, float(baseline), target)
