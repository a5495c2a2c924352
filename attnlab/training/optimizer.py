"""Optimizers and learning rate schedules by name, with gradient clipping, and weight decay on matrices only."""

import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict
from optax.contrib import MuonDimensionNumbers

from attnlab.support.errors import UserError

# The matrices that Muon orthogonalizes: path, rank without an axis of layers, and the axes, counted from the last, of
# inputs and outputs. All heads of a projection are one matrix.
_MATRICES = (
    (r"(query|key|value|attention/gate)/kernel$", 3, MuonDimensionNumbers(-3, (-2, -1))),
    (r"attention/out/kernel$", 3, MuonDimensionNumbers((-3, -2), -1)),
    (r"mlp/(gate|up|down)/kernel$", 2, MuonDimensionNumbers(-2, -1)),
)


class Peaks(NamedTuple):
    """The peak learning rates, as numbers or float32 scalars (arguments of a compiled step), or their schedules."""

    learning_rate: float | jax.Array | optax.Schedule
    muon_learning_rate: float | jax.Array | optax.Schedule


def peaks(config: ConfigDict) -> Peaks:
    """The peaks in `config.optimizer`."""
    return Peaks(config.learning_rate, config.muon_learning_rate)


def learning_rate(config: ConfigDict, steps: int, extensions: Sequence[dict] = ()) -> optax.Schedule:
    """The learning rate at each update: a linear rise to the peak, then the schedule `config.schedule`.

    "cosine" is half a cosine down to the final fraction of the peak (Loshchilov and Hutter 2017), "linear" a line, and
    "constant" the peak, with a line down to the final fraction over the last `config.decay_fraction` of all steps (Hu
    et al. 2024, "warmup-stable-decay").

    An extended run follows the schedule of the earlier number of steps up to the update at which it was extended, and
    the schedule of the new number from there. Where the rate had decayed it rises in one step, a warm restart
    (Loshchilov and Hutter 2017), so the run differs from a run that starts with the larger number.

    Args:
      config: `config.optimizer`.
      steps: updates in the run; any number from 1.
      extensions: earlier numbers of steps, oldest first: `{"at_step": 40, "from_steps": 40, "to_steps": 60}`.

    >>> from attnlab.config import default
    >>> rate = learning_rate(default().optimizer, 2000)
    >>> float(rate(100)).__round__(6), float(rate(2000)).__round__(6)
    (0.005, 0.0)
    >>> rate = learning_rate(default().optimizer, 4000, [{"at_step": 2000, "from_steps": 2000, "to_steps": 4000}])
    >>> float(rate(1999)).__round__(6), float(rate(2000)).__round__(6)
    (0.0, 0.002601)
    """
    return _times(config.learning_rate, _shape(config, steps, extensions))


def _times(peak, shape: optax.Schedule) -> optax.Schedule:
    return lambda count: peak * shape(count)


def _shape(config: ConfigDict, steps: int, extensions: Sequence[dict]) -> optax.Schedule:
    """The learning rate over its peak."""
    shape = _scheduled(config, steps)
    for extension in reversed(extensions):
        shape = _switched(_scheduled(config, extension["from_steps"]), shape, extension["at_step"])
    return shape


def _scheduled(config: ConfigDict, steps: int) -> optax.Schedule:
    warmup, last = min(config.warmup_steps, steps // 2), config.final_fraction
    first = 1 / (warmup + 1)  # the first update's share: a rate of 0 would waste the update
    if config.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(first, 1.0, warmup, steps, last)
    share = 1 if config.schedule == "linear" else config.decay_fraction
    decay = min(round(share * steps), steps - warmup)
    parts = [optax.linear_schedule(first, 1.0, warmup), optax.constant_schedule(1.0)]
    parts += [optax.linear_schedule(1.0, last, decay)] * bool(decay)
    return optax.join_schedules(parts, [warmup, steps - decay][: len(parts) - 1])


def _switched(before: optax.Schedule, after: optax.Schedule, at: int) -> optax.Schedule:
    return lambda count: jnp.where(count < at, before(count), after(count))


def make(
    config: ConfigDict,
    steps: int,
    *,
    tokens_per_update: int | None = None,
    extensions: Sequence[dict] = (),
    skip_nonfinite: bool = False,
    at: Peaks | None = None,
) -> optax.GradientTransformation:
    """The optimizer `config.name` behind clipping by the global norm (Pascanu et al. 2013).

    Weight decay is decoupled from the gradient (Loshchilov and Hutter 2019) and applies to kernels and embeddings. All
    take `b1`; "adamw" (Loshchilov and Hutter 2019), "lion" (Chen et al. 2023) and the AdamW of "muon" also take `b2`,
    see `decay_rate`. "sgd" is the gradient with momentum `b1`, summed and not averaged (Sutskever et al. 2013). "muon"
    (Jordan et al. 2024) moves each matrix of a layer by its orthogonalized momentum, √max(1, outputs/inputs) times
    `muon_learning_rate`, which follows the same schedule; embeddings, norms and biases are left to AdamW.

    Args:
      config: `config.optimizer`.
      steps: updates in the run.
      tokens_per_update: tokens in the batch of an update; used by `config.b2_halflife` alone.
      extensions: see `learning_rate`.
      skip_nonfinite: see `skipping_nonfinite`.
      at: learning rates in place of the config's, perhaps traced.

    Raises:
      UserError: "muon" and, when the state is made, parameters without a matrix that it knows by name.

    >>> from attnlab.config import default
    >>> make(default().optimizer, 100).init({"kernel": jnp.zeros(3)}) is not None
    True
    """
    known = {"adamw": _adamw, "muon": _muon, "lion": functools.partial(_adamw, form=optax.lion), "sgd": _sgd}
    shape = _shape(config, steps, extensions)
    rates = Peaks(*(_times(peak, shape) for peak in at or peaks(config)))
    update = known[config.name](config, rates, decay_rate(config, tokens_per_update))
    optimizer = optax.chain(optax.clip_by_global_norm(config.clip_norm), update)
    return skipping_nonfinite(optimizer) if skip_nonfinite else optimizer


def decay_rate(config: ConfigDict, tokens_per_update: int | None) -> float:
    """β₂: `config.b2`, or the rate at which a gradient's weight halves in `config.b2_halflife` tokens.

    With a half-life in tokens, the average is over the same text whatever the batch size (Marek et al. 2025).

    Raises:
      ValueError: a half-life without `tokens_per_update`.

    >>> from attnlab.config import default
    >>> config = default().optimizer
    >>> config.b2_halflife = 768.0
    >>> decay_rate(config, tokens_per_update=768)
    0.5
    """
    if not config.b2_halflife:
        return config.b2
    if tokens_per_update is None:
        raise ValueError(f"b2_halflife = {config.b2_halflife} tokens needs tokens_per_update: pass it")
    return 0.5 ** (tokens_per_update / config.b2_halflife)


def _adamw(config: ConfigDict, rates, b2: float, form=optax.adamw) -> optax.GradientTransformation:
    return form(rates.learning_rate, b1=config.b1, b2=b2, weight_decay=config.weight_decay, mask=decayed)


def _sgd(config: ConfigDict, rates, b2: float) -> optax.GradientTransformation:
    return optax.chain(
        optax.trace(config.b1),
        optax.add_decayed_weights(config.weight_decay, decayed),
        optax.scale_by_learning_rate(rates.learning_rate),
    )


def _muon(config: ConfigDict, rates, b2: float) -> optax.GradientTransformation:
    # `optax.contrib.muon` would decay norms and biases with the embeddings, or none of them.
    matrices = optax.chain(
        optax.contrib.scale_by_muon(beta=config.muon_momentum, weight_dimension_numbers=matrices_of),
        optax.stateless(_scaled_by_shape),
        optax.add_decayed_weights(config.weight_decay),
        optax.scale_by_learning_rate(rates.muon_learning_rate),
    )
    return optax.partition({"muon": matrices, "adamw": _adamw(config, rates, b2)}, _labels)


def _labels(params):
    matrices = matrices_of(params)
    if not jax.tree.leaves(matrices, is_leaf=_is_matrix):
        raise UserError(
            "config.optimizer.name = 'muon': no parameter of the model has the name of a matrix of a GPT "
            "(query/kernel, attention/out/kernel, mlp/up/kernel, …): use adamw, or pass an optimizer of your own"
        )
    return jax.tree.map(
        lambda axes: "adamw" if axes is None else "muon", matrices, is_leaf=lambda x: x is None or _is_matrix(x)
    )


def matrices_of(params):
    """For each parameter, the axes that make it a matrix for Muon, or None where AdamW is to update it.

    Args:
      params: a tree of arrays, whose layers may be stacked: axes are counted from the last one.
    """

    def axes(path, x):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return next((axes for rule, rank, axes in _MATRICES if re.search(rule, name) and x.ndim >= rank), None)

    return jax.tree_util.tree_map_with_path(axes, params)


def _is_matrix(node) -> bool:
    return isinstance(node, MuonDimensionNumbers)


def _scaled_by_shape(updates, params):
    """Updates times √max(1, outputs/inputs), so that entries have about one size (Jordan et al. 2024)."""

    def scaled(x, axes):
        inputs, outputs = (np.prod([x.shape[axis] for axis in np.atleast_1d(group)]) for group in axes)
        return x * max(1.0, outputs / inputs) ** 0.5

    return jax.tree.map(scaled, updates, matrices_of(updates))


def skipping_nonfinite(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer, except that a non-finite gradient changes nothing; `total_notfinite` in its state counts them."""
    return optax.apply_if_finite(optimizer, max_consecutive_errors=2**31 - 2)


def decayed(params) -> dict:
    """The mask of weight decay: kernels and embeddings, by name, since biases of split heads have two axes as well."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ("kernel", "embedding"), params)


def averaged(average, params, updates: jax.Array, decay: float):
    """The exponential moving average of parameters over all updates (Polyak and Juditsky 1992).

    It is corrected for its start, as Adam's moments are: the parameters after update i of n have the weight
    decay^(n−i) · (1 − decay)/(1 − decay^n), and the parameters before the first update have none.

    Args:
      average: the average over the previous updates; any for the first.
      params: after this update.
      updates: n, counted from 1, an int32 scalar.
      decay: between 0 and 1.

    >>> average = 7.0
    >>> for n, now in enumerate((1.0, 2.0), 1):
    ...     average = averaged(average, now, jnp.int32(n), 0.5)
    >>> round(float(average), 5)  # (0.5 · 1 + 2) / 1.5
    1.66667
    """
    weight = (1 - decay) / -jnp.expm1(updates * np.float32(np.log(decay)))
    return jax.tree.map(lambda old, new: old + jnp.minimum(weight, 1) * (new - old), average, params)
