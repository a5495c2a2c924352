"""Training of the forecaster."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tidecast.model import OVERLAP, Forecaster


def batch(levels: np.ndarray, seed: int, longest: int, hours: int):
    """Histories of different lengths, padded with 0, and the levels from `OVERLAP` hours before their ends.

    Returns:
      (history `[B, longest]`, lengths `[B]`, levels `[B, OVERLAP + hours]`), a row for each station.
    """
    rng = np.random.default_rng(seed)
    stations = np.arange(len(levels))[:, None]
    lengths = rng.integers(OVERLAP, longest + 1, len(levels))
    starts = rng.integers(0, levels.shape[1] - longest - hours, len(levels))[:, None]
    history = levels[stations, starts + np.arange(longest)]
    history = np.where(np.arange(longest) < lengths[:, None], history, 0)
    after = levels[stations, starts + lengths[:, None] + np.arange(-OVERLAP, hours)]
    return history, lengths, after


def loss_of(model: Forecaster, params, history, lengths, levels):
    """Mean squared error in m²."""
    predicted = model.apply(params, history, lengths, levels[:, :-1])
    return jnp.mean((predicted - levels[:, 1:]) ** 2)


def train(model: Forecaster, levels: np.ndarray, steps: int, longest: int = 60, hours: int = 12, seed: int = 0):
    """Parameters after `steps` steps of Adam, and the loss before each."""
    optimizer = optax.adam(3e-3)
    history, lengths, after = batch(levels, seed, longest, hours)
    params = jax.jit(model.init)(jax.random.key(seed), history, lengths, after)
    state = optimizer.init(params)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, *examples):
        loss, gradients = jax.value_and_grad(partial(loss_of, model))(params, *examples)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for number in range(steps):
        params, state, loss = step(params, state, *batch(levels, seed + number, longest, hours))
        losses.append(float(loss))
    return params, losses
