"""Drafts of the next tokens: the continuation of the latest occurrence of the text's last tokens (Saxena 2023)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from attnlab.types import Array

RECENT = 1024  # searched tokens of a text
SHORTEST, LONGEST = 4, 16  # matching tokens needed, at first and at most


class Lookup(NamedTuple):
    """The last tokens of texts, to be searched."""

    recent: Int[Array, "N M"]  # at the right; −1 before a shorter text
    # Tokens that an occurrence must match: doubled after a draft of which less than half is kept, halved after others,
    # because a pass over a draft takes longer than a pass over a token.
    need: Int[Array, " N"]

    @classmethod
    def of(cls, texts: list[list[int]]) -> "Lookup":
        rows = [[-1] * (RECENT - len(text)) + text[-RECENT:] for text in texts]
        return cls(np.array(rows, np.int32), np.full(len(texts), SHORTEST, np.int32))

    def propose(self, count: int) -> tuple[Int[Array, "N {count}"], Bool[Array, " N"]]:
        """Draft `[N, count]` tokens after each text, and whether at least `need` tokens before the drafts match.

        The source is the earlier place with most matching tokens before it (up to `LONGEST`), of equals the latest. If
        the text ends before the draft does, the draft repeats from that place on.
        """
        recent, size = self.recent, self.recent.shape[1]
        same, length = True, jnp.zeros(recent.shape, jnp.int32)
        for back in range(LONGEST):
            last = recent[:, size - 1 - back, None]
            before = jnp.pad(recent, ((0, 0), (back, 0)), constant_values=-1)[:, :size]
            same = same & (before == last) & (last >= 0)
            length += same
        length = length.at[:, -1].set(0)  # the end itself
        at = size - 1 - jnp.flip(length, axis=1).argmax(axis=1)
        period = jnp.maximum(size - 1 - at, 1)[:, None]
        places = jnp.minimum(at[:, None] + 1 + jnp.arange(count) % period, size - 1)
        drafts = jnp.maximum(jnp.take_along_axis(recent, places, axis=1), 0)
        return drafts, jnp.take_along_axis(length, at[:, None], axis=1)[:, 0] >= self.need

    def append(self, tokens: Int[Array, "N K"], kept: Int[Array, " N"], used: Bool[Array, " N"]) -> "Lookup":
        """Append the first `kept` of each row's K tokens, of which K − 1 were drafted in rows `used`."""
        longer, size = jnp.concatenate([self.recent, tokens], axis=1), self.recent.shape[1]
        recent = jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, size))(longer, kept)
        helped = 2 * kept > tokens.shape[1]
        need = jnp.where(helped, jnp.maximum(self.need // 2, SHORTEST), jnp.minimum(2 * self.need, LONGEST))
        return Lookup(recent, jnp.where(used, need, self.need))
