"""Scores whose decays differ by feature: P_tj = Σ_c rows_tc · columns_jc · exp(G_tc − G_jc) for j ≤ t.

No factor that depends on a row alone, times one that depends on a column alone, has exponents that are at most 0. So
the tokens are in blocks: between a row and an earlier block the decay is split at the first token of the row's block,
which makes products of two factors of at most 1, and within a block each pair has its exponent.
"""

import jax
import jax.numpy as jnp

from attnlab.types import Array

_BLOCK = 8


@jax.custom_vjp
def scores(rows: Array, columns: Array, total: Array) -> Array:
    """P `[..., R, C, C]`, arbitrary where j > t.

    Args:
      rows: `[..., R, C, K]`, R sets of rows.
      columns: `[..., C, K]`.
      total: G, `[..., C, K]`.
    """
    return _forward(rows, columns, total)[0]


def _forward(rows, columns, total):
    parts = _Parts(total)
    blocked = parts.by_block(rows)
    between = jnp.einsum("...rbtk,...bjk->...rbtj", blocked * parts.after, parts.before * parts.whole(columns))
    near = parts.pairs * parts.by_block(columns)[..., None, :, :]
    within = jnp.einsum("...rbtk,...btjk->...rbtj", blocked, near)
    return parts.joined(between, within), (rows, columns, total)


def _backward(residuals, g):
    rows, columns, total = residuals
    parts = _Parts(total)
    between, within = parts.split(g)
    blocked = parts.by_block(rows)
    near = parts.pairs * parts.by_block(columns)[..., None, :, :]
    d_rows = jnp.einsum("...rbtj,...bjk->...rbtk", between, parts.before * parts.whole(columns)) * parts.after
    d_rows = parts.tokens(d_rows + jnp.einsum("...rbtj,...btjk->...rbtk", within, near))
    # In the order [j, t]: otherwise XLA would transpose the largest array.
    near = parts.pairs_by_column() * blocked[..., None, :, :]
    d_columns = parts.tokens(jnp.einsum("...rbtj,...rbjtk->...bjk", within, near))
    scaled = blocked * parts.after
    for block in range(1, blocked.shape[-3]):
        product = jnp.einsum("...rtj,...rtk->...jk", between[..., block, :, :], scaled[..., block, :, :])
        d_columns += (product * parts.before[..., block, :, :])[..., : rows.shape[-2], :]
    return d_rows, d_columns, (rows * d_rows).sum(axis=-3) - columns * d_columns


scores.defvjp(_forward, _backward)


class _Parts:
    """The decays between tokens `[..., C, K]` in blocks of B.

    Attributes:
      after: from the first token of a block to each of the block, `[..., 1, blocks, B, K]`.
      before: from each token to the first of a later block, `[..., blocks, C, K]`, otherwise 0.
      pairs: from token j to token t ≥ j of a block, `[..., blocks, t, j, K]`.
    """

    def __init__(self, total):
        self._size, self._padding = total.shape[-2], -total.shape[-2] % _BLOCK
        blocked = self.by_block(total)
        first = jnp.pad(blocked[..., :-1, -1:, :], [*[(0, 0)] * (total.ndim - 2), (1, 0), (0, 0), (0, 0)])
        self.after = jnp.exp(blocked - first)[..., None, :, :, :]
        starts = _BLOCK * jnp.arange(blocked.shape[-3])
        earlier = (jnp.arange(self._size + self._padding) < starts[:, None])[..., None]
        difference = first - self.whole(total)
        self.before = jnp.where(earlier, jnp.exp(jnp.where(earlier, difference, 0)), 0)
        inner = jnp.tri(_BLOCK, dtype=bool)[..., None]
        self.pairs = jnp.exp(jnp.where(inner, blocked[..., :, None, :] - blocked[..., None, :, :], 0))
        self._total = blocked

    def pairs_by_column(self):
        """`pairs` with its axes t and j exchanged, `[..., 1, blocks, j, t, K]`, for every set of rows."""
        inner = jnp.tri(_BLOCK, dtype=bool).T[..., None]
        difference = self._total[..., None, :, :] - self._total[..., :, None, :]
        return jnp.exp(jnp.where(inner, difference, 0))[..., None, :, :, :, :]

    def _padded(self, x):
        widths = [*[(0, 0)] * (x.ndim - 2), (0, self._padding), (0, 0)]
        return jnp.pad(x, widths, mode="edge") if self._padding else x

    def by_block(self, x):
        x = self._padded(x)
        return x.reshape(*x.shape[:-2], -1, _BLOCK, x.shape[-1])

    def whole(self, x):
        """`[..., C, K]` for every block of rows, `[..., 1, C, K]`."""
        return self._padded(x)[..., None, :, :]

    def tokens(self, x):
        """The inverse of `by_block`."""
        return x.reshape(*x.shape[:-3], -1, x.shape[-1])[..., : self._size, :]

    def joined(self, between, within):
        """P from its parts `[..., blocks, B, C]` and `[..., blocks, B, B]`."""
        blocks = between.shape[-3]
        same = jnp.eye(blocks, dtype=bool)[:, None, :, None]
        within = jnp.where(same, within[..., None, :], 0).reshape(between.shape)
        return self.tokens(between + within)[..., : self._size]

    def split(self, x):
        """The parts of P `[..., C, C]`, within a block the pairs j ≤ t alone."""
        blocks = (self._size + self._padding) // _BLOCK
        x = jnp.pad(x, [*[(0, 0)] * (x.ndim - 2), (0, self._padding), (0, self._padding)])
        between = x.reshape(*x.shape[:-2], blocks, _BLOCK, x.shape[-1])
        parts = between.reshape(*between.shape[:-1], blocks, _BLOCK)
        within = jnp.einsum("...btbj->...btj", parts)
        return between, jnp.where(jnp.tri(_BLOCK, dtype=bool), within, 0)
