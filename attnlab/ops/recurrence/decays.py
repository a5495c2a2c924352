"""Decays within a chunk, as factors of products: none, one per head, or one per feature of the keys.

The decay between two tokens is the exponential of a sum of logs, each at most 0, over the tokens between them. A
difference of two running sums would be cheaper but wrong: it loses digits if the sum before both tokens is large, and
all digits after a token that resets the state.
"""

from typing import NamedTuple

import jax.numpy as jnp

from attnlab.ops.recurrence import by_feature
from attnlab.ops.recurrence.products import product
from attnlab.ops.recurrence.sums import over
from attnlab.types import Array, DType


class Decays(NamedTuple):
    """The decays of a chunk of C tokens: their finite logs g, `[..., H, C, 1]` or `[..., H, C, K]`; None for 0.

    `operand` is the type of the scores' operands; see `product`.
    """

    g: Array | None
    operand: DType | None = None

    def read(self, rows, state):
        """Multiply rows `[..., H, R, C, K]` by the entering state decayed up to each row: `[..., H, R, C, V]`."""
        if self._by_feature:
            return self.from_start(rows) @ state[..., None, :, :]
        return self.from_start(rows @ state[..., None, :, :])

    def write(self, state, *writes):
        """The state after the chunk, `[..., K, V]`: the entering state plus keysᵀ·values of `writes`, all decayed."""
        state = state if self.g is None else state * self.whole[..., None]
        for keys, values in writes:
            keys, values = (self.to_end(keys), values) if self._by_feature else (keys, self.to_end(values))
            state = state + keys.mT @ values
        return state

    def from_start(self, rows):
        """Decay rows `[..., H, R, C, F]` from the chunk's start to their tokens; F is K if decays are by feature."""
        if self.g is None:
            return rows
        return rows * jnp.exp(over(jnp.tri(self.g.shape[-2]), self.g))[..., None, :, :]

    def to_end(self, rows):
        """Decay rows `[..., H, C, F]` from their tokens to the end of the chunk."""
        if self.g is None:
            return rows
        return rows * jnp.exp(over(jnp.tri(self.g.shape[-2], k=-1).T, self.g))

    @property
    def whole(self):
        """The decay of the whole chunk, `[..., H, K]` or `[..., H, 1]`; None for 1."""
        return None if self.g is None else jnp.exp(self.g.sum(axis=-2))

    def scores(self, rows, columns):
        """Σ_c rows_tc · columns_jc · exp(g_{j+1,c} + … + g_tc) for the pairs j ≤ t.

        Args:
          rows: `[..., H, R, C, K]`, R sets of rows.
          columns: `[..., H, N, K]`, N / C sets of C columns, one after another.

        Returns:
          `[..., H, R, C, N]`, 0 for other pairs.
        """
        if self._by_feature:
            return by_feature.scores(rows, columns, self.g, self.operand)
        size = rows.shape[-2]
        pairs, sets = jnp.tri(size, dtype=bool), columns.shape[-2] // size
        products = product("...rtk,...jk->...rtj", rows, columns, self.operand)
        if self.g is None:
            return jnp.where(jnp.tile(pairs, sets), products, 0)
        decay = jnp.where(pairs, jnp.exp(self._between()), 0)
        return products * jnp.concatenate([decay] * sets, axis=-1)[..., None, :, :]

    def _between(self):
        """The log of the decay from token j to token t ≥ j, `[..., H, t, j]`."""
        size = self.g.shape[-2]
        until_row = jnp.where(jnp.tri(size, dtype=bool), self.g.mT, 0)  # [..., t, i]: g_i for i ≤ t
        return jnp.matmul(until_row, jnp.tri(size, k=-1, dtype=self.g.dtype), precision="highest")

    @property
    def _by_feature(self) -> bool:
        return self.g is not None and self.g.shape[-1] > 1
