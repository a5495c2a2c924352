"""The random key of a batch."""

import jax
from jaxtyping import Integer

from attnlab.types import Array

TEST = 2**30  # first step that no study trains on
Number = int | Integer[Array, ""]  # may be traced


def key_of(step: Number, seed: Number) -> Array:
    return jax.random.fold_in(jax.random.key(seed), step)
