"""Decays within a chunk, as factors of products: none, one a head, or one for each feature of the keys.

A decay between two tokens is the exponential of a sum of logs that are at most 0, summed over the tokens between the
two. A difference of two running sums would be less, and wrong: the digits of what was before both are lost in it, and
behind a token that resets the state none is left.
"""

from typing import NamedTuple

import jax.numpy as jnp

from attnlab.ops.recurrence import by_feature
from attnlab.ops.recurrence.sums import over
from attnlab.types import Array


class Decays(NamedTuple):
    """The decays of a chunk of C tokens: their finite logs g, `[..., H, C, 1]` or `[..., H, C, K]`; None for 0."""

    g: Array | None

    def read(self, rows, state):
        """rows `[..., H, R, C, K]` times the state before the chunk decayed up to each row, `[..., H, R, C, V]`."""
        if self.g is None:
            return rows @ state[..., None, :, :]
        before = jnp.exp(over(jnp.tri(self.g.shape[-2]), self.g))[..., None, :, :]
        if self._by_feature:
            return (rows * before) @ state[..., None, :, :]
        return (rows @ state[..., None, :, :]) * before

    def write(self, state, *writes):
        """The state after the chunk, `[..., K, V]`: what was before and, of each pair, keys `[..., C, K]`ᵀ values."""
        if self.g is not None:
            state = state * jnp.exp(self.g.sum(axis=-2))[..., None]
            until_after = jnp.exp(over(jnp.tri(self.g.shape[-2], k=-1).T, self.g))
        for keys, values in writes:
            if self._by_feature:
                keys = keys * until_after
            elif self.g is not None:
                values = values * until_after
            state = state + keys.mT @ values
        return state

    def scores(self, rows, columns):
        """Σ_c rows_tc · columns_jc · exp(g_{j+1,c} + … + g_tc) for the pairs j ≤ t.

        Args:
          rows: `[..., H, R, C, K]`, R sets of rows.
          columns: `[..., H, C, K]`.

        Returns:
          `[..., H, R, C, C]`, 0 for other pairs.
        """
        if self._by_feature:
            return by_feature.scores(rows, columns, self.g)
        pairs = jnp.tri(columns.shape[-2], dtype=bool)
        products = jnp.einsum("...rtk,...jk->...rtj", rows, columns)
        if self.g is None:
            return jnp.where(pairs, products, 0)
        return products * jnp.where(pairs, jnp.exp(self._between()), 0)[..., None, :, :]

    def _between(self):
        """The log of the decay from token j to token t ≥ j, `[..., H, t, j]`."""
        size = self.g.shape[-2]
        until_row = jnp.where(jnp.tri(size, dtype=bool), self.g.mT, 0)  # [..., t, i]: g_i for i ≤ t
        return jnp.matmul(until_row, jnp.tri(size, k=-1, dtype=self.g.dtype), precision="highest")

    @property
    def _by_feature(self) -> bool:
        return self.g is not None and self.g.shape[-1] > 1
