"""Score mods: elementwise changes to the attention scores before the softmax.

A score mod is a pytree, like a mask: arrays in it are leaves and get gradients. Pass one, or a tuple of them, to
`attnlab.attention(..., score_mod=…)`, which applies them in order.
"""

import numbers
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from attnlab.ops import elementwise
from attnlab.ops.nodes import Node
from attnlab.ops.tiles import Shard, Tile
from attnlab.types import Array


class ScoreMod(Node):
    """Base class of score mods; subclasses are frozen dataclasses that define `apply`.

    Attributes:
      positional: whether the mod depends on positions, which must then be explicit when Tq ≠ Tk.

    >>> import dataclasses
    >>> @dataclasses.dataclass(frozen=True)
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
        """Return the new scores of a tile, computed elementwise from the scores and the tile's coordinates.

        Args:
          scores: `[..., H, queries, keys]`, the output of the previous mod; the last two axes may be swapped.
          tile: coordinates, each broadcastable to the scores: `example`, `head`, `q_position`, `kv_position`,
            `q_index`, `kv_index`.

        Returns:
          `[..., H, queries, keys]`, with the last two axes as in `scores`.
        """
        raise TypeError(f"{type(self).__name__} defines no apply(scores, tile): write it in the subclass")

    def for_tiles(self, score_type) -> "ScoreMod":
        """The same mod for scores of a type; arrays that its functions close over become leaves if any is traced."""
        return self

    def of_shard(self, shard: Shard) -> "ScoreMod":
        """The same mod for a part of a call, e.g. of a call that `attnlab.context_parallel` splits over devices.

        Coordinates refer to the whole call, as do the rows of arrays read through `tile.of_queries`, `of_keys`
        or `of_pairs`. Subclasses whose arrays have axes for examples override this method.
        """
        return self

    def check(self, batch: tuple[int, ...], num_heads: int, q_length: int, kv_length: int) -> None:
        """Raise ValueError when the mod's arrays do not fit scores `[*batch, num_heads, q_length, kv_length]`."""

    def __bool__(self):
        raise TypeError(
            f"{type(self).__name__} has no truth value: pass a tuple to apply several score mods, not and, or or not; "
            "test for a missing one with `is None`"
        )


@dataclass(frozen=True)
class ALiBi(ScoreMod):
    """Attention with linear biases: score − slope·|i − j|, one slope per head (Press et al. 2022, section 3).

    `slopes` is `[H]`, in logits per position of distance.

    >>> q = k = jnp.zeros((3, 1, 4))  # every score 0
    >>> weights = attention_weights(q, k, score_mod=ALiBi(jnp.log(jnp.array([2.0]))))
    >>> print(np.asarray(weights[0, 0]).round(2))  # of the first query: halved for each further position
    [0.57 0.29 0.14]
    """

    slopes: Float[Array, " H"]
    positional = True

    def apply(self, scores, tile):
        distance = abs(tile.q_position - tile.kv_position)
        return scores - tile.of_heads(self.slopes).astype(scores.dtype) * distance.astype(scores.dtype)

    def check(self, batch, num_heads, q_length, kv_length):
        expected = f"({num_heads},): one slope per head, e.g. score_mods.alibi_slopes(num_heads)"
        _check_shape("ALiBi slopes", self.slopes, np.shape(self.slopes) == (num_heads,), expected)


@dataclass(frozen=True)
class RelativeBias(ScoreMod):
    """A learned bias for each head and distance: score + table[h, R + clip(j − i, ±R)] (Shaw et al. 2018, equation 4).

    `table` is `[H, 2·R + 1]`, in logits; column R + d is for keys d positions after the query, and distances beyond
    ±R share the columns at the ends.

    >>> q, k = jnp.zeros((2, 3, 1, 4))  # every score 0
    >>> table = jnp.log(jnp.array([[1.0, 2.0, 4.0]]))  # key before, at, after the query
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
        return scores + jnp.asarray(self.table, scores.dtype)[tile.head, distance + reach]

    def check(self, batch, num_heads, q_length, kv_length):
        shape = np.shape(self.table)
        fits = len(shape) == 2 and shape[0] == num_heads and shape[1] % 2 == 1
        expected = f"({num_heads}, 2·R + 1): a row per head, a column per distance from −R to R"
        _check_shape("RelativeBias table", self.table, fits, expected)


@dataclass(frozen=True)
class SoftCap(ScoreMod):
    """Scores limited to ±cap: cap·tanh(score / cap) (Gemma Team 2024, section 2).

    `cap`, in logits, is a number above 0, or an array of shape `()`.

    >>> SoftCap(2.0).apply(jnp.array([0.0, 100.0]), tile=None)
    Array([0., 2.], dtype=float32)
    """

    cap: float | Float[Array, ""]

    def __post_init__(self):
        if isinstance(self.cap, numbers.Number) and not self.cap > 0:
            raise ValueError(f"SoftCap cap = {self.cap}: expected a number above 0")

    def apply(self, scores, tile):
        cap = self.cap if isinstance(self.cap, numbers.Number) else tile.of_examples(self.cap)
        return cap * jnp.tanh(scores / cap)

    def check(self, batch, num_heads, q_length, kv_length):
        _check_shape("SoftCap cap", self.cap, np.shape(self.cap) == (), "(): one number for all heads")


@dataclass(frozen=True)
class Forget(ScoreMod):
    """Forgetting attention: score + c_i − c_j; c is the running sum of log f for gates f (Lin et al. 2025, section 3).

    `queries` is c at the queries, float32 or float64 `[Tq, H]` or `[..., Tq, H]` with exactly q's batch axes, in
    logits; `keys` is likewise c at the keys, `[Tk, H]` or `[..., Tk, H]`; None for `queries`. With `Causal`, a
    key's score changes by Σ log f ≤ 0 over the tokens after it, up to the query. Memory is linear in the length.

    Rounding: all terms of c have one sign and `jnp.cumsum` adds pairwise, so c_i − c_j in float32 is within
    (4·log₂ T + 1)·2⁻²⁴·|c_T| of the exact difference: 0.04 for T = 16,384 and gates of ½ (measured: 0.004). A
    gate of 0, or nearly 0, would leave no digits for later tokens: sum `jnp.maximum(log_gates, -100)`, which forgets
    just as well. Sums too low for their type to resolve are an error unless they are traced.

    >>> q = k = jnp.zeros((3, 1, 4))  # every score 0
    >>> gates = jnp.array([[0.9], [0.5], [0.5]])  # of the tokens, for one head
    >>> mod = Forget(jnp.cumsum(jnp.log(gates), axis=-2))
    >>> weights = attention_weights(q, k, mask=Causal(), score_mod=mod)[0]
    >>> print(np.asarray(weights[-1] / weights[-1, -1]).round(2))  # of the last query: 0.5 · 0.5, 0.5, 1
    [0.25 0.5  1.  ]
    """

    queries: Float[Array, "... Tq H"]
    keys: Float[Array, "... Tk H"] | None = None

    def _sums(self):
        return self.queries, self.queries if self.keys is None else self.keys

    def apply(self, scores, tile):
        at_queries, at_keys = self._sums()
        difference = tile.of_queries(at_queries, per_head=True) - tile.of_keys(at_keys, per_head=True)
        return scores + difference.astype(scores.dtype)

    def of_shard(self, shard):
        at_queries, at_keys = self._sums()
        return Forget(shard.take(at_queries, "queries", "heads"), shard.take(at_keys, "keys", "heads"))

    def check(self, batch, num_heads, q_length, kv_length):
        for name, sums, length in zip(("queries", "keys"), self._sums(), (q_length, kv_length)):
            if sums.dtype not in (jnp.float32, jnp.float64):
                raise ValueError(f"Forget {name} has type {sums.dtype}, expected float32 or float64: sum in float32")
            shapes = (length, num_heads), (*batch, length, num_heads)
            remedy = "pass keys too" if self.keys is None and q_length != kv_length else "a sum per token and head"
            expected = f"{shapes[0]} or {shapes[1]}: {remedy}"
            _check_shape(f"Forget {name}", sums, np.shape(sums) in shapes, expected)
            lowest = 0 if isinstance(sums, jax.core.Tracer) else float(np.asarray(sums).min(initial=0))
            if not lowest > -(2 if sums.dtype == jnp.float32 else 2**30) * 2**22:  # floats half a logit apart, or more
                raise ValueError(f"Forget {name} has sums down to {lowest:g}, too imprecise: sum max(log gate, -100)")


@dataclass(frozen=True, init=False)
class ScoreFn(elementwise.Function, ScoreMod):
    """Any change to the scores: `fn(score, b, h, i, j, *arrays)`.

    The function is written for scalars: example b (counted through all batch axes), head h, positions i of the query
    and j of the key; it returns a floating scalar and is vectorized over all pairs. `arrays` are passed to it
    unchanged; it may close over arrays too, and all of them get gradients.

    >>> nearer = ScoreFn(lambda score, b, h, i, j, weight: score - weight * (i - j) ** 2, jnp.array(0.5))
    >>> q = k = jnp.zeros((2, 1, 4))  # every score 0
    >>> print(np.asarray(attention_weights(q, k, score_mod=nearer)[0]).round(2))  # 0.5 lower off the diagonal
    [[0.62 0.38]
     [0.38 0.62]]
    """

    def apply(self, scores, tile):
        coordinates = (scores, tile.example, tile.head, tile.q_position, tile.kv_position)
        changed = tile.apply(self.fn, coordinates, self.arrays, jnp.floating)
        return jnp.broadcast_to(changed, scores.shape).astype(scores.dtype)

    def for_tiles(self, score_type):
        fn, arrays = elementwise.without_closure(self.fn, (score_type, *(jnp.int32,) * 4), self.arrays)
        return ScoreFn(fn, *arrays)


ScoreMods = ScoreMod | Callable | tuple[ScoreMod | Callable, ...]  # a function counts as `ScoreFn(function)`


def alibi_slopes(num_heads: int) -> Float[Array, " H"]:
    """The slopes of the ALiBi paper: 2^(−8h/H) for h = 1 … H when H is a power of two.

    Otherwise the slopes for the next lower power of two, then every other slope for the next higher power (Press et al.
    2022, footnote 5 of section 3).

    Returns:
      float32 `[num_heads]`, in logits per position of distance.

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


def _check_shape(name, array, fits, expected):
    if not fits:
        raise ValueError(f"{name} has shape {np.shape(array)}, expected {expected}")
