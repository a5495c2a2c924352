"""Modular addition: sums of long sequences of digits."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Int

from attnlab.data.tasks.task_draws import Number, check_least, compiled, key_of
from attnlab.types import Array


class Running(NamedTuple):
    """Digits and their sums so far."""

    tokens: Int[Array, "B T"]  # int32 [B, T], digits 0 … base − 1, then −1
    targets: Int[Array, "B T"]  # int32 [B, T], the sum of the digits so far modulo the base, then −1


@compiled
def running_sums(
    step: Number,
    *,
    batch_size: int,
    base: int,
    shortest: int,
    longest: int,
    length: int | None = None,
    seed: Number = 0,
) -> Running:
    """Draw sequences of uniform digits with the sums of their prefixes; base 2 is parity (Grazzi et al. 2025).

    Args:
      shortest, longest: fewest and most digits; the number is uniform from `shortest` to `longest`.
      length: T; None for `longest`.
    """
    length = longest if length is None else length
    check_least(batch_size=batch_size, shortest=shortest)
    check_least(2, base=base)
    check_least(shortest, longest=longest)
    check_least(longest, length=length)
    digit_key, length_key = jax.random.split(key_of(step, seed))
    digits = jax.random.randint(digit_key, (batch_size, length), 0, base, jnp.int32)
    number = jax.random.randint(length_key, (batch_size, 1), shortest, longest + 1)
    is_digit = jnp.arange(length) < number
    sums = jnp.cumsum(jnp.where(is_digit, digits, 0), axis=1) % base
    return Running(*(jnp.where(is_digit, x, -1) for x in (digits, sums)))
