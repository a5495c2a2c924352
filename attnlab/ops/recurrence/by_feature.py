"""Scores whose decays differ by feature: P_tj = Σ_c rows_tc · columns_jc · exp(g_{j+1,c} + … + g_tc) for j ≤ t.

No factor that depends on a row alone, times one that depends on a column alone, has exponents that are at most 0. So
the tokens are halved again and again: between the halves of a part the decay is split where the second half begins,
which makes products of two factors of at most 1, and a pair of tokens belongs to the level at which it is parted.
"""

import functools

import jax.numpy as jnp
import numpy as np

from attnlab.ops.recurrence.products import product
from attnlab.ops.recurrence.sums import over
from attnlab.types import Array, DType


def scores(rows: Array, columns: Array, g: Array, operand: DType | None = None) -> Array:
    """P `[..., R, C, N]`, 0 where j > t.

    Args:
      rows: `[..., R, C, K]`, R sets of rows.
      columns: `[..., N, K]`, whole sets of C columns, one after another.
      g: `[..., C, K]`.
      operand: type of the products' operands, see `product`.
    """
    each = functools.partial(product, "...rtk,...jk->...rtj", operand=operand)
    size, sets = g.shape[-2], columns.shape[-2] // g.shape[-2]
    found = jnp.where(np.tile(np.eye(size, dtype=bool), sets), each(rows, columns), 0)
    # One by one: on CPUs XLA's sums over an axis of levels, or over slices of it, take longer than all the rest.
    for spans, pairs in _levels(size):
        decay = jnp.exp(over(spans, g))
        of_columns = columns * jnp.concatenate([decay] * sets, axis=-2)
        found += jnp.where(np.tile(pairs, sets), each(rows * decay[..., None, :, :], of_columns), 0)
    return found


def _levels(size: int):
    """Of each level, whose parts have 2, 4, … of C tokens, as NumPy arrays `[C, C]`.

    Yields:
      the tokens between each token and the middle of its part; the pairs (t, j) in the second and first half of a part.
    """
    row, column = np.arange(size)[:, None], np.arange(size)
    half = 1
    while half < size:
        is_later = row // half % 2 == 1
        middle = (row // half + 1 - is_later) * half
        spans = np.where(is_later, (middle <= column) & (column <= row), (row < column) & (column < middle))
        yield spans, is_later & ~is_later.T & (row // half // 2 == column // half // 2)
        half *= 2
