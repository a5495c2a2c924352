"""The effect of each head on a metric: ablation, activation patching, attribution, and paths between heads.

All edits of one call are one compiled program, see `attnlab.see.sweeps`.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.see import sweeps
from attnlab.see.models import framed
from attnlab.see.results import Effects

HOW = ("mean", "zero", "resample")
INTO = ("q", "k", "v", "out")


def ablate(
    model,
    variables,
    batch,
    metric: Callable,
    how: str = "mean",
    chunk: int | None = None,
    *,
    positions: Sequence[int] | None = None,
    **kwargs,
) -> Effects:
    """The metric without each head (Michel et al. 2019, section 3.2), all heads in one compiled program.

    Args:
      model, variables, kwargs: as for `capture`.
      batch: the model's positional arguments, one array or a tuple of them.
      metric: a number of the model's result, e.g. `lambda logits: logits[:, -1, 3].mean()`.
      how: replacement of the head's output z: "mean" over the batch's examples and positions, "zero", or "resample",
        the output for the next example of the batch.
      chunk: heads computed in parallel, fewer for less memory; all of a layer when None.
      positions: positions of the model's result `[B, T, …]` that the metric needs, e.g. `(-1,)`; it then gets
        `[B, len(positions), …]`, and only these are computed after the last block. All when None.

    Returns:
      `Effects` with `values` `[L, H]`, the metric without each head, and its `baseline`.

    Raises:
      ValueError: as for `capture`; an unknown `how`, a metric that is not a number, layers that differ in heads.

    >>> model = GPT(vocab_size=10, num_layers=2, num_heads=2, width=8, context=6)
    >>> tokens = jnp.array([[1, 2, 3], [4, 5, 6]])
    >>> params = model.init(jax.random.key(0), tokens)
    >>> effects = ablate(model, params, tokens, lambda logits: logits[:, -1, 0].mean())
    >>> effects.values.shape, effects.axes
    ((2, 2), ('layer', 'head'))
    """
    if how not in HOW:
        raise ValueError(f"how = {how!r}: expected one of {', '.join(HOW)}")
    frame, inputs = framed(model, variables, _args(batch), kwargs)
    sweep, arrays = sweeps.sweep(frame, inputs, metric, "z", ("layer", "head"), chunk, positions)
    values, baseline, apart = sweeps.ablated(sweep, arrays, inputs, how)
    return sweep.effects(values, baseline, None, apart)


def patch(
    model,
    variables,
    clean,
    corrupt,
    metric: Callable,
    site: str = "z",
    over: Sequence[str] = ("layer", "head"),
    direction: str = "denoise",
    chunk: int | None = None,
    *,
    positions: Sequence[int] | None = None,
    **kwargs,
) -> Effects:
    """Activation patching: the metric with one value taken from another run (Meng et al. 2022, section 2.1).

    Args:
      model, variables, chunk, positions, kwargs: as for `ablate`.
      clean, corrupt: the positional arguments of two runs of equal shapes, one array or a tuple of them each.
      metric: as for `ablate`.
      site: the patched value: "q", "k", "v", "pattern" or "z" of attention; "in" or "out" of blocks.
      over: axes of the result, of "layer", "head" and "position"; each patch covers all places along the other axes. k
        and v have key heads, and positions of patterns are positions of queries.
      direction: "denoise" puts values of the clean run into the corrupt run; "noise" the reverse.

    Returns:
      `Effects`, whose `recovered` is 0 where a patch changes nothing and 1 where it restores the other run's metric.

    Raises:
      ValueError: as for `ablate`; an unknown site, axis or direction, runs of different shapes.

    >>> model = GPT(vocab_size=10, num_layers=2, num_heads=2, width=8, context=6)
    >>> clean, corrupt = jnp.array([[1, 2, 3]]), jnp.array([[4, 2, 3]])
    >>> params = model.init(jax.random.key(0), clean)
    >>> metric = lambda logits: logits[0, -1, 1] - logits[0, -1, 4]
    >>> patch(model, params, clean, corrupt, metric, over=("layer", "head", "position")).values.shape
    (2, 2, 3)
    """
    if direction not in ("denoise", "noise"):
        raise ValueError(f"direction = {direction!r}: expected 'denoise' or 'noise'")
    frame, source, edited = _two_runs(model, variables, clean, corrupt, kwargs)
    if direction == "noise":
        source, edited = edited, source
    sweep, arrays = sweeps.sweep(frame, edited, metric, site, sweeps.axes(over), chunk, positions)
    values, baseline, target, apart = sweeps.patched(sweep, arrays, source, edited)
    return sweep.effects(values, baseline, target, apart)


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
      model, variables, clean, corrupt, metric, site, over, kwargs: as for `patch` in direction "denoise".

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
    sweep, arrays = sweeps.sweep(frame, edited, metric, site, sweeps.axes(over))
    values, baseline, target = sweeps.attributed(sweep, arrays, source, edited)
    return sweep.effects(values, baseline, target)


def paths(
    model,
    variables,
    clean,
    corrupt,
    metric: Callable,
    *,
    senders: Sequence[int] | None = None,
    receivers: Sequence[int] | None = None,
    into: str = "v",
    chunk: int | None = None,
    positions: Sequence[int] | None = None,
    **kwargs,
) -> Effects:
    """Path patching: the metric when one head's change reaches only one later head (Wang et al. 2022, appendix B).

    The sender gets its z of the corrupt run, all other heads are frozen to the clean run, and the receiver's input is
    recorded; a second clean run gets that input of the receiver. Feed-forward layers in between are recomputed, so a
    path through them counts.

    Args:
      model, variables, clean, corrupt, metric, chunk, positions, kwargs: as for `patch`.
      senders, receivers: numbers of layers; all when None. The program grows with the product of both.
      into: the receiver's input, "q", "k" or "v"; "out" for the model's result, without receivers.

    Returns:
      `Effects` with `values` `[S, H, R, H or Hk]` for S senders and R receivers, the baseline where the receiver does
      not come after the sender; for "out" `[S, H]`.

    Raises:
      ValueError: as for `patch`; layers that the model does not have.

    >>> model = GPT(vocab_size=10, num_layers=2, num_heads=2, width=8, context=6)
    >>> clean, corrupt = jnp.array([[1, 2, 3]]), jnp.array([[4, 2, 3]])
    >>> params = model.init(jax.random.key(0), clean)
    >>> paths(model, params, clean, corrupt, lambda logits: logits[0, -1, 1], into="k").values.shape
    (2, 2, 2, 2)
    """
    if into not in INTO:
        raise ValueError(f"into = {into!r}: expected one of {', '.join(INTO)}")
    frame, clean_inputs, corrupt_inputs = _two_runs(model, variables, clean, corrupt, kwargs)
    sweep, arrays = sweeps.sweep(frame, clean_inputs, metric, "z", ("layer", "head"), chunk, positions)
    senders = _layers("senders", senders, len(sweep.paths))
    receivers = () if into == "out" else _layers("receivers", receivers, len(sweep.paths))
    values, baseline, target, apart = sweeps.along_paths(
        sweep, arrays, clean_inputs, corrupt_inputs, into, senders, receivers
    )
    axes = ("layer", "head") + (("receiver layer", "receiver head") if receivers else ())
    return sweep.effects(values, baseline, target, apart, axes=axes, layers=senders)


def _args(batch) -> tuple:
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)


def _layers(name, chosen, count) -> tuple[int, ...]:
    chosen = tuple(range(count)) if chosen is None else tuple(map(int, np.atleast_1d(chosen)))
    wrong = [layer for layer in chosen if not 0 <= layer < count]
    if wrong or not chosen:
        raise ValueError(f"{name} = {chosen}: expected numbers of layers from 0 to {count - 1}")
    return chosen


def _two_runs(model, variables, clean, corrupt, kwargs):
    """The frame of a model, and the inputs of both runs."""
    clean, corrupt = _args(clean), _args(corrupt)
    shapes = [[jnp.shape(x) for x in jax.tree.leaves(args)] for args in (clean, corrupt)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"clean has shapes {shapes[0]} and corrupt {shapes[1]}: expected the same, so pad one of them")
    frame, (variables, _, options) = framed(model, variables, clean, kwargs)
    return frame, (variables, clean, options), (variables, corrupt, options)
