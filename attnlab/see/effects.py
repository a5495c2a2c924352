"""The effect of each head on a metric: ablation, activation patching, and attribution.

All edits of one call are one compiled program, see `attnlab.see.sweeps`.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.see import sweeps
from attnlab.see.models import framed
from attnlab.see.results import Effects


def ablate(model, variables, batch, metric: Callable, *, chunk: int | None = None, **kwargs) -> Effects:
    """The metric with the mean output in place of each head's, all heads in one compiled program.

    It is the mean of z over the batch's examples and positions. Zeros, as of Michel et al. 2019, are what later layers
    may never have seen; for those use `edited` with `Put(0.0, where=…)`.

    Args:
      model, variables, kwargs: as for `capture`.
      batch: the model's positional arguments, one array or a tuple of them.
      metric: a number of the model's result, e.g. `lambda logits: logits[:, -1, 3].mean()`.
      chunk: heads computed in parallel, fewer for less memory; all of a layer when None.

    Returns:
      `Effects` with `values` `[L, H]`, the metric without each head, and its `baseline`.

    Raises:
      ValueError: as for `capture`; a metric that is not a number, layers that differ in heads.

    >>> model = GPT(vocab_size=10, num_layers=2, num_heads=2, width=8, context=6)
    >>> tokens = jnp.array([[1, 2, 3], [4, 5, 6]])
    >>> params = model.init(jax.random.key(0), tokens)
    >>> effects = ablate(model, params, tokens, lambda logits: logits[:, -1, 0].mean())
    >>> effects.values.shape, effects.axes
    ((2, 2), ('layer', 'head'))
    """
    frame, inputs = framed(model, variables, _args(batch), kwargs)
    sweep, arrays = sweeps.sweep(frame, inputs, metric, "z", ("layer", "head"), chunk)
    return _effects(sweep, *sweeps.ablated(sweep, arrays, inputs))


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
    """Activation patching: the corrupt run's metric with one value of the clean run (Meng et al. 2022, section 2.1).

    Args:
      model, variables, chunk, kwargs: as for `ablate`.
      clean, corrupt: the positional arguments of two runs of equal shapes, one array or a tuple of them each. With
        both exchanged, the clean run gets values of the corrupt run.
      metric: as for `ablate`.
      site: the patched value: "q", "k", "v", "pattern" or "z" of attention; "in" or "out" of blocks.
      over: axes of the result, of "layer", "head" and "position"; each patch covers all places along the other axes. k
        and v have key heads, and positions of patterns are positions of queries.

    Returns:
      `Effects`, whose `recovered` is 0 where a patch changes nothing and 1 where it restores the other run's metric.

    Raises:
      ValueError: as for `ablate`; an unknown site or axis, runs of different shapes.

    >>> model = GPT(vocab_size=10, num_layers=2, num_heads=2, width=8, context=6)
    >>> clean, corrupt = jnp.array([[1, 2, 3]]), jnp.array([[4, 2, 3]])
    >>> params = model.init(jax.random.key(0), clean)
    >>> metric = lambda logits: logits[0, -1, 1] - logits[0, -1, 4]
    >>> patch(model, params, clean, corrupt, metric, over=("layer", "head", "position")).values.shape
    (2, 2, 3)
    """
    frame, source, edited = _two_runs(model, variables, clean, corrupt, kwargs)
    sweep, arrays = sweeps.sweep(frame, edited, metric, site, over, chunk)
    return _effects(sweep, *sweeps.patched(sweep, arrays, source, edited))


def attribute(
    model,
    variables,
    clean,
    corrupt,
    metric: Callable,
    site: str = "z",
    over: Sequence[str] = ("layer", "head"),
    **kwargs,
) -> Effects:
    """Attribution patching: `patch` to first order, by one forward and one backward pass (Syed et al. 2023).

    The effect of a value is the gradient of the metric in the corrupt run, times the value's difference between the
    runs, summed over the axes that are not in `over`.

    Args:
      model, variables, clean, corrupt, metric, site, over, kwargs: as for `patch`.

    Returns:
      `Effects`, which estimate the effects of `patch`.

    Raises:
      ValueError: as for `patch`.

    >>> model = GPT(vocab_size=10, num_layers=2, num_heads=2, width=8, context=6)
    >>> clean, corrupt = jnp.array([[1, 2, 3]]), jnp.array([[4, 2, 3]])
    >>> params = model.init(jax.random.key(0), clean)
    >>> attribute(model, params, clean, corrupt, lambda logits: logits[0, -1, 1]).values.shape
    (2, 2)
    """
    frame, source, edited = _two_runs(model, variables, clean, corrupt, kwargs)
    sweep, arrays = sweeps.sweep(frame, edited, metric, site, over)
    return _effects(sweep, *sweeps.attributed(sweep, arrays, source, edited))


def _args(batch) -> tuple:
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)


def _two_runs(model, variables, clean, corrupt, kwargs):
    """The frame of a model, and the inputs of both runs."""
    clean, corrupt = _args(clean), _args(corrupt)
    shapes = [[jnp.shape(x) for x in jax.tree.leaves(args)] for args in (clean, corrupt)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"clean has shapes {shapes[0]} and corrupt {shapes[1]}: expected the same, so pad one of them")
    frame, (variables, _, options) = framed(model, variables, clean, kwargs)
    return frame, (variables, clean, options), (variables, corrupt, options)


def _effects(sweep: sweeps.Sweep, values, baseline, target=None) -> Effects:
    """The result on the host."""
    if isinstance(values, jax.core.Tracer):
        raise ValueError("effects are numbers on the host, of a program compiled here: call this outside of jax.jit")
    target = None if target is None else float(target)
    return Effects(np.asarray(values), sweep.over, sweep.paths, float(baseline), target)
