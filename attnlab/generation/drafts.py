"""Drafts of the next tokens: the continuation of the latest occurrence of the text's last tokens (Saxena 2023)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from attnlab.types import Array

RECENT = 1024  # searched tokens of a text
SHORTEST, LONGEST = 4, 16  # matching tokens needed, and compared in a prompt, at most


class Lookup(NamedTuple):
    """The last tokens of texts, where they occurred before, and whether drafts pay."""

    recent: Int[Array, "N M"]  # at the right; −1 before a shorter text
    # Number of the text's last tokens that also end at each place.
    matching: Int[Array, "N M"]
    need: Float[Array, ""]  # matching tokens needed

    @classmethod
    def of(cls, texts: list[list[int]]) -> "Lookup":
        recent = np.array([[-1] * (RECENT - len(text)) + text[-RECENT:] for text in texts], np.int32)
        same, matching = True, np.zeros_like(recent)
        for back in range(LONGEST):
            last = recent[:, RECENT - 1 - back, None]
            before = np.pad(recent, ((0, 0), (back, 0)), constant_values=-1)[:, :RECENT]
            same = same & (before == last) & (last >= 0)
            matching += same
        return cls(recent, matching, np.float32(SHORTEST))

    def may_pay(self, count: int, active: Bool[Array, " N"]) -> Bool[Array, ""]:
        """Whether a pass over drafts saves time if all drafts with `need` matching tokens are right."""
        found = active & (self.matching[:, :-1].max(axis=1) >= self.need)  # the last place is the end itself
        return found.sum() * count > (cost(len(active), count) - 1) * active.sum()

    def propose(self, count: int) -> Int[Array, "N {count}"]:
        """Draft `count` tokens after each text, `[N, count]`.

        The source is the earlier place with most matching tokens before it, of equals the latest. If the text ends
        before the draft does, the draft repeats from that place on.
        """
        period = 1 + jnp.flip(self.matching[:, :-1], axis=1).argmax(axis=1)[:, None]
        places = RECENT - period + jnp.arange(count) % period
        return jnp.maximum(jnp.take_along_axis(self.recent, places, axis=1), 0)

    def append(self, tokens: Int[Array, "N K"], kept: Int[Array, " N"]) -> "Lookup":
        """Append the first `kept` of each row's K tokens, of which K − 1 were drafted; 0 in rows that have ended."""

        def push(place, last):
            recent, matching = last
            token, is_kept = tokens[:, place, None], (place < kept)[:, None]
            window = jnp.concatenate([recent[:, 1:], token], axis=1)
            matching = jnp.where(is_kept, jnp.where(window == token, matching + 1, 0), matching)
            return jnp.where(is_kept, window, recent), matching

        count, need = tokens.shape[1], self.need
        recent, matching = jax.lax.fori_loop(0, count, push, (self.recent, self.matching))
        if count > 1:
            # Up after a pass that took longer than its tokens one by one, down after others, by the time lost or
            # saved. So drafts lose the time of few passes in all, as each further loss needs a far longer occurrence.
            saved = kept.sum() / (kept > 0).sum() / cost(len(kept), count - 1) - 1
            need = jnp.maximum(SHORTEST, need * 4.0**-saved)
        return Lookup(recent, matching, need)


def cost(rows: int, count: int) -> float:
    """Time of a pass over drafts of `count` tokens, over the time of a pass over one token of each row.

    Up to a number of tokens a pass takes the time to read the parameters, from then on the time of its arithmetic. The
    number is fixed, not measured, so that the same call always makes the same passes, with the same rounding.
    """
    free = 3 if jax.default_backend() == "cpu" else 256
    return max(free, rows * (count + 1)) / max(free, rows)
