"""Markov chains: new ones in each sequence, or one chain that trigger tokens interrupt."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from attnlab.data.tasks.drawing import Number, key_of
from attnlab.types import Array

BALANCING = 30  # rounds: the columns of most matrices then sum to 1 within rounding


class Chains(NamedTuple):
    """Sequences of Markov chains.

    Attributes:
      tokens: int32 `[B, T]`, the states.
      transitions: float32 `[B, S, S]`, the probabilities of the next state (last axis) by state.
    """

    tokens: Int[Array, "B T"]
    transitions: Float[Array, "B S S"]


def chains(
    step: Number,
    *,
    batch_size: int,
    length: int,
    states: int = 3,
    doubly_stochastic: bool = False,
    seed: Number = 0,
) -> Chains:
    """Draw sequences of Markov chains, each of a chain of its own (Edelman et al. 2024); a pure function.

    The rows of the transition matrices are drawn from the flat Dirichlet distribution, the first states are uniform. So
    by Bayes' rule the probability that j follows i is (count of i j + 1) / (count of i + S), in the pairs so far.

    Args:
      step: training step.
      batch_size: B.
      length: T.
      states: S.
      doubly_stochastic: scale the columns of the matrices to sum to 1 as well: all states are then equally frequent in
        the long run, and how often each one occurred tells nothing about the next.
      seed: random seed.

    Raises:
      ValueError: a batch or a length below 1, or fewer than two states.

    >>> drawn = chains(1, batch_size=2, length=8)
    >>> drawn.tokens.shape, drawn.transitions.sum(-1).round(4).tolist()
    ((2, 8), [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    """
    if min(batch_size, length) < 1 or states < 2:
        sizes = f"batch_size = {batch_size}, length = {length} and states = {states}"
        raise ValueError(f"{sizes}: expected 1 or more, and two or more states")
    return _chains(step, seed, batch_size, length, states, doubly_stochastic)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5))
def _chains(step, seed, batch_size, length, states, doubly_stochastic):
    row_key, first_key, next_key = jax.random.split(key_of(step, seed), 3)
    transitions = jax.random.dirichlet(row_key, jnp.ones(states), (batch_size, states))
    if doubly_stochastic:
        transitions = jax.lax.fori_loop(0, BALANCING, lambda _, matrices: _balanced(matrices), transitions)
    first = jax.random.randint(first_key, (batch_size,), 0, states, jnp.int32)
    bounds = transitions.cumsum(-1)[..., :-1]  # the last one is 1

    def follow(state, u):
        following = (u[:, None] > bounds[jnp.arange(batch_size), state]).sum(-1, dtype=jnp.int32)
        return following, state

    _, tokens = jax.lax.scan(follow, first, jax.random.uniform(next_key, (length, batch_size)))
    return Chains(tokens.T, transitions)


def _balanced(matrices):
    """Columns, then rows, scaled to sum to 1 (Sinkhorn and Knopp 1967)."""
    matrices = matrices / matrices.sum(-2, keepdims=True)
    return matrices / matrices.sum(-1, keepdims=True)


def backcopy(
    step: Number,
    *,
    batch_size: int,
    length: int,
    vocab_size: int = 64,
    triggers: int = 3,
    rate: float = 0.2,
    seed: Number = 0,
) -> Int[Array, "B T"]:
    """Draw sequences of the Bigram-Backcopy task (Guo et al. 2024, section 2); a pure function of its arguments.

    Sequences begin with token 0, which occurs nowhere else. After a trigger, one of the tokens 1 … triggers, comes the
    token before it once more; after any other token the next of a Markov chain, `backcopy_chain`.

    Args:
      step: training step.
      batch_size: B.
      length: T.
      vocab_size: tokens are 0 … vocab_size − 1.
      triggers: number of trigger tokens.
      rate: probability that a trigger follows a token which is none.
      seed: random seed, also of the chain.

    Returns:
      int32 `[B, T]`.

    Raises:
      ValueError: a batch or a length below 1, no triggers, fewer than two tokens that are neither, or a rate that is
        not between 0 and 1.

    >>> tokens = backcopy(1, batch_size=2, length=64)
    >>> is_trigger = (tokens[:, 1:-1] >= 1) & (tokens[:, 1:-1] <= 3)
    >>> bool((tokens[:, 2:] == tokens[:, :-2])[is_trigger].all())
    True
    """
    if min(batch_size, length, triggers) < 1 or vocab_size < triggers + 3 or not 0 < rate < 1:
        given = f"batch_size = {batch_size}, length = {length}, vocab_size = {vocab_size}, triggers = {triggers}"
        raise ValueError(
            f"{given}, rate = {rate}: expected 1 or more, a vocabulary of triggers + 3 or more, and a rate between 0 "
            "and 1"
        )
    return _backcopy(step, seed, batch_size, length, vocab_size, triggers, rate)


def backcopy_chain(seed: Number, vocab_size: int = 64, triggers: int = 3, rate: float = 0.2) -> Float[Array, "V V"]:
    """The chain of `backcopy`: probabilities of the next token (last axis) after one that is no trigger.

    It is the same in all sequences of a seed. Tokens that are no triggers follow with probabilities that are drawn from
    a Dirichlet distribution of concentration 1/10, so that few are likely. No trigger follows the first token, which
    it would have to copy.

    >>> chain = backcopy_chain(0)
    >>> chain[5, 1:4].sum().round(3).tolist(), chain[0, 1:4].sum().tolist()
    (0.20000000298023224, 0.0)
    """
    drawn = jax.random.dirichlet(jax.random.key(seed), jnp.full(vocab_size - triggers - 1, 0.1), (vocab_size,))
    into_triggers = jnp.where(jnp.arange(vocab_size) == 0, 0.0, rate)[:, None]
    parts = [jnp.zeros((vocab_size, 1)), jnp.repeat(into_triggers / triggers, triggers, 1), drawn * (1 - into_triggers)]
    return jnp.concatenate(parts, axis=1)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5, 6))
def _backcopy(step, seed, batch_size, length, vocab_size, triggers, rate):
    bounds = backcopy_chain(seed, vocab_size, triggers, rate).cumsum(-1)

    def follow(tokens, u):
        before, token = tokens
        drawn = (u[:, None] >= bounds[token]).sum(-1, dtype=jnp.int32)
        # The sum of probabilities may fall short of 1 by rounding: the last token stands for what is missing.
        following = jnp.where((token >= 1) & (token <= triggers), before, jnp.minimum(drawn, vocab_size - 1))
        return (token, following), token

    first = jnp.zeros(batch_size, jnp.int32)
    draws = jax.random.uniform(key_of(step, seed), (length, batch_size))
    _, tokens = jax.lax.scan(follow, (first, first), draws)
    return tokens.T
