"""A model with induction heads: two layers trained on repeated tokens, in half a minute."""

import functools
from typing import NamedTuple

import jax
import numpy as np
import optax

from attnlab.data.tasks import repeats
from attnlab.nn import GPT

STEPS, BATCH, LENGTH, VOCAB = 500, 64, 48, 64
TEST = 1_000_000  # batches from here on are not trained on


class Trained(NamedTuple):
    """A model, its parameters and those before training, and the losses of the last step by position, in nats."""

    model: GPT
    params: dict
    untrained: dict
    losses: np.ndarray


def model() -> GPT:
    return GPT(VOCAB, num_layers=2, num_heads=4, width=64, context=LENGTH, positions="rotary", mlp_ratio=1)


def sample(seed: int = 0, batch_size: int = 32) -> np.ndarray:
    """Repeated tokens that no model was trained on, int32 `[B, T]`."""
    return np.asarray(repeats(TEST + seed, batch_size=batch_size, length=LENGTH, vocab_size=VOCAB))


def initial(seed: int, gpt: GPT | None = None) -> dict:
    """The variables of an untrained model."""
    return _init(gpt or model())(jax.random.key(seed), np.zeros((1, 2), np.int32))


@functools.cache
def _init(gpt: GPT):
    return jax.jit(gpt.init)


@functools.cache
def _sowing(gpt: GPT):
    return jax.jit(functools.partial(gpt.apply, mutable=["intermediates"]))


def patterns(gpt: GPT, variables: dict, tokens: np.ndarray) -> np.ndarray:
    """The attention weights, `[L, B, H, T, T]`."""
    _, sown = _sowing(gpt)(variables, tokens)
    blocks = (sown["intermediates"][f"block_{layer}"] for layer in range(gpt.num_layers))
    return np.stack([block["attention"]["attention_weights"][0] for block in blocks])


@functools.cache
def trained(seed: int = 0) -> Trained:
    """Train once in this process."""
    gpt = model()
    untrained = params = initial(seed)
    # The loss falls after some 300 steps; with decaying rates, or no decay of weights, after more than 500.
    optimizer = optax.adamw(optax.linear_schedule(0, 3e-3, 50), b2=0.99, weight_decay=0.1)

    @jax.jit
    def step(params, state, tokens):
        def loss(params):
            losses = gpt.apply(params, tokens[:, :-1], targets=tokens[:, 1:])
            return losses.mean(), losses.mean(0)

        (_, losses), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, losses

    state = optimizer.init(params)
    for at in range(STEPS):
        batch = repeats(at, batch_size=BATCH, length=LENGTH, vocab_size=VOCAB, seed=seed)
        params, state, losses = step(params, state, batch)
    return Trained(gpt, params, untrained, np.asarray(losses))
