"""Random tokens, some of them repeated: the tasks of induction heads."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Int

from attnlab.data.tasks.task_draws import Number, check_least, compiled, key_of
from attnlab.types import Array


@compiled
def repeats(
    step: Number,
    *,
    batch_size: int,
    length: int,
    vocab_size: int = 64,
    periods: Sequence[int] | None = None,
    seed: Number = 0,
) -> Int[Array, "B T"]:
    """Draw random tokens `[B, T]` that repeat, each sequence with a random period.

    After the first period, the next token can be predicted: find the current token in the first period and copy its
    successor, as induction heads do (Olsson et al. 2022). With one possible period, a fixed distance would suffice.

    Args:
      vocab_size: tokens are 0 … vocab_size − 1.
      periods: possible periods; None for length // 4 … length // 2.
    """
    periods = tuple(range(max(1, length // 4), max(1, length // 2) + 1) if periods is None else periods)
    check_least(batch_size=batch_size, length=length, vocab_size=vocab_size, periods=min(periods, default=0))
    token_key, period_key = jax.random.split(key_of(step, seed))
    tokens = jax.random.randint(token_key, (batch_size, max(periods)), 0, vocab_size, jnp.int32)
    period = jax.random.choice(period_key, jnp.array(periods, jnp.int32), (batch_size, 1))
    return jnp.take_along_axis(tokens, jnp.arange(length, dtype=jnp.int32) % period, axis=1)


class Inductions(NamedTuple):
    """Noise with triggers, which are queried at the end."""

    tokens: Int[Array, "B T"]  # int32 [B, T], triggers 0 … n − 1, other tokens n … V − 1
    targets: Int[Array, "B N"]  # int32 [B, n], the token that first followed each of the last n


@compiled
def inductions(
    step: Number, *, batch_size: int, length: int, triggers: int = 1, vocab_size: int = 17, seed: Number = 0
) -> Inductions:
    """Draw random tokens that include each trigger once, followed by all triggers again in random order.

    The answer to a trigger is the token that followed it: the induction task of Fu et al. (2023) for one trigger.

    Args:
      triggers: n.
      vocab_size: V.
    """
    check_least(batch_size=batch_size, triggers=triggers)
    check_least(triggers + 1, vocab_size=vocab_size)
    check_least(3 * triggers, length=length)
    token_key, place_key, order_key = jax.random.split(key_of(step, seed), 3)
    tokens = jax.random.randint(token_key, (batch_size, length), triggers, vocab_size, jnp.int32)
    slots = jax.random.uniform(place_key, (batch_size, (length - triggers) // 2))  # each for a trigger and its answer
    at = 2 * jnp.argsort(slots, axis=1)[:, :triggers]
    rows = jnp.arange(batch_size)[:, None]
    queried = jnp.argsort(jax.random.uniform(order_key, (batch_size, triggers)), axis=1).astype(jnp.int32)
    answers = jnp.take_along_axis(tokens, jnp.take_along_axis(at, queried, axis=1) + 1, axis=1)
    tokens = tokens.at[rows, at].set(jnp.arange(triggers, dtype=jnp.int32))
    return Inductions(tokens.at[:, length - triggers :].set(queried), answers)
