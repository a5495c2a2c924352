"""Checks and conversions that the modules share; each error is one line."""

import flax.linen as nn
import jax
import numpy as np
from jaxtyping import Bool

from attnlab.ops.checks import known_keywords
from attnlab.ops.masks import Dense, Mask
from attnlab.types import Array

MaskLike = Mask | Bool[Array, "..."]  # a bool array counts as `masks.Dense`


def compact(call):
    """`flax.linen.compact` for a call that rejects unknown arguments in one line, with the name to use."""
    return nn.compact(known_keywords(call))


class MaskedModule(nn.Module):
    """Base class of the modules with a field `mask`: a bool array there becomes `masks.Dense`."""

    def __post_init__(self):
        if isinstance(self.mask, jax.Array | np.ndarray):
            self.mask = Dense(self.mask)  # compares and hashes by value, as `nn.jit` needs
        super().__post_init__()


def ids_in_range(name: str, ids, size: int, low: int = 0, remedy: str = "") -> None:
    """Raise ValueError for ids outside `[low, size)`; traced ids have no values to check."""
    if isinstance(ids, jax.core.Tracer) or not getattr(ids, "is_fully_addressable", True):
        return
    ids = np.asarray(ids)
    wrong = ids[(ids < low) | (ids >= size)]
    if wrong.size:
        raise ValueError(
            f"{name} contains {wrong[0]}, expected ids from {low} to {size - 1}" + (remedy and f": {remedy}")
        )
