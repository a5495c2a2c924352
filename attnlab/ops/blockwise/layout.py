"""Arrays cut into blocks along their length, and the parts of a bias.

Tiles of scores have axes `[..., H, queries, keys]` in the forward pass and `[..., H, keys, queries]` in the backward
pass: their products are then rows by columns or rows by rows, the fast forms of XLA's CPU backend.
"""

import jax.numpy as jnp
from jax import lax

from attnlab.ops import products
from attnlab.ops.platforms import platform_of
from attnlab.types import Array


def blocked(x: Array, size: int, fill=0) -> Array:
    """`[..., T, H, D]` as `[..., n, size, H, D]`, the last block padded with `fill`."""
    *batch, length, heads, width = x.shape
    x = jnp.pad(x, [(0, 0)] * len(batch) + [(0, -length % size), (0, 0), (0, 0)], constant_values=fill)
    return x.reshape(*batch, -1, size, heads, width)


def joined(x: Array, length: int) -> Array:
    """The inverse of `blocked`."""
    return x.reshape(*x.shape[:-4], -1, *x.shape[-2:])[..., :length, :, :]


def joined_rows(x: Array, length: int) -> Array:
    """`[n, ..., H, size, D]` as `[..., T, H, D]`."""
    return joined(jnp.moveaxis(x, (0, -2), (-4, -3)), length)


def joined_transposed(x: Array, length: int) -> Array:
    """`[n, ..., H, D, size]` as `[..., T, H, D]`: sums over keys are transposed, once for all tiles."""
    return joined(jnp.moveaxis(x, (0, -1), (-4, -3)), length)


def block_at(blocks: Array, i) -> Array:
    """Block i as `[..., H, size, D]`, copied, so that products may read it in any order."""
    block = lax.dynamic_index_in_dim(blocks, i, axis=blocks.ndim - 4, keepdims=False)
    return exchanged(block, -3)


def exchanged(x: Array, axis: int) -> Array:
    """`x` with an axis, counted from the end, and the next one exchanged, copied."""
    if platform_of(x) == "cpu":
        return products.exchanged(x, axis)
    return lax.optimization_barrier(x.swapaxes(axis, axis + 1))  # TPUs would pad one more axis


def with_block(blocks: Array, i, block: Array) -> Array:
    """`blocks` with block i replaced by `block`, `[..., H, size, D]`."""
    block = block.swapaxes(-2, -3).astype(blocks.dtype)
    return lax.dynamic_update_index_in_dim(blocks, block, i, axis=blocks.ndim - 4)


def per_query_head(x: Array, num_heads: int) -> Array:
    """`[..., Hk, n, m]` to `[..., H, n, m]`: head h of q reads head h // (H / Hk) (Ainslie et al. 2023)."""
    group = num_heads // x.shape[-3]
    return x if group == 1 else jnp.repeat(x, group, axis=-3)


def per_kv_head(x: Array, kv_heads: int) -> Array:
    """The transpose of `per_query_head`: sums over each group of heads."""
    *batch, num_heads, n, m = x.shape
    return x if num_heads == kv_heads else x.reshape(*batch, kv_heads, num_heads // kv_heads, n, m).sum(axis=-3)


def bias_tile(bias: Array | None, block_sizes: tuple[int, int], i, j) -> Array | None:
    """The part of a bias `[..., Tq or 1, Tk]` for query block i and key block j, `[..., queries or 1, keys]`."""
    if bias is None:
        return None
    sizes, starts = _bias_place(bias, block_sizes, i, j)
    return lax.dynamic_slice(bias, starts, sizes)


def add_bias_tile(d_bias: Array | None, d_tile: Array | None, block_sizes: tuple[int, int], i, j) -> Array | None:
    """`d_bias` plus `d_tile`, laid out as by `bias_tile`."""
    if d_bias is None:
        return None
    sizes, starts = _bias_place(d_bias, block_sizes, i, j)
    d_tile = lax.dynamic_slice(d_bias, starts, sizes) + d_tile.astype(d_bias.dtype)
    return lax.dynamic_update_slice(d_bias, d_tile, starts)


def _bias_place(bias, block_sizes, i, j):
    """(sizes, starts) of a tile's slice."""
    q_size, kv_size = block_sizes
    all_queries_share = bias.shape[-2] == 1
    sizes = (*bias.shape[:-2], 1 if all_queries_share else q_size, kv_size)
    return sizes, (*(0,) * (bias.ndim - 2), 0 if all_queries_share else i * q_size, j * kv_size)


def product(subscripts: str, a: Array, b: Array, dtype) -> Array:
    """`jnp.einsum` over the last two axes, e.g. "kd,qd->kq", accumulated in `dtype`."""
    a_axes, b_axes, axes = subscripts.replace("->", ",").split(",")
    return jnp.einsum(f"...{a_axes},...{b_axes}->...{axes}", a, b, preferred_element_type=dtype)
