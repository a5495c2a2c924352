"""The random key of a batch."""

import jax
from jaxtyping import Integer

from attnlab.types import Array

TEST = 2**30  # steps from here on are not trained on
Number = int | Integer[Array, ""]  # may be traced


def key_of(step: Number, seed: Number) -> Array:
    """The key of a step and a seed.

    >>> bool(key_of(3, 1) == key_of(jnp.int32(3), jnp.uint32(1))), bool(key_of(3, 1) == key_of(1, 3))
    (True, False)
    """
    return jax.random.fold_in(jax.random.key(seed), step)
