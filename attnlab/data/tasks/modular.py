"""Modular addition: all pairs, split at random, and sums of long sequences of digits."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Int

from attnlab.data.tasks.task_draws import Number, check_least, compiled, key_of
from attnlab.types import Array


class Sums(NamedTuple):
    """Pairs and their sums."""

    tokens: Int[Array, "N 3"]  # int32 [N, 3]: a, b, and p for "="
    targets: Int[Array, " N"]  # int32 [N], (a + b) mod p


@compiled
def modular_sums(p: int, *, train: float, seed: Number = 0) -> tuple[Sums, Sums]:
    """All p² pairs (a, b) with (a + b) mod p, split at random (Power et al. 2022).

    Args:
      p: the modulus.
      train: share of the pairs in the first part.

    Returns:
      The pairs for training, and the held-out pairs.
    """
    count = round(train * p * p) if p > 0 else 0
    if not 0 < count < p * p:
        raise ValueError(f"p = {p} and train = {train} leave a part without pairs: raise p, or train between 0 and 1")
    a, b = jnp.divmod(jax.random.permutation(key_of(0, seed), p * p).astype(jnp.int32), p)
    tokens = jnp.stack([a, b, jnp.full_like(a, p)], axis=-1)
    sums = Sums(tokens, (a + b) % p)
    return jax.tree.map(lambda x: x[:count], sums), jax.tree.map(lambda x: x[count:], sums)


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
      shortest, longest: numbers of digits, uniform between both.
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
