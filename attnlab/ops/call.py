"""A checked call of the attention operator, as backends receive it.

A backend is a module with two functions: `attend(call)` returns (out, (max, log_sum)), and `reason_against(call)`
returns the reason why the backend cannot compute the call, or None. Max and log_sum are separate because their float32
sum, the lse, would lose log_sum where a large number shifts the whole row. A module may also have

- `PLATFORM`: the platform that the backend needs, "cpu", "gpu" or "tpu";
- `HAS_LSE = False`: `attend` returns (out, None), because its lse has no gradient;
- `untried(call)`: the reason why "auto" does not choose the backend, such as no recorded run on its hardware, or None;
- `is_interpreted()`: whether an interpreter runs the kernels, so that any platform will do.
"""

import dataclasses
from typing import ClassVar

from jaxtyping import Float, Int

from attnlab.ops.mask_algebra import Mask
from attnlab.ops.nodes import Node
from attnlab.ops.score_mods import ScoreMod
from attnlab.ops.tiles import WHOLE, Shard
from attnlab.types import Array

Result = tuple[Float[Array, "*B Tq H Dv"], tuple[Float[Array, "*B Tq H"], Float[Array, "*B Tq H"]]]


@dataclasses.dataclass(frozen=True)
class AttentionCall(Node):
    """The arguments of `attnlab.attention`; numbers and `block_sizes` are static, arrays are leaves.

    Attributes:
      score_mods: a tuple, in the order of application.
      dropout_keys: for each example, a PRNG key or its uint32 words.
      shard: which part of a larger call this is, if that call is split over devices or computed in parts.

    >>> AttentionCall(jnp.ones((2, 5, 4, 8)), *2 * [jnp.ones((2, 7, 4, 8))], scale=0.5).lengths
    (5, 7)
    """

    q: Float[Array, "*B Tq H D"]
    k: Float[Array, "*B Tk Hk D"]
    v: Float[Array, "*B Tk Hk Dv"]
    mask: Mask | None = None
    score_mods: tuple[ScoreMod, ...] = ()
    bias: Float[Array, "..."] | None = None
    scale: float | Float[Array, ""] | None = None
    sinks: Float[Array, " H"] | None = None
    dropout_rate: float = 0.0
    dropout_keys: Array | None = None
    q_positions: Int[Array, "..."] | None = None
    kv_positions: Int[Array, "..."] | None = None
    block_sizes: tuple[int, int] | None = None
    shard: Shard = WHOLE

    STATIC: ClassVar[tuple[str, ...]] = ("block_sizes",)

    @property
    def batch(self) -> tuple[int, ...]:
        """The batch axes."""
        return self.q.shape[:-3]

    @property
    def lengths(self) -> tuple[int, int]:
        """The lengths (Tq, Tk)."""
        return self.q.shape[-3], self.k.shape[-3]

    @property
    def num_heads(self) -> int:
        """The number of query heads, H."""
        return self.q.shape[-2]

    @property
    def coordinates(self) -> dict:
        """Arguments of `Mask.tiles` besides lengths and tile sizes: positions, number of heads and batch axes."""
        positions = {"q_positions": self.q_positions, "kv_positions": self.kv_positions}
        return positions | {"num_heads": self.num_heads, "batch": self.batch}

    @property
    def is_aligned(self) -> bool:
        """Whether query i is at the position of key i."""
        return self.lengths[0] == self.lengths[1] and self.q_positions is None and self.kv_positions is None

    def replace(self, **changes) -> "AttentionCall":
        """Return a copy with other values; its tree structure is the same if the same fields are None."""
        copy = object.__new__(AttentionCall)  # not through __init__: a call may also hold specs or gradients
        vars(copy).update(vars(self) | changes)
        if "_static_names" in vars(self):
            names = vars(self)["_static_names"]
            static = (name for name in names if changes.get(name) is None or name in self.STATIC)
            object.__setattr__(copy, "_static_names", tuple(static))
        return copy

    def of_shard(self) -> "AttentionCall":
        """The call with the parts of mask and score mods that its shard needs."""
        mask = None if self.mask is None else self.mask.of_shard(self.shard)
        return self.replace(mask=mask, score_mods=tuple(mod.of_shard(self.shard) for mod in self.score_mods))
