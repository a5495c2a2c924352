"""Rotary position embedding, and ways to stretch it to contexts longer than in training."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from attnlab.support.options import FieldError, option, validate
from attnlab.types import Array

SCALINGS = ("none", "linear", "llama3", "yarn")
_BASE, _TURNS = {"low": 1e-3, "high": 1e12}, {"low": 1e-6, "high": 1e6}
_FAST_TURNS = {"llama3": 4.0, "yarn": 32.0}
_SCALED, _BY_TURNS, _YARN = ({"scaling": kinds} for kinds in (SCALINGS[1:], tuple(_FAST_TURNS), ("yarn",)))


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotary position embedding (Su et al. 2021): pair (i, i + R/2) of R rotated features turns by pos / base^(2i/R).

    So that a model can read longer sequences than in training, pairs are slowed down by `factor`: "linear" slows all
    pairs (Chen et al. 2023); "llama3" and "yarn" slow pairs that make fewer than `slow_turns` turns within the original
    context, and leave pairs that make more than `fast_turns` unchanged. Pairs in between are slowed partly, by a share
    that is linear in their turns ("llama3", Llama Team 2024) or their index ("yarn", Peng et al. 2023, section 3.2).

    >>> Rotary(base=100.0).frequencies(8).round(3)
    array([1.   , 0.316, 0.1  , 0.032], dtype=float32)
    >>> Rotary(base=100.0, scaling="llama3", factor=4.0, original_context=100).frequencies(8).round(3)
    array([1.   , 0.316, 0.04 , 0.008], dtype=float32)
    """

    base: float = option("the slowest pair of features makes one turn in about 2π·base positions", 1e4, **_BASE)
    fraction: float = option("share of a head's features that are rotated, from the first", 1.0, low=1e-6, high=1)
    scaling: str = option("scaling for sequences longer than in training", "none", choices=SCALINGS)
    factor: float = option("factor by which pairs of features are slowed", 1.0, low=1, high=1e6, needs=_SCALED)
    original_context: int = option("tokens of a training sequence, for llama3 and yarn", 0, low=0, needs=_BY_TURNS)
    slow_turns: float = option(
        "turns within original_context below which pairs are slowed by factor", 1.0, **_TURNS, needs=_BY_TURNS
    )
    fast_turns: float | None = option(
        "turns above which pairs are not slowed; None for 4 (llama3) or 32 (yarn)", None, **_TURNS, needs=_BY_TURNS
    )
    attention_factor: float | None = option(
        "factor applied to rotated queries and keys, for yarn; None for 0.1·ln(factor) + 1", None, **_TURNS, needs=_YARN
    )
    truncate: bool = option("round yarn's bounds between slow and fast pairs to whole pairs", True, needs=_YARN)

    def rotated(self, head_dim: int) -> int:
        """R, the number of features that are rotated."""
        return int(head_dim * self.fraction)

    def __post_init__(self):
        validate(self)

    def check(self, head_dim: int) -> None:
        """Raise FieldError unless heads of `head_dim` features can be rotated with these options."""
        if (rotated := self.rotated(head_dim)) < 2 or rotated % 2:
            expected = "expected an even number of 2 or more"
            raise FieldError(
                "fraction",
                self.fraction,
                f"rotates {rotated} of the {head_dim} features of a head, in pairs: {expected}",
            )
        if self.scaling in _FAST_TURNS:
            if self.original_context < 1:
                expected = f"{self.scaling!r} needs the number of positions that the model was trained on"
                raise FieldError("original_context", self.original_context, expected)
            if self.slow_turns >= self._fast_turns:
                expected = f"expected a number below fast_turns = {self._fast_turns}"
                raise FieldError("slow_turns", self.slow_turns, expected)
        if self.scaling != "none" and self.factor == 1 and self.attention_factor in (None, 1):
            expected = "it has no effect with factor = 1: choose a factor above 1, or leave it at 'none'"
            raise FieldError("scaling", self.scaling, expected)

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Radians per position of each pair, float32 `[R/2]`; FieldError as for `check`."""
        self.check(head_dim)
        rotated = self.rotated(head_dim)
        # In float64 on the host, because positions multiply the rounding error that a float32 power would have.
        frequencies = 1.0 / self.base ** (np.arange(0, rotated, 2) / rotated)
        if self.scaling == "linear":
            frequencies = frequencies / self.factor
        elif self.scaling != "none":
            fast = self._fast_share(frequencies, rotated)
            frequencies = fast * frequencies + (1 - fast) * frequencies / self.factor
        return frequencies.astype(np.float32)

    @property
    def amplitude(self) -> float:
        """The factor that multiplies rotated queries and keys: 1 unless `scaling` is "yarn"."""
        if self.scaling != "yarn":
            return 1.0
        return 0.1 * math.log(self.factor) + 1 if self.attention_factor is None else self.attention_factor

    @property
    def _fast_turns(self) -> float:
        return _FAST_TURNS[self.scaling] if self.fast_turns is None else self.fast_turns

    def _fast_share(self, frequencies, rotated):
        """For each pair a share: 1 keeps its frequency, 0 slows it by `factor`, and shares between do so partly."""
        if self.scaling == "llama3":
            turns = self.original_context * frequencies / (2 * math.pi)
            return np.clip((turns - self.slow_turns) / (self._fast_turns - self.slow_turns), 0, 1)

        def pair(turns):  # the index of the pair that makes this many turns
            return rotated * math.log(self.original_context / (turns * 2 * math.pi)) / (2 * math.log(self.base))

        first, last = pair(self._fast_turns), pair(self.slow_turns)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, rotated - 1)
        width = last - first if last != first else 1e-3  # as in the reference implementation
        return 1 - np.clip((np.arange(rotated // 2) - first) / width, 0, 1)


def rotary(
    x: Float[Array, "*B T H D"], positions: Int[Array, "..."], base: float | Rotary = 10_000.0
) -> Float[Array, "*B T H D"]:
    """Rotary position embedding: rotate the feature pairs (i, i + D/2) by the angle pos / base^(2i/D).

    q·k then depends on the positions only through their difference (Su et al. 2021, equation 34; features are paired by
    halves, as in GPT-NeoX).

    Args:
      x: `[..., T, H, D]`, queries or keys; D even.
      positions: `[T]` or `[..., T]`.
      base: the base, or all options as a `Rotary`.

    Returns:
      `[..., T, H, D]` in x's type.

    Raises:
      ValueError: the number of positions is not T, or `Rotary.check` rejects D with these options, e.g. an odd D.

    >>> q = rotary(jnp.ones((3, 1, 2)), jnp.arange(3))
    >>> print(np.asarray(q[:, 0]).round(2))
    [[ 1.    1.  ]
     [-0.3   1.38]
     [-1.33  0.49]]
    """
    x = jnp.asarray(x)
    if np.shape(positions)[-1:] != x.shape[-3:-2] or np.ndim(positions) > x.ndim - 2:
        raise ValueError(
            f"positions have shape {np.shape(positions)}, expected {x.shape[-3:-2]} or {x.shape[:-2]}: one per token"
        )
    turns = base if isinstance(base, Rotary) else Rotary(base)
    frequencies = turns.frequencies(x.shape[-1])
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    angles = (jnp.asarray(positions)[..., None].astype(wide.dtype) * frequencies)[..., None, :]
    sin, cos = (turns.amplitude * function(angles) for function in (jnp.sin, jnp.cos))
    first, second, rest = jnp.split(wide, [len(frequencies), 2 * len(frequencies)], axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*rotated, *([rest] if rest.shape[-1] else [])], axis=-1).astype(x.dtype)
