"""Modular addition: all pairs, split at random."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Int

from attnlab.data.tasks.task_draws import Number, key_of
from attnlab.types import Array


class Sums(NamedTuple):
    """Pairs and their sums."""

    tokens: Int[Array, "N 3"]  # int32 [N, 3]: a, b, and p for "="
    targets: Int[Array, " N"]  # int32 [N], (a + b) mod p


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
    return _modular_sums(seed, p, count)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _modular_sums(seed, p, count):
    a, b = jnp.divmod(jax.random.permutation(key_of(0, seed), p * p).astype(jnp.int32), p)
    tokens = jnp.stack([a, b, jnp.full_like(a, p)], axis=-1)
    sums = Sums(tokens, (a + b) % p)
    return jax.tree.map(lambda x: x[:count], sums), jax.tree.map(lambda x: x[count:], sums)
