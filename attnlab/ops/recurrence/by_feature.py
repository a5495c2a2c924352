"""Scores whose decays differ by feature: P_tj = Σ_c rows_tc · columns_jc · exp(g_{j+1,c} + … + g_tc) for j ≤ t.

The decays do not split into row factors and column factors whose exponents are all at most 0. So the tokens are halved
recursively. Between a row in the second half of a part and a column in the first, the decay splits where the second
half begins, into two factors of at most 1. Each pair of tokens belongs to the level that separates it.
"""

import functools

import jax.numpy as jnp
import numpy as np

from attnlab.ops.recurrence.products import product
from attnlab.ops.recurrence.sums import over
from attnlab.types import Array, DType


def scores(rows: Array, columns: Array, g: Array, operand: DType | None = None) -> Array:
    """The scores P `[..., R, C, N]`, 0 where j > t.

    Args:
      rows: `[..., R, C, K]`, R sets of rows.
      columns: `[..., N, K]`, N / C sets of C columns, one after another.
      g: `[..., C, K]`.
      operand: type of the products' operands, see `product`.
    """
    each = functools.partial(product, "...rtk,...jk->...rtj", operand=operand)
    size, sets = g.shape[-2], columns.shape[-2] // g.shape[-2]
    total = jnp.where(np.tile(np.eye(size, dtype=bool), sets), each(rows, columns), 0)
    # Level by level: on CPUs, XLA's sum over an axis of levels, or over its slices, takes longer than everything else.
    for spans, pairs in _levels(size):
        decay = jnp.exp(over(spans, g))
        decayed_columns = columns * jnp.concatenate([decay] * sets, axis=-2)
        total += jnp.where(np.tile(pairs, sets), each(rows * decay[..., None, :, :], decayed_columns), 0)
    return total


def _levels(size: int):
    """Iterate over the levels, which divide C tokens into parts of 2, 4, …; yield bool NumPy arrays `[C, C]`.

    Yields:
      (the tokens between each token and the middle of its part, the pairs (t, j) in a part's second and first half).
    """
    row, column = np.arange(size)[:, None], np.arange(size)
    half = 1
    while half < size:
        is_later = row // half % 2 == 1
        middle = (row // half + 1 - is_later) * half
        spans = np.where(is_later, (middle <= column) & (column <= row), (row < column) & (column < middle))
        yield spans, is_later & ~is_later.T & (row // half // 2 == column // half // 2)
        half *= 2
