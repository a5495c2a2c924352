"""AdamW with warm-up, cosine decay, gradient clipping, and weight decay on matrices only."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict


def learning_rate(config: ConfigDict, steps: int, extensions: Sequence[dict] = ()) -> optax.Schedule:
    """The learning rate at each update: a linear rise to the peak, then half a cosine down to its final fraction.

    A run that was extended follows the schedule of the earlier number of steps up to the update at which it was
    extended, and that of the new one from there. Where the rate had decayed it rises in one step, a warm restart
    (Loshchilov and Hutter 2017), and the run is not the one that had been started with the larger number.

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
    rate = _warmup_cosine(config, steps)
    for extension in reversed(extensions):
        rate = _switched(_warmup_cosine(config, extension["from_steps"]), rate, extension["at_step"])
    return rate


def _warmup_cosine(config: ConfigDict, steps: int) -> optax.Schedule:
    warmup, peak = min(config.warmup_steps, steps // 2), config.learning_rate
    # From the first update's share of the peak: a rate of 0 would waste the update.
    first, last = peak / (warmup + 1), peak * config.final_fraction
    return optax.warmup_cosine_decay_schedule(first, peak, warmup, steps, last)


def _switched(before: optax.Schedule, after: optax.Schedule, at: int) -> optax.Schedule:
    return lambda count: jnp.where(count < at, before(count), after(count))


def make(
    config: ConfigDict, steps: int, *, extensions: Sequence[dict] = (), skip_nonfinite: bool = False
) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019) behind clipping by the global norm (Pascanu et al. 2013).

    Args:
      config: `config.optimizer`.
      steps: updates in the run.
      extensions: see `learning_rate`.
      skip_nonfinite: see `skipping_nonfinite`.
    """
    optimizer = optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate(config, steps, extensions),
            b1=config.b1,
            b2=config.b2,
            weight_decay=config.weight_decay,
            mask=decayed,
        ),
    )
    return skipping_nonfinite(optimizer) if skip_nonfinite else optimizer


def skipping_nonfinite(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer, except that a non-finite gradient changes nothing; `total_notfinite` in its state counts them."""
    return optax.apply_if_finite(optimizer, max_consecutive_errors=2**31 - 2)


def decayed(params) -> dict:
    """The mask of weight decay: kernels and embeddings, by name, since biases of split heads have two axes as well.

    >>> decayed({"out": {"kernel": 1, "bias": 2}})
    {'out': {'bias': False, 'kernel': True}}
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ("kernel", "embedding"), params)
