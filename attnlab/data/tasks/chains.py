"""Markov chains: a random chain for each sequence, or one chain that trigger tokens interrupt."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from attnlab.data.tasks.task_draws import Number, check_least, compiled, key_of
from attnlab.types import Array

BALANCING = 30  # rounds: the columns of most matrices then sum to 1 within rounding


class Chains(NamedTuple):
    """Sequences of Markov chains."""

    tokens: Int[Array, "B T"]  # int32 [B, T], the states
    transitions: Float[Array, "B S S"]  # float32 [B, S, S], the probabilities of the next state (last axis) by state


@compiled
def chains(
    step: Number,
    *,
    batch_size: int,
    length: int,
    states: int = 3,
    doubly_stochastic: bool = False,
    seed: Number = 0,
) -> Chains:
    """Draw sequences, each of a random Markov chain (Edelman et al. 2024).

    Transition matrices have rows from the flat Dirichlet distribution; first states are uniform. By Bayes' rule the
    probability that j follows i is (count of i j + 1) / (count of i + S), over the previous pairs.

    Args:
      states: S.
      doubly_stochastic: scale the columns to sum to 1 as well: all states are then equally frequent in the long run,
        and counts of single states predict nothing.
    """
    check_least(batch_size=batch_size, length=length)
    check_least(2, states=states)
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


@compiled
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
    """Draw sequences `[B, T]` of the Bigram-Backcopy task (Guo et al. 2024, section 2).

    Sequences begin with token 0, which occurs nowhere else. After a trigger, one of the tokens 1 … triggers, the token
    before it is repeated; after any other token follows the next of a Markov chain, `backcopy_chain`.

    Args:
      vocab_size: tokens are 0 … vocab_size − 1.
      triggers: number of trigger tokens.
      rate: probability that a trigger follows another token.
    """
    check_least(batch_size=batch_size, length=length, triggers=triggers)
    check_least(triggers + 3, vocab_size=vocab_size)
    if not 0 < rate < 1:
        raise ValueError(f"rate = {rate}: expected a rate between 0 and 1")
    bounds = backcopy_chain(seed, vocab_size, triggers, rate).cumsum(-1)

    def follow(tokens, u):
        before, token = tokens
        drawn = (u[:, None] >= bounds[token]).sum(-1, dtype=jnp.int32)
        # The sum of probabilities may fall short of 1 by rounding, hence the minimum.
        following = jnp.where((token >= 1) & (token <= triggers), before, jnp.minimum(drawn, vocab_size - 1))
        return (token, following), token

    first = jnp.zeros(batch_size, jnp.int32)
    draws = jax.random.uniform(key_of(step, seed), (length, batch_size))
    _, tokens = jax.lax.scan(follow, (first, first), draws)
    return tokens.T


def backcopy_chain(seed: Number, vocab_size: int = 64, triggers: int = 3, rate: float = 0.2) -> Float[Array, "V V"]:
    """The chain of `backcopy`: probabilities of the next token (last axis) after a token that is not a trigger.

    Other tokens follow with probabilities from a Dirichlet distribution of concentration 1/10, so that few are likely.
    No trigger follows the first token, which has no token before it to repeat.
    """
    drawn = jax.random.dirichlet(jax.random.key(seed), jnp.full(vocab_size - triggers - 1, 0.1), (vocab_size,))
    into_triggers = jnp.where(jnp.arange(vocab_size) == 0, 0.0, rate)[:, None]
    parts = [jnp.zeros((vocab_size, 1)), jnp.repeat(into_triggers / triggers, triggers, 1), drawn * (1 - into_triggers)]
    return jnp.concatenate(parts, axis=1)
