"""The effect of each head on a metric: ablation, activation patching, attribution, and paths between heads.

All edits of one call are one compiled program. The edits of one layer run side by side, by `vmap` over the gates that
say which head is edited; what comes before the layer is not batched, so it is computed once, and the layers before the
edited one are left out, as its block gets the residual stream of the unedited run.
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
      how: in place of the head's output z: "mean", its mean over the batch's examples and positions; "zero";
        "resample", its output for the next example of the batch.
      chunk: heads that run side by side, fewer for less memory; all of a layer when None.
      positions: of the model's result `[B, T, …]`, those that the metric needs, e.g. `(-1,)`; it then gets
        `[B, len(positions), …]`, and what follows the last block is computed for these alone. All when None.

    Returns:
      `Effects` with `values` `[L, H]`, the metric without each head, and its `baseline`.

    Raises:
      ValueError: as for `capture`; another `how`, a metric that is no number, layers of different numbers of heads.

    >>> from attnlab.nn import GPT
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
    """Activation patching: the metric when one value is taken from another run (Meng et al. 2022, section 2.1).

    Args:
      model, variables, chunk, positions, kwargs: as for `ablate`.
      clean, corrupt: the positional arguments of two runs of equal shapes, one array or a tuple of them each.
      metric: as for `ablate`.
      site: the value that is patched: "q", "k", "v", "pattern" or "z" of attention; "in" or "out" of blocks.
      over: the axes of the result, of "layer", "head" and "position"; values are patched at all places of the others.
        Heads of k and v are those of keys. Positions are those of queries for patterns.
      direction: "denoise" takes values from the clean run into the corrupt one; "noise" the other way.

    Returns:
      `Effects`, whose `recovered` is 0 where a patch changes nothing and 1 where it gives the other run's metric.

    Raises:
      ValueError: as for `ablate`; an unknown site, axis or direction, runs of different shapes.

    >>> from attnlab.nn import GPT
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

    The effect of a value is the gradient of the metric by it in the corrupt run, times its difference between the two
    runs, summed over the axes that are not in `over`.

    Args:
      model, variables, clean, corrupt, metric, site, over, kwargs: as for `patch`, from clean to corrupt.

    Returns:
      `Effects`, with estimates of those of `patch`.

    Raises:
      ValueError: as for `patch`.

    >>> from attnlab.nn import GPT
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
    """Path patching: the metric when one head's change reaches one later head alone (Wang et al. 2022, appendix B).

    The sender's z is that of the corrupt run, all other heads are frozen to the clean run, and the receiver's input is
    recorded; then the clean run is repeated with that input of the receiver. Feed-forward layers in between are
    computed anew: a path through them counts.

    Args:
      model, variables, clean, corrupt, metric, chunk, positions, kwargs: as for `patch`.
      senders, receivers: numbers of layers; all when None. The program grows with the product of both.
      into: what of the receiver is replaced: "q", "k" or "v"; "out" for the model's result, without receivers.

    Returns:
      `Effects` with `values` `[S, H, R, H or Hk]` for S senders and R receivers, the baseline where the receiver does
      not come after the sender; for "out" `[S, H]`.

    Raises:
      ValueError: as for `patch`; layers that the model does not have.

    >>> from attnlab.nn import GPT
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
