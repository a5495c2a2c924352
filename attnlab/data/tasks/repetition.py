"""Random tokens that repeat: the task of induction heads."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Int

from attnlab.data.tasks.task_draws import Number, key_of
from attnlab.types import Array


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

    From its second period on, a sequence can be predicted by finding the token in the first and copying its successor,
    as induction heads do (Olsson et al. 2022). With a common period, attention to a fixed distance would suffice.

    Args:
      vocab_size: tokens are 0 … vocab_size − 1.
      periods: possible periods; None for length // 4 … length // 2.
    """
    periods = tuple(range(max(1, length // 4), max(1, length // 2) + 1) if periods is None else periods)
    if not len(periods) or min(periods) < 1:
        raise ValueError(f"periods = {list(periods)}: expected periods of 1 or more")
    if min(vocab_size, length, batch_size) < 1:
        sizes = f"vocab_size = {vocab_size}, length = {length} and batch_size = {batch_size}"
        raise ValueError(f"{sizes}: expected 1 or more of each")
    return _repeats(step, seed, batch_size, length, vocab_size, periods)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5))
def _repeats(step, seed, batch_size, length, vocab_size, periods):
    token_key, period_key = jax.random.split(key_of(step, seed))
    tokens = jax.random.randint(token_key, (batch_size, max(periods)), 0, vocab_size, jnp.int32)
    period = jax.random.choice(period_key, jnp.array(periods, jnp.int32), (batch_size, 1))
    return jnp.take_along_axis(tokens, jnp.arange(length, dtype=jnp.int32) % period, axis=1)
