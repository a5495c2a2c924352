"""Forecasts from similar days of the past: attention from today into an archive, a shard at a time."""

import jax.numpy as jnp

import attnlab
from attnlab.masks import Causal
from attnlab.score_mods import ScoreFn, SoftCap


class Archive:
    """Days of a gauge, each with the hours that followed it, and the time when those ended.

    Attributes:
      days: `[N, 1, D]`, scaled to length 1, so that shapes of days are compared.
      followed: `[N, 1, hours]`, levels in metres.
      times: `[N]`, hours since the archive began.
    """

    def __init__(self, levels, day: int = 25, hours: int = 12):
        starts = jnp.arange(len(levels) - day - hours + 1)
        self.days = _shape(levels[starts[:, None] + jnp.arange(day)])
        self.followed = levels[starts[:, None] + day + jnp.arange(hours)][:, None]
        self.times = starts + day + hours

    def forecast(self, days, times, forgetting, shards: int = 1):
        """Average the hours that followed similar days, weighted by similarity.

        Args:
          days: `[Q, D]`, levels in metres.
          times: `[Q]`, when they ended; days whose following hours ended later are masked.
          forgetting: decrease of the score per hour of age.
          shards: number of parts of the archive that are attended to in sequence.

        Returns:
          `[Q, hours]`, levels in metres.
        """
        older = ScoreFn(lambda score, b, h, i, j, rate: score - rate * (i - j), forgetting)
        terms = {"mask": Causal(), "score_mod": (SoftCap(30.0), older), "scale": 30.0, "q_positions": times}
        parts = [
            attnlab.attention(_shape(days), k, v, kv_positions=at, return_lse=True, **terms)
            for k, v, at in zip(*(jnp.array_split(x, shards) for x in (self.days, self.followed, self.times)))
        ]
        return attnlab.merge(parts)[0][:, 0]


def _shape(days):
    return (days / jnp.linalg.norm(days, axis=-1, keepdims=True))[:, None]
