"""Random tokens that repeat: the task of induction heads."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Int

from attnlab.data.tasks.drawing import Number, key_of
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
    """Draw random tokens that repeat, each sequence with a period of its own; a pure function of its arguments.

    From its second period on, a sequence can be predicted by finding the token in the first and copying the one after
    it, as induction heads do (Olsson et al. 2022). With one period for all, a head that attends to a fixed distance
    would do as well.

    Args:
      step: training step.
      batch_size: B.
      length: T.
      vocab_size: tokens are 0 … vocab_size − 1.
      periods: possible periods; None for length // 4 … length // 2.
      seed: random seed.

    Returns:
      int32 `[B, T]`.

    Raises:
      ValueError: periods that are empty or below 1, or a vocabulary, a length or a batch below 1.

    >>> repeats(1, batch_size=2, length=8, vocab_size=10, periods=[3, 4]).tolist()
    [[7, 1, 2, 7, 1, 2, 7, 1], [4, 2, 4, 4, 2, 4, 4, 2]]
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
