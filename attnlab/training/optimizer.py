"""Optimizers and learning rate schedules by name, with gradient clipping and selective weight decay."""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers

from attnlab.config import Optimizer
from attnlab.nn.matrices import Matrix, matrix_at
from attnlab.support.errors import UserError


class Peaks(NamedTuple):
    """Peak learning rates, as numbers or float32 scalars (arguments of a compiled step); or schedules with them."""

    learning_rate: float | jax.Array | optax.Schedule
    muon_learning_rate: float | jax.Array | optax.Schedule


def peaks(config: Optimizer) -> Peaks:
    """The peaks in `config.optimizer`."""
    return Peaks(config.learning_rate, config.muon_learning_rate)


def learning_rate(config: Optimizer, steps: int, extensions: Sequence[dict] = (), peak=None) -> optax.Schedule:
    """The learning rate at each update: a linear rise to the peak, then the schedule `config.schedule`.

    "cosine" falls along half a cosine to the final fraction of the peak (Loshchilov and Hutter 2017); "linear" falls
    linearly. "constant" stays at the peak, and falls linearly during the last `config.decay_fraction` of all steps
    (Hu et al. 2024, "warmup-stable-decay").

    An extended run follows the schedule for the earlier number of steps up to the update at which it was extended, and
    then the schedule for the new number. A rate that had decayed rises in one step, which is a warm restart (Loshchilov
    and Hutter 2017). So the run differs from a run that starts with the larger number of steps.

    Args:
      config: `config.optimizer`.
      steps: updates in the run, at least 1.
      extensions: earlier numbers of steps, oldest first: `{"at_step": 40, "from_steps": 40, "to_steps": 60}`.
      peak: replaces the config's peak; may be traced.

    >>> rate = learning_rate(Optimizer(), 2000)
    >>> float(rate(100)).__round__(6), float(rate(2000)).__round__(6)
    (0.005, 0.0)
    >>> rate = learning_rate(Optimizer(), 4000, [{"at_step": 2000, "from_steps": 2000, "to_steps": 4000}])
    >>> float(rate(1999)).__round__(6), float(rate(2000)).__round__(6)
    (0.0, 0.002601)
    """
    return _times(config.learning_rate if peak is None else peak, _shape(config, steps, extensions))


def _times(peak, shape: optax.Schedule) -> optax.Schedule:
    return lambda count: peak * shape(count)


def _shape(config: Optimizer, steps: int, extensions: Sequence[dict]) -> optax.Schedule:
    """The learning rate divided by its peak."""
    shape = _scheduled(config, steps)
    for extension in reversed(extensions):
        shape = _switched(_scheduled(config, extension["from_steps"]), shape, extension["at_step"])
    return shape


def _scheduled(config: Optimizer, steps: int) -> optax.Schedule:
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
    config: Optimizer,
    steps: int,
    *,
    tokens_per_update: int | None = None,
    extensions: Sequence[dict] = (),
    skip_nonfinite: bool = False,
    at: Peaks | None = None,
    matrices: Mapping[str, Matrix] | None = None,
) -> optax.GradientTransformation:
    """Clipping by the global norm (Pascanu et al. 2013), then the optimizer `config.name`.

    Weight decay is decoupled from the gradient (Loshchilov and Hutter 2019) and applies to kernels and embeddings. All
    optimizers use `b1`. "adamw" (Loshchilov and Hutter 2019), "lion" (Chen et al. 2023) and the AdamW of "muon" also
    use `b2`, see `decay_rate`. "sgd" sums past gradients with decay `b1`, without averaging (Sutskever et al. 2013).
    "muon" (Jordan et al. 2024) moves each matrix of a layer (see `attnlab.nn.matrices`) by its orthogonalized momentum
    times √max(1, outputs/inputs) · `muon_learning_rate`, on the same schedule; AdamW updates all else.

    Args:
      config: `config.optimizer`.
      steps: updates in the run.
      tokens_per_update: tokens in the batch of an update; used only by `config.b2_halflife`.
      extensions: see `learning_rate`.
      skip_nonfinite: see `skipping_nonfinite`.
      at: peak learning rates that replace the config's; may be traced.
      matrices: the model's matrices, from `attnlab.nn.matrices.matrices_of`; used only by "muon".

    Raises:
      UserError: "muon" without matrices.

    >>> make(Optimizer(), 100).init({"kernel": jnp.zeros(3)}) is not None
    True
    """
    muon = functools.partial(_muon, matrices=matrices)
    known = {"adamw": _adamw, "muon": muon, "lion": functools.partial(_adamw, form=optax.lion), "sgd": _sgd}
    shape = _shape(config, steps, extensions)
    rates = Peaks(*(_times(peak, shape) for peak in at or peaks(config)))
    update = known[config.name](config, rates, decay_rate(config, tokens_per_update))
    optimizer = optax.chain(optax.clip_by_global_norm(config.clip_norm), update)
    return skipping_nonfinite(optimizer) if skip_nonfinite else optimizer


def decay_rate(config: Optimizer, tokens_per_update: int | None) -> float:
    """β₂: `config.b2`, or the rate at which a gradient's weight halves in `config.b2_halflife` tokens.

    With a half-life in tokens, the average covers the same number of tokens at any batch size (Marek et al. 2025).

    Raises:
      ValueError: a half-life without `tokens_per_update`.

    >>> decay_rate(Optimizer(b2_halflife=768.0), tokens_per_update=768)
    0.5
    """
    if not config.b2_halflife:
        return config.b2
    if tokens_per_update is None:
        raise ValueError(f"b2_halflife = {config.b2_halflife} tokens needs tokens_per_update: pass it")
    return 0.5 ** (tokens_per_update / config.b2_halflife)


def _adamw(config: Optimizer, rates, b2: float, form=optax.adamw) -> optax.GradientTransformation:
    return form(rates.learning_rate, b1=config.b1, b2=b2, weight_decay=config.weight_decay, mask=decayed)


def _sgd(config: Optimizer, rates, b2: float) -> optax.GradientTransformation:
    return optax.chain(
        optax.trace(config.b1),
        optax.add_decayed_weights(config.weight_decay, decayed),
        optax.scale_by_learning_rate(rates.learning_rate),
    )


def _muon(config: Optimizer, rates, b2: float, matrices) -> optax.GradientTransformation:
    if not matrices:
        reason = "none were passed" if matrices is None else "no nn.Dense or other layer multiplies features"
        raise UserError(f"config.optimizer.name = 'muon' needs the model's matrices, but {reason}: use adamw")

    def axes(params):
        return jax.tree_util.tree_map_with_path(lambda path, _: _dimensions(_matrix(matrices, path)), params)

    def labels(params):
        is_matrix = functools.partial(_matrix, matrices)
        return jax.tree_util.tree_map_with_path(lambda path, _: "muon" if is_matrix(path) else "adamw", params)

    # `optax.contrib.muon` would apply weight decay either to norms, biases and embeddings alike, or to none of them.
    moved = optax.chain(
        optax.contrib.scale_by_muon(beta=config.muon_momentum, weight_dimension_numbers=axes),
        optax.stateless(lambda updates, _: jax.tree.map(_scaled_by_shape, updates, axes(updates))),
    )
    muon = optax.chain(
        _on_parts(moved, matrices),
        optax.add_decayed_weights(config.weight_decay),
        optax.scale_by_learning_rate(rates.muon_learning_rate),
    )
    return optax.partition({"muon": muon, "adamw": _adamw(config, rates, b2)}, labels)


def _matrix(matrices: Mapping[str, Matrix], path) -> Matrix | None:
    """The matrix at the path of a parameter, or of one part of a fused parameter; None if there is none."""
    return matrix_at(matrices, [key for key in path if not isinstance(key, jax.tree_util.SequenceKey)])


def _dimensions(matrix: Matrix) -> MuonDimensionNumbers:
    return MuonDimensionNumbers(matrix.inputs, matrix.outputs)


def _on_parts(transform: optax.GradientTransformation, matrices) -> optax.GradientTransformation:
    """Apply a transformation separately to each matrix of a fused parameter."""

    def parts(path, x):
        fused = _matrix(matrices, path).fused
        return jnp.split(x, np.cumsum(fused)[:-1], axis=-1) if fused else x

    split = functools.partial(jax.tree_util.tree_map_with_path, parts)

    def update(updates, state, params=None):
        moved, state = transform.update(split(updates), state, split(params))
        return jax.tree.map(lambda _, x: jnp.concatenate(x, -1) if isinstance(x, list) else x, updates, moved), state

    return optax.GradientTransformation(lambda params: transform.init(split(params)), update)


def _scaled_by_shape(x, axes: MuonDimensionNumbers):
    """An update times √max(1, outputs/inputs): then its RMS is about 1/√inputs for any shape (Jordan et al. 2024)."""
    inputs, outputs = (np.prod([x.shape[axis] for axis in group]) for group in axes)
    return x * max(1.0, outputs / inputs) ** 0.5


def skipping_nonfinite(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Wrap an optimizer to skip updates whose gradients are not finite; `total_notfinite` in its state counts them."""
    return optax.apply_if_finite(optimizer, max_consecutive_errors=2**31 - 2)


def decayed(params) -> dict:
    """The mask of weight decay: kernels and embeddings, by name, because biases with an axis of heads are 2D too."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ("kernel", "embedding"), params)


def averaged(average, params, updates: jax.Array, decay: float):
    """The exponential moving average of parameters over all updates (Polyak and Juditsky 1992).

    Its initial value has no influence, as with Adam's bias-corrected moments: the parameters after update i of n have
    the weight decay^(n−i) · (1 − decay)/(1 − decay^n), and the parameters before the first update have weight 0.

    Args:
      average: the average over the previous updates; any value at the first update.
      params: the parameters after this update.
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
