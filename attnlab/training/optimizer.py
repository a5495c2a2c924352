"""AdamW with warm-up, cosine decay, clipping, and weight decay on matrices alone."""

import jax
import optax
from ml_collections import ConfigDict


def learning_rate(config: ConfigDict, steps: int) -> optax.Schedule:
    """The learning rate at each update: a linear rise to the peak, then half a cosine down to its final fraction.

    Args:
      config: `config.optimizer`.
      steps: updates in the run; any number from 1.

    >>> from attnlab.config import default
    >>> rate = learning_rate(default().optimizer, 2000)
    >>> float(rate(100)).__round__(6), float(rate(2000)).__round__(6)
    (0.005, 0.0)
    """
    warmup, peak = min(config.warmup_steps, steps // 2), config.learning_rate
    decay = optax.cosine_decay_schedule(peak, max(steps - warmup, 1), alpha=config.final_fraction)
    if not warmup:
        return decay
    # From the first update's share of the peak: a rate of 0 would waste the update.
    return optax.join_schedules([optax.linear_schedule(peak / (warmup + 1), peak, warmup), decay], [warmup])


def make(config: ConfigDict, steps: int, *, skip_nonfinite: bool = False) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter 2019) behind clipping by the global norm (Pascanu et al. 2013).

    Args:
      config: `config.optimizer`.
      steps: updates in the run.
      skip_nonfinite: a gradient that is not finite changes nothing; its state counts them, `total_notfinite`.
    """
    optimizer = optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate(config, steps),
            b1=config.b1,
            b2=config.b2,
            weight_decay=config.weight_decay,
            mask=decayed,
        ),
    )
    return optax.apply_if_finite(optimizer, max_consecutive_errors=2**31 - 2) if skip_nonfinite else optimizer


def decayed(params) -> dict:
    """Which parameters decay: kernels and embeddings, by name, since a bias of split heads has two axes as well.

    >>> decayed({"out": {"kernel": 1, "bias": 2}})
    {'out': {'bias': False, 'kernel': True}}
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ("kernel", "embedding"), params)
