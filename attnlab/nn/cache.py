"""The caches of attention layers: ring buffers of S slots, which store position p of a sequence in slot p mod S."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from attnlab.ops.checks import INT32_MAX, POSITION_LIMIT
from attnlab.ops.mask_algebra import And, Mask, Not, Or
from attnlab.ops.masks import Dense, Padding, SlidingWindow, join
from attnlab.types import Array


class KVCache(NamedTuple):
    """Keys and values of the previous positions, for decoding; a plain pytree.

    A ring buffer: position p is stored in slot p mod S. While a sequence is no longer than the capacity S, a step
    attends to all previous positions and gives the same result as the full pass. In longer sequences each token
    attends to itself and the S − 1 positions before it, whatever the size of a step, as with `SlidingWindow(S - 1)`.

    Attributes:
      key: `[B, S, Hk, D]`, in any floating type; new keys and values are cast to this type.
      value: `[B, S, Hv, Dv]`; Hv = Hk and Dv = D unless the layer's values have another shape.
      length: int32 `[B]`, number of positions so far. Lower it to discard the newest positions, e.g. right padding.
      forget: `[B, S, H]`, the running sum of log forget gates up to each position, minus one constant per sequence and
        head; None without a forget gate.
      conv: the last W − 1 inputs of the short convolutions, by name ("query", "key", "value") `[B, W − 1, heads, D]`;
        None without convolutions. Lowering `length` does not discard them.

    >>> cache = KVCache.empty(batch=2, capacity=8, kv_heads=1, head_dim=4)
    >>> cache = cache.extend(jnp.ones((2, 3, 1, 4)), jnp.ones((2, 3, 1, 4)))
    >>> cache._replace(length=jnp.array([1, 3])).positions()[:, :4]
    Array([[ 0, -7, -6, -5],
           [ 0,  1,  2, -5]], dtype=int32)
    """

    key: Float[Array, "B S Hk D"]
    value: Float[Array, "B S Hv Dv"]
    length: Int[Array, " B"]
    forget: Float[Array, "B S H"] | None = None
    conv: Any = None

    @classmethod
    def empty(
        cls,
        batch: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        dtype=jnp.float32,
        *,
        forget_heads: int | None = None,
    ) -> "KVCache":
        """An empty cache for `capacity` S positions, with keys and values of type `dtype`.

        For a layer with a forget gate, `forget_heads` is H, the number of query heads; `forget` is at least float32.
        """
        shape, wide = (batch, capacity, kv_heads, head_dim), jnp.promote_types(dtype, jnp.float32)
        forget = None if forget_heads is None else jnp.zeros((batch, capacity, forget_heads), wide)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((batch,), jnp.int32), forget)

    @property
    def capacity(self) -> int:
        """S, the number of slots."""
        return self.key.shape[1]

    def positions(self) -> Int[Array, "B S"]:
        """The position stored in each slot, negative for empty slots."""
        return _positions(self.length, self.capacity)

    def extend(
        self,
        key: Float[Array, "B T Hk D"],
        value: Float[Array, "B T Hv Dv"],
        forget: Float[Array, "B T H"] | None = None,
        lengths: Int[Array, " B"] | None = None,
    ) -> "KVCache":
        """Append T positions, or the first `lengths` of them; ValueError if T exceeds the capacity.

        `forget` is the running sum of the log forget gates of these T positions alone.
        """
        positions = _rebased(self._replace(conv=None))
        return _extended(positions, KVCache(key, value, None, forget), lengths)._replace(conv=self.conv)


class LatentCache(NamedTuple):
    """The latents of previous positions, from which `LatentAttention` computes keys and values; smaller than `KVCache`.

    Attributes:
      latent: `[B, S, R]`, normalized.
      rotary: `[B, S, D]`, the rotated part of the keys, which all heads share.
      length: int32 `[B]`, number of positions so far.

    >>> cache = LatentCache.empty(batch=2, capacity=8, kv_rank=4, rope_dim=2)
    >>> cache.extend(jnp.ones((2, 3, 4)), jnp.ones((2, 3, 2))).length
    Array([3, 3], dtype=int32)
    """

    latent: Float[Array, "B S R"]
    rotary: Float[Array, "B S D"]
    length: Int[Array, " B"]

    @classmethod
    def empty(cls, batch: int, capacity: int, kv_rank: int, rope_dim: int, dtype=jnp.float32) -> "LatentCache":
        """An empty cache for `capacity` S positions."""
        latent, rotary = (jnp.zeros((batch, capacity, size), dtype) for size in (kv_rank, rope_dim))
        return cls(latent, rotary, jnp.zeros((batch,), jnp.int32))

    @property
    def capacity(self) -> int:
        """S, the number of slots."""
        return self.latent.shape[1]

    def positions(self) -> Int[Array, "B S"]:
        """The position stored in each slot, negative for empty slots."""
        return _positions(self.length, self.capacity)

    def extend(
        self, latent: Float[Array, "B T R"], rotary: Float[Array, "B T D"], lengths: Int[Array, " B"] | None = None
    ) -> "LatentCache":
        """Append T positions, or the first `lengths` of them; ValueError if T exceeds the capacity."""
        return _extended(self, LatentCache(latent, rotary, None), lengths)


def step(cache, fresh, mask: Mask | None, num_heads: int, lengths=None):
    """The keys for a step of T tokens: (a cache that holds them, their positions, their mask, the extended cache).

    `fresh` is a cache of the T tokens alone, without lengths; the keys of `mask` are the S slots. One token attends to
    the extended cache. With several tokens, the last may overwrite keys that the first attend to, so all attend to
    the S keys of the old cache followed by their own T keys, in order of position from max(0, length − S).
    """
    cache, batch, capacity, new = _rebased(cache), cache.length.shape, cache.capacity, fresh[0].shape[1]
    extended = _extended(cache, fresh, lengths)
    if new == 1:
        held = Padding(jnp.minimum(extended.length, capacity))
        return extended, extended.positions(), join(mask, held), extended

    first = jnp.maximum(cache.length - capacity, 0)
    positions = first[:, None] + jnp.arange(capacity + new)

    @jax.vmap
    def in_order(old, x, first, length):
        keys = jnp.concatenate([jnp.roll(old, -first, axis=0), x.astype(old.dtype)])
        return jax.lax.dynamic_update_slice_in_dim(keys, keys[capacity:], length - first, axis=0)

    def over_keys(part):
        if part is None or part.positional:
            return part
        part.check(batch, num_heads, new, capacity)
        visible = part.dense(new, capacity, num_heads=num_heads, batch=batch)
        visible = visible.reshape((1,) * (4 - visible.ndim) + visible.shape)
        return Dense(jnp.take_along_axis(visible, positions[:, None, None] % capacity, axis=-1))

    mask = jax.tree.map(over_keys, mask, is_leaf=lambda part: not isinstance(part, And | Or | Not))
    keys = jax.tree.map(lambda old, x: in_order(old, x, first, cache.length), cache._replace(length=None), fresh)
    # The window reaches back S positions; padding and the slots after it get a position outside every window.
    kv_positions = jnp.where(positions < extended.length[:, None], positions, 1 - POSITION_LIMIT)
    return keys, kv_positions, join(mask, SlidingWindow(capacity - 1, INT32_MAX)), extended


def _rebased(cache):
    """Subtract the newest position's sum from all sums, so that sums stay small and, for near keys, exact."""
    if getattr(cache, "forget", None) is None:
        return cache
    newest = ((cache.length - 1) % cache.capacity)[:, None, None]
    start = jnp.take_along_axis(cache.forget, newest, axis=1)
    return cache._replace(forget=cache.forget - jnp.where(cache.length[:, None, None] > 0, start, 0))


def _extended(cache, fresh, lengths):
    arrays = cache._replace(length=None)
    written = jax.tree.map(lambda old, x: _written(old, x, cache.length, lengths), arrays, fresh)
    return written._replace(length=cache.length + (fresh[0].shape[1] if lengths is None else lengths))


def _positions(length, capacity: int):
    newest = length[:, None] - 1
    return newest - (newest - jnp.arange(capacity)) % capacity


def _written(old, fresh, length, lengths):
    """Write T new entries, or the first `lengths` of them, to a ring buffer `[B, S, …]` after `length` entries."""
    new, capacity = fresh.shape[1], old.shape[1]
    if new > capacity:
        raise ValueError(f"{new} tokens do not fit a cache of {capacity}: prefill only the last {capacity}")
    # Sequences may differ in length, so each is written at its own slots.
    slots = (length[:, None] + jnp.arange(new)) % capacity
    if lengths is not None:  # padding gets slots past the end, which are not written
        slots = jnp.where(jnp.arange(new) < jnp.asarray(lengths)[:, None], slots, capacity + jnp.arange(new))
    set_slots = jax.vmap(lambda row, at, x: row.at[at].set(x.astype(row.dtype), mode="drop", unique_indices=True))
    return set_slots(old, slots, fresh)
