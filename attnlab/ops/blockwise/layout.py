"""Cut arrays into blocks along the sequence, and a bias into tiles.

Tiles of scores have axes `[..., H, queries, keys]` in the forward pass and `[..., H, keys, queries]` in the backward
pass. So all products are rows by columns or rows by rows, the two forms that XLA's CPU backend computes fast.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from attnlab.ops.cpu import products
from attnlab.ops.platforms import platform_of
from attnlab.types import Array


class Range(NamedTuple):
    """Consecutive queries or keys."""

    start: int | Array
    size: int


def by_head(x: Array, size: int, fill=0) -> Array:
    """Copy `[..., T, H, D]` to `[..., H, n·size, D]`, padded with `fill` to a multiple of `size`."""
    *batch, length, _, _ = x.shape
    x = jnp.pad(x, [(0, 0)] * len(batch) + [(0, -length % size), (0, 0), (0, 0)], constant_values=fill)
    return exchanged(x, -3)


def rows_at(x: Array, at: Range) -> Array:
    """The rows of `[..., H, T, D]` in a range."""
    return lax.dynamic_slice_in_dim(x, at.start, at.size, axis=-2)


def joined_rows(x: Array, length: int) -> Array:
    """Join blocks `[n, ..., H, size, D]` to `[..., T, H, D]`."""
    x = jnp.moveaxis(x, (0, -2), (-4, -3))
    return x.reshape(*x.shape[:-4], -1, *x.shape[-2:])[..., :length, :, :]


def exchanged(x: Array, axis: int) -> Array:
    """Copy `x`, exchanging `axis`, which is negative, and the axis after it."""
    if platform_of(x) == "cpu":
        return products.exchanged(x, axis)
    return lax.optimization_barrier(x.swapaxes(axis, axis + 1))  # TPUs would pad the axis that the CPU form adds


def per_query_head(x: Array, num_heads: int) -> Array:
    """Repeat `[..., Hk, n, m]` to `[..., H, n, m]`: head h of q reads head h // (H / Hk) (Ainslie et al. 2023)."""
    group = num_heads // x.shape[-3]
    return x if group == 1 else jnp.repeat(x, group, axis=-3)


def per_kv_head(x: Array, kv_heads: int) -> Array:
    """The transpose of `per_query_head`: sums over each group of heads."""
    *batch, num_heads, n, m = x.shape
    return x if num_heads == kv_heads else x.reshape(*batch, kv_heads, num_heads // kv_heads, n, m).sum(axis=-3)


def bias_tile(bias: Array | None, rows: Range, columns: Range) -> Array | None:
    """The part `[..., queries or 1, keys]` of a bias `[..., Tq or 1, Tk]`."""
    if bias is None:
        return None
    sizes, starts = _bias_place(bias, rows, columns)
    return lax.dynamic_slice(bias, starts, sizes)


def add_bias_tile(d_bias: Array | None, d_tile: Array | None, rows: Range, columns: Range) -> Array | None:
    """Add `d_tile` to the part of `d_bias` that `bias_tile` would return."""
    if d_bias is None:
        return None
    sizes, starts = _bias_place(d_bias, rows, columns)
    d_tile = lax.dynamic_slice(d_bias, starts, sizes) + d_tile.astype(d_bias.dtype)
    return lax.dynamic_update_slice(d_bias, d_tile, starts)


def _bias_place(bias, rows, columns):
    """Return (sizes, starts) of a tile's slice."""
    rows = Range(0, 1) if bias.shape[-2] == 1 else rows  # one row for all queries
    return (*bias.shape[:-2], rows.size, columns.size), (*(0,) * (bias.ndim - 2), rows.start, columns.start)


def product(subscripts: str, a: Array, b: Array, dtype) -> Array:
    """`jnp.einsum` over the last two axes, e.g. "kd,qd->kq", accumulated in `dtype`."""
    a_axes, b_axes, axes = subscripts.replace("->", ",").split(",")
    return jnp.einsum(f"...{a_axes},...{b_axes}->...{axes}", a, b, preferred_element_type=dtype)
