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

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Temperature(ScoreMod):
    ...     temperature: float
    ...
    ...     def apply(self, scores, tile):
    ...         return scores / self.temperature
    >>> q, k = jnp.ones((1, 1, 1)), jnp.array([0.0, 1.0])[:, None, None]
    >>> print(np.asarray(attention_weights(q, k, score_mod=Temperature(0.1))[0]).round(4))
    [[0. 1.]]
    """

    positional = False

    def apply(self, scores: Float[Array, "..."], tile: Tile) -> Float[Array, "..."]:
        """The new scores of a tile, elementwise in the scores and the tile's coordinates.

        Args:
          scores: `[..., H, queries, keys]`, scale·q·k and what came before this mod; the last two axes may be swapped.
          tile: their coordinates, each broadcastable to them: `example`, `head`, `q_position`, `kv_position`,
            `q_index`, `kv_index`.

        Returns:
          `[..., H, queries, keys]`, as `scores`.

        >>> SoftCap(2.0).apply(jnp.array([0.0, 100.0]), tile=None)
        Array([0., 2.], dtype=float32)
        """
        raise TypeError(f"{type(self).__name__} defines no apply(scores, tile): write it in the subclass")

    def opened(self, score_type) -> "ScoreMod":
        """The same mod, whose functions close over nothing traced: what they closed over has become leaves.

        Args:
          score_type: type of the scores.

        >>> @jax.jit
        ... def leaves(slope):
        ...     mod = ScoreFn(lambda score, b, h, i, j: slope * score)
        ...     return jax.tree.leaves(mod), jax.tree.leaves(mod.opened(jnp.float32))
        >>> leaves(jnp.float32(2.0))
        ([], [Array(2., dtype=float32)])
        """
        return self

    def check(self, num_heads: int) -> None:
        """Raises ValueError when the mod's arrays do not fit `num_heads` heads; `attention` asks.

        >>> ALiBi(jnp.ones(3)).check(num_heads=2)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: ALiBi slopes have shape (3,), expected (2,): one slope a head, e.g. ...
        """


@dataclass(frozen=True)
class ALiBi(ScoreMod):
    """Attention with linear biases: score − slope·|i − j|, one slope a head (Press et al. 2022, section 3).

    `slopes` is `[H]`, in logits for each position of distance; another shape is a ValueError of `attention`.

    >>> q = k = jnp.zeros((3, 1, 4))  # every score 0
    >>> weights = attention_weights(q, k, score_mod=ALiBi(jnp.log(jnp.array([2.0]))))
    >>> print(np.asarray(weights[0]).round(2))  # each position farther halves them
    [[0.57 0.29 0.14]
     [0.25 0.5  0.25]
     [0.14 0.29 0.57]]
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

    `table` is `[H, 2·R + 1]`, in logits; column R + d is for keys d positions after the query, and distances beyond
    ±R share the columns at the ends. Another shape is a ValueError of `attention`.

    >>> q = k = jnp.zeros((3, 1, 4))  # every score 0
    >>> table = jnp.log(jnp.array([[1.0, 2.0, 4.0]]))  # before, here, after
    >>> print(np.asarray(attention_weights(q, k, score_mod=RelativeBias(table))[0]).round(2))
    [[0.2  0.4  0.4 ]
     [0.14 0.29 0.57]
     [0.25 0.25 0.5 ]]
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

    `cap` is a number above 0, in logits, or an array of shape `()`; anything else is a ValueError, of an array when
    `attention` gets it.

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
    over arrays as well; they get gradients too. One that takes other arguments, or returns no floating scalar, is a
    ValueError of `attention`.

    >>> nearer = ScoreFn(lambda score, b, h, i, j, weight: score - weight * (i - j) ** 2, jnp.array(0.5))
    >>> q = k = jnp.zeros((2, 1, 4))  # every score 0
    >>> print(np.asarray(attention_weights(q, k, score_mod=nearer)[0]).round(2))  # 0.5 lower off the diagonal
    [[0.62 0.38]
     [0.38 0.62]]
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

    Returns:
      float32 `[num_heads]`, in logits for each position of distance.

    Raises:
      ValueError: `num_heads` is below 1.

    >>> alibi_slopes(3)
    Array([0.0625    , 0.00390625, 0.25      ], dtype=float32)
    """
    if num_heads < 1:
        raise ValueError(f"num_heads = {num_heads}: expected 1 or more")
    power = 2 ** int(np.log2(num_heads))
    slopes = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
    slopes += [2.0 ** (-4 * (2 * h + 1) / power) for h in range(num_heads - power)]
    return jnp.array(slopes, jnp.float32)
