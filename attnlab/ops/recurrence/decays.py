"""Decays within a chunk, as factors of products: none, one a head, or one for each feature of the keys.

A decay between two tokens is the exponential of a sum of logs that are at most 0. The sum is masked before the
exponential, so that no factor and no derivative overflows, however fast a state decays.
"""

from typing import NamedTuple

import jax.numpy as jnp

from attnlab.ops.recurrence import by_feature
from attnlab.types import Array


class Decays(NamedTuple):
    """The decays of a chunk of C tokens.

    Attributes:
      total: the running sums G of g, `[..., H, C, 1]`, or `[..., H, C, K]` by feature; None for no decay.
      segment: the number of each token's segment within the chunk, int32 `[..., 1, C]`, 0 for the one that began
        before; None for one segment.
    """

    total: Array | None
    segment: Array | None

    @classmethod
    def of(cls, g, starts) -> "Decays":
        """From g `[..., H, C, 1 or K]` and starts `[..., C]`."""
        # A product, as XLA's cumulative sums are slow on CPUs.
        total = None if g is None else jnp.matmul(jnp.tri(g.shape[-2], dtype=g.dtype), g, precision="highest")
        return cls(total, None if starts is None else jnp.cumsum(starts, axis=-1, dtype=jnp.int32)[..., None, :])

    def read(self, rows, state):
        """rows `[..., H, R, C, K]` times the state before the chunk decayed up to each row, `[..., H, R, C, V]`."""
        if self.total is None:
            out = rows @ state[..., None, :, :]
        elif self._by_feature:
            out = (rows * jnp.exp(self.total)[..., None, :, :]) @ state[..., None, :, :]
        else:
            out = (rows @ state[..., None, :, :]) * jnp.exp(self.total)[..., None, :, :]
        return out if self.segment is None else jnp.where((self.segment == 0)[..., None, :, None], out, 0)

    def write(self, state, *writes):
        """The state after the chunk, `[..., K, V]`: what was before and, of each pair, keys `[..., C, K]`ᵀ values."""
        if self.total is not None:
            until_after = jnp.exp(self.total[..., -1:, :] - self.total)
            state = state * jnp.exp(self.total[..., -1, :])[..., None]
        if self.segment is not None:
            state = jnp.where((self.segment[..., -1] == 0)[..., None, None], state, 0)
        for keys, values in writes:
            if self._by_feature:
                keys = keys * until_after
            elif self.total is not None:
                values = values * until_after
            if self.segment is not None:
                values = jnp.where((self.segment == self.segment[..., -1:])[..., None], values, 0)
            state = state + keys.mT @ values
        return state

    def scores(self, rows, columns, *, itself: bool):
        """Σ_c rows_tc · columns_jc · exp(G_tc − G_jc) for the pairs j ≤ t of one segment, j < t without `itself`.

        Args:
          rows: `[..., H, R, C, K]`, R sets of rows.
          columns: `[..., H, C, K]`.

        Returns:
          `[..., H, R, C, C]`, 0 for other pairs.
        """
        size = columns.shape[-2]
        pairs = jnp.tri(size, k=0 if itself else -1, dtype=bool)
        if self.segment is not None:
            pairs &= (self.segment[..., :, None] == self.segment[..., None, :])[..., None, :, :]
        if self._by_feature:
            return jnp.where(pairs, by_feature.scores(rows, columns, self.total), 0)
        products = jnp.einsum("...rtk,...jk->...rtj", rows, columns)
        if self.total is not None:
            difference = jnp.where(jnp.tri(size, dtype=bool), self.total - self.total.mT, 0)
            products = products * jnp.exp(difference)[..., None, :, :]
        return jnp.where(pairs, products, 0)

    @property
    def _by_feature(self) -> bool:
        return self.total is not None and self.total.shape[-1] > 1
