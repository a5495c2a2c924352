"""Score mods: what is done to a score before the softmax, by position.

A score mod is a pytree, like a mask: arrays in it are leaves and get gradients. One or a tuple of them goes to
`attnlab.attention(..., score_mod=…)` and is applied in the order given.

>>> ALiBi(alibi_slopes(8)).slopes
Array([0.5       , 0.25      , 0.125     , 0.0625    , 0.03125   ,
       0.015625  , 0.0078125 , 0.00390625], dtype=float32)
"""

import numbers
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from attnlab.ops.masks import Tile
from attnlab.types import Array


class ScoreMod:
    """What every score mod can do; subclasses are frozen dataclasses that define `apply`.

    Attributes:
      positional: whether it compares positions, which must then be explicit when Tq ≠ Tk.
    """

    positional = False

    def apply(self, scores: Float[Array, "..."], tile: Tile) -> Float[Array, "..."]:
        """The new scores `[..., H, Tq, Tk]` of a tile."""
        raise TypeError(f"{type(self).__name__} defines no apply(scores, tile): write it in the subclass")

    def check(self, num_heads: int) -> None:
        """Raises ValueError when the mod's arrays do not fit `num_heads` heads."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ALiBi(ScoreMod):
    """Attention with linear biases: score − slope·|i − j|, one slope a head (Press et al. 2022, section 3).

    >>> tile_scores = ALiBi(jnp.array([0.5])).apply(jnp.zeros((1, 2, 2)), whole(2, 2))
    >>> tile_scores[0]
    Array([[ 0. , -0.5],
           [-0.5,  0. ]], dtype=float32)
    """

    slopes: Float[Array, " H"]
    positional = True

    def apply(self, scores, tile):
        distance = abs(tile.q_position - tile.kv_position)
        return scores - self.slopes[tile.head].astype(scores.dtype) * distance.astype(scores.dtype)

    def check(self, num_heads):
        if np.shape(self.slopes) != (num_heads,):
            raise ValueError(
                f"ALiBi slopes have shape {np.shape(self.slopes)}, expected ({num_heads},): one slope a head, "
                "e.g. score_mods.alibi_slopes(num_heads)"
            )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SoftCap(ScoreMod):
    """Scores kept within ±cap: cap·tanh(score / cap) (Gemma Team 2024, section 2).

    >>> SoftCap(2.0).apply(jnp.array([0.0, 100.0]), tile=None)
    Array([0., 2.], dtype=float32)
    """

    cap: float

    def __post_init__(self):
        if isinstance(self.cap, numbers.Number) and not self.cap > 0:
            raise ValueError(f"SoftCap cap = {self.cap}: expected a number above 0")

    def apply(self, scores, tile):
        return self.cap * jnp.tanh(scores / self.cap)


def alibi_slopes(num_heads: int) -> Float[Array, " H"]:
    """The slopes of the ALiBi paper: 2^(−8h/H) for h = 1 … H when H is a power of two.

    Otherwise those of the power of two below, and every other one of the power of two above (Press et al. 2022,
    footnote 5 of section 3).

    >>> alibi_slopes(3)
    Array([0.0625    , 0.00390625, 0.25      ], dtype=float32)
    """
    power = 2 ** int(np.log2(num_heads))
    slopes = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
    slopes += [2.0 ** (-4 * (2 * h + 1) / power) for h in range(num_heads - power)]
    return jnp.array(slopes, jnp.float32)
