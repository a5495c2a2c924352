"""Selective copying: symbols among blanks, to be repeated at the end."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Int

from attnlab.data.tasks.task_draws import Number, check_least, compiled, key_of
from attnlab.types import Array


class Selected(NamedTuple):
    """Sequences with symbols among blanks, then their copy."""

    tokens: Int[Array, "B T"]  # int32 [B, T]: n symbols 2 … V − 1 among blanks 0, then n times 1
    targets: Int[Array, "B N"]  # int32 [B, n], the symbols in order: the targets of the last n tokens


@compiled
def selective_copies(
    step: Number, *, batch_size: int, length: int, symbols: int, vocab_size: int = 18, seed: Number = 0
) -> Selected:
    """Draw sequences of selective copying (Gu and Dao 2023): symbols at random places, to be repeated at the end.

    Args:
      symbols: n.
      vocab_size: V; symbols are 2 … V − 1.
    """
    check_least(batch_size=batch_size, symbols=symbols)
    check_least(2 * symbols, length=length)
    check_least(3, vocab_size=vocab_size)
    symbol_key, place_key = jax.random.split(key_of(step, seed))
    drawn = jax.random.randint(symbol_key, (batch_size, symbols), 2, vocab_size, jnp.int32)
    noise = length - symbols
    places = jnp.argsort(jax.random.uniform(place_key, (batch_size, noise)), axis=1)[:, :symbols]
    rows = jnp.arange(batch_size)[:, None]
    tokens = jnp.zeros((batch_size, length), jnp.int32).at[rows, jnp.sort(places, axis=1)].set(drawn)
    return Selected(tokens.at[:, noise:].set(1), drawn)
