"""Drafts of the next tokens: what followed the latest occurrence of the text's last tokens (Saxena 2023)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from attnlab.types import Array

RECENT = 1024  # tokens of a text that are searched
SHORTEST, LONGEST = 4, 16  # tokens that an occurrence needs to be used, at first and at most


class Lookup(NamedTuple):
    """The last tokens of texts, to be searched.

    Attributes:
      recent: int32 `[N, M]`, at the right; −1 before a shorter text.
      need: int32 `[N]`, tokens that an occurrence needs to be used. A draft of which less than half is kept doubles
        them, one of which more is kept halves them: a pass over a draft takes longer than one over a token.
    """

    recent: Int[Array, "N M"]
    need: Int[Array, " N"]

    @classmethod
    def of(cls, texts: list[list[int]]) -> "Lookup":
        """The last tokens of each text.

        >>> Lookup.of([[1, 2, 3]]).recent[0, -4:]
        array([-1,  1,  2,  3], dtype=int32)
        """
        rows = [[-1] * (RECENT - len(text)) + text[-RECENT:] for text in texts]
        return cls(np.array(rows, np.int32), np.full(len(texts), SHORTEST, np.int32))

    def propose(self, count: int) -> tuple[Int[Array, "N {count}"], Bool[Array, " N"]]:
        """Draft the tokens that follow each text.

        Of all earlier places, that is taken before which most tokens (up to `LONGEST`) are those at the end of the
        text, and of equals the latest. Where the text ends before the draft does, it is repeated from that place on.

        Args:
          count: tokens of a draft.

        Returns:
          int32 `[N, count]`, and whether at least `need` tokens are the same, bool `[N]`.

        >>> drafts, found = Lookup.of([[7, 1, 2, 3, 4, 8, 9, 1, 2, 3, 4]]).propose(count=3)
        >>> drafts.tolist(), found.tolist()
        ([[8, 9, 1]], [True])
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
        """Append the first `kept` of each row's K tokens, K − 1 of which were drafted; `used` where they were.

        >>> lookup = Lookup.of([[1, 2, 3]]).append(jnp.array([[4, 5, 6]]), jnp.array([1]), jnp.array([True]))
        >>> lookup.recent[0, -3:], lookup.need
        (Array([2, 3, 4], dtype=int32), Array([8], dtype=int32))
        """
        longer, size = jnp.concatenate([self.recent, tokens], axis=1), self.recent.shape[1]
        recent = jax.vmap(lambda row, start: jax.lax.dynamic_slice_in_dim(row, start, size))(longer, kept)
        helped = 2 * kept > tokens.shape[1]
        need = jnp.where(helped, jnp.maximum(self.need // 2, SHORTEST), jnp.minimum(2 * self.need, LONGEST))
        return Lookup(recent, jnp.where(used, need, self.need))
