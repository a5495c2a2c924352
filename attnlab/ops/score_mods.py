"""Score mods: what is done to a score before the softmax, by position.

A score mod is a pytree, like a mask: arrays in it are leaves and get gradients. One or a tuple of them goes to
`attnlab.attention(..., score_mod=…)` and is applied in the order given.

>>> ALiBi(alibi_slopes(8)).slopes
Array([0.5       , 0.25      , 0.125     , 0.0625    , 0.03125   ,
       0.015625  , 0.0078125 , 0.00390625], dtype=float32)
"""

import numbers
from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from attnlab.ops import elementwise
from attnlab.ops.nodes import Node
from attnlab.ops.tiles import Tile
from attnlab.types import Array


class ScoreMod(Node):
    """What every score mod can do; subclasses are frozen dataclasses that define `apply`.

    Attributes:
      positional: whether it compares positions, which must then be explicit when Tq ≠ Tk.
    """

    positional = False

    def apply(self, scores: Float[Array, "..."], tile: Tile) -> Float[Array, "..."]:
        """The new scores of a tile, elementwise in the scores and the tile's coordinates."""
        raise TypeError(f"{type(self).__name__} defines no apply(scores, tile): write it in the subclass")

    def opened(self, score_type) -> "ScoreMod":
        """The same mod, whose functions close over nothing: what they closed over has become leaves."""
        return self

    def check(self, num_heads: int) -> None:
        """Raises ValueError when the mod's arrays do not fit `num_heads` heads."""


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


@dataclass(frozen=True)
class RelativeBias(ScoreMod):
    """Adds a learned number for every head and distance: score + table[h, clip(j − i)] (Shaw et al. 2018, eq. 4).

    `table` is `[H, 2·R + 1]`; column R + d is for keys d positions after the query, and distances beyond ±R share
    the columns at the ends.

    >>> table = jnp.arange(3.0)[None]  # before, here, after
    >>> RelativeBias(table).apply(jnp.zeros((1, 3, 3)), whole(3, 3))[0]
    Array([[1., 2., 2.],
           [0., 1., 2.],
           [0., 0., 1.]], dtype=float32)
    """

    table: Float[Array, "H distances"]
    positional = True

    def apply(self, scores, tile):
        reach = self.table.shape[-1] // 2
        distance = jnp.clip(tile.kv_position - tile.q_position, -reach, reach)
        return scores + self.table.astype(scores.dtype)[tile.head, distance + reach]

    def check(self, num_heads):
        shape = np.shape(self.table)
        if len(shape) != 2 or shape[0] != num_heads or shape[1] % 2 == 0:
            raise ValueError(
                f"RelativeBias table has shape {shape}, expected ({num_heads}, 2·R + 1): a row for every head, "
                "a column for every distance from −R to R"
            )


@dataclass(frozen=True)
class SoftCap(ScoreMod):
    """Scores kept within ±cap: cap·tanh(score / cap) (Gemma Team 2024, section 2).

    >>> SoftCap(2.0).apply(jnp.array([0.0, 100.0]), tile=None)
    Array([0., 2.], dtype=float32)
    """

    cap: float | Float[Array, ""]

    def __post_init__(self):
        if isinstance(self.cap, numbers.Number) and not self.cap > 0:
            raise ValueError(f"SoftCap cap = {self.cap}: expected a number above 0")

    def apply(self, scores, tile):
        return self.cap * jnp.tanh(scores / self.cap)

    def check(self, num_heads):
        if np.shape(self.cap) != ():
            raise ValueError(f"SoftCap cap has shape {np.shape(self.cap)}, expected (): one number for all")


@dataclass(frozen=True, init=False)
class ScoreFn(ScoreMod):
    """Any change of a score: `fn(score, b, h, i, j, *arrays)`.

    The function is called with scalars, example b (counted through all batch axes), head h, positions i of the query
    and j of the key, and is applied to all pairs at once; `arrays` come to it whole, and get gradients. It may close
    over arrays as well; they get gradients too.

    >>> nearer = ScoreFn(lambda score, b, h, i, j, weight: score - weight * (i - j) ** 2, jnp.array(0.5))
    >>> nearer.apply(jnp.zeros((1, 2, 2)), whole(2, 2))[0]
    Array([[ 0. , -0.5],
           [-0.5,  0. ]], dtype=float32)
    """

    fn: Callable
    arrays: tuple[Array, ...]
    positional = True

    def __init__(self, fn, *arrays):
        object.__setattr__(self, "fn", fn)
        object.__setattr__(self, "arrays", arrays)

    def apply(self, scores, tile):
        coordinates = (scores, tile.example, tile.head, tile.q_position, tile.kv_position)
        changed = elementwise.apply(self.fn, coordinates, self.arrays, jnp.floating)
        return jnp.broadcast_to(changed, scores.shape).astype(scores.dtype)

    def opened(self, score_type):
        fn, arrays = elementwise.opened(self.fn, (score_type, *(jnp.int32,) * 4), self.arrays)
        return ScoreFn(fn, *arrays)


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
