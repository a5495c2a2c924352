"""Dropout by an integer hash of an element's indices, without an array of random bits.

Which elements are dropped depends only on an example's key and an element's indices, not on the backend, the tile
sizes, the sharding or the number of devices.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, UInt32

from attnlab.types import Array

Keys = Array  # PRNG keys, new style `[...]` or raw uint32 `[..., 2]`


def keep(keys: Keys, rate: float, *indices: Array) -> Bool[Array, "..."]:
    """Bool `[*keys, *indices]`, True for elements to keep; each is dropped independently with probability `rate`."""
    rank = max(jnp.ndim(index) for index in indices)
    words = key_words(keys)
    state = jnp.zeros((), jnp.uint32)
    for word in range(words.shape[-1]):
        state = _mix(state ^ words[..., word])
    state = state.reshape(state.shape + (1,) * rank)
    # Indices are folded in one by one, so that only the last mix runs over all elements. Each index is first mixed
    # by itself: its regular spacing could otherwise make the rows of two states permutations of each other.
    for index in indices:
        state = _mix(state ^ _mix(jnp.asarray(index).astype(jnp.uint32) + jnp.uint32(0x9E3779B9)))
    return state >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))


def dropout(x: Float[Array, "B ..."], keys: Keys, rate: float) -> Float[Array, "B ..."]:
    """x with elements zeroed with probability `rate` and the others scaled by 1/(1 − rate); one key per example."""
    indices = jnp.ogrid[tuple(slice(size) for size in x.shape[1:])]
    return jnp.where(keep(keys, rate, *indices), x / (1 - rate), 0).astype(x.dtype)


def fold_in(keys: Keys, data: int | Array) -> Keys:
    """`jax.random.fold_in` over any number of keys."""
    fold = jax.random.fold_in
    for _ in range(batch_rank(keys)):
        fold = jax.vmap(fold, in_axes=(0, None))
    return fold(keys, data)


def per_example(keys: Keys, batch: tuple[int, ...]) -> Keys:
    """One key per example, with exactly the batch axes; a single key is folded with each example's index."""
    shape = jnp.shape(keys)[: batch_rank(keys)]
    if shape == batch:
        return keys
    if shape == ():
        folded = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(keys, jnp.arange(math.prod(batch)))
        return folded.reshape(batch + folded.shape[1:])
    raise ValueError(
        f"dropout keys have batch axes {shape}, expected () or {batch}: give one key, or one for each example"
    )


def batch_rank(keys: Keys) -> int:
    """The number of axes of an array of keys, not counting the words of raw keys."""
    return jnp.ndim(keys) if jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) else jnp.ndim(keys) - 1


def key_words(keys: Keys) -> UInt32[Array, "... words"]:
    """The uint32 words of PRNG keys, new style or raw."""
    return jax.random.key_data(keys) if jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) else keys


def _mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """A bijection that mixes 32-bit words, "lowbias32" (Wellons, "Prospecting for hash functions", 2018)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
