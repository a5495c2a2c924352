"""The tiles of a score array: which are computed, how large they are, and in which order they are visited."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from attnlab.ops.masks import Mask
from attnlab.types import Array

# The entries of a block mask: none, some or all of a tile's pairs are visible.
EMPTY, PARTIAL, FULL = 0, 1, 2


class Costs(NamedTuple):
    """The cost of a tile of n scores: n times the factors that apply, plus per_tile + per_row·(its longer side)."""

    sizes: tuple[int, ...]  # tile sizes to choose from, ascending
    max_scores: int  # scores that a tile may hold, over all heads that are computed together
    cached_scores: int  # scores beyond which a tile no longer fits the nearest caches
    uncached: float  # factor for larger tiles
    comparing: float  # factor for PARTIAL tiles, whose pairs are compared with the mask
    per_tile: float  # in units of one score
    per_row: float  # in units of one score


# Fitted on two x86 cores with 1 MiB of L2 each: float32, 8 to 128 heads times examples, 64 features per head.
CPU = Costs(
    (64, 128, 256, 512), max_scores=2**21, cached_scores=2**19, uncached=1.15, comparing=1.25, per_tile=0, per_row=1450
)
# Not fitted: a tile takes a handful of kernels, each about 5 µs to launch.
ACCELERATOR = Costs(
    (128, 256, 512, 1024), max_scores=2**26, cached_scores=2**26, uncached=1, comparing=1, per_tile=1e7, per_row=0
)


def schedule(
    mask: Mask | None,
    q_length: int,
    kv_length: int,
    block_sizes: tuple[int, int] | None = None,
    *,
    costs: Costs = CPU,
    heads_per_step: int | None = None,
    **where,
) -> tuple[tuple[int, int], Int[Array, "nQ nK"]]:
    """Return tile sizes and the block mask: EMPTY, PARTIAL or FULL for each tile, over all heads and examples.

    A tile holds the scores of `heads_per_step` heads, counted over all examples; None means all of them.

    `block_sizes` None means the cheapest sizes for the mask by `costs`. The block mask is a NumPy array if the mask is
    known while tracing; for a traced mask, tiles have a moderate size and the block mask is traced too. `where` are
    other arguments of `Mask.tiles`.
    """
    lengths = (q_length, kv_length)
    if block_sizes is not None:
        block_sizes = _clipped(block_sizes, lengths)
        return block_sizes, _block_mask(mask, lengths, block_sizes, where)

    # The symbolic sizes of jax.export count as 1.
    batch = (size for size in where.get("batch", ()) if isinstance(size, int))
    rows = where.get("num_heads", 1) * math.prod(batch) if heads_per_step is None else heads_per_step
    # The finest division with few enough tiles to list; coarser divisions merge its tiles.
    finest, *coarser = [size for size in costs.sizes if size * 2048 >= max(lengths)] or costs.sizes[-1:]
    any_visible, all_visible = _tiles(mask, lengths, _clipped((finest, finest), lengths), where)
    if not isinstance(any_visible, np.ndarray):
        fits = [size for size in costs.sizes if rows * size**2 <= costs.cached_scores and size <= 256]
        block_sizes = _clipped((max(fits, default=finest),) * 2, lengths)
        return block_sizes, _block_mask(mask, lengths, block_sizes, where)
    any_visible, any_masked = (x.any(axis=tuple(range(x.ndim - 2))) for x in (any_visible, ~all_visible))

    candidates = []
    for size in (finest, *coarser):
        block_sizes = _clipped((size, size), lengths)
        if size > finest and rows * np.prod(block_sizes) > costs.max_scores:
            continue
        by = size // finest
        block_mask = block_mask_of(_coarsened(any_visible, by), ~_coarsened(any_masked, by))
        candidates.append((block_sizes, _within(block_mask, block_sizes, lengths)))
    return min(candidates, key=lambda candidate: _cost(costs, rows, *candidate))


def block_mask_of(any_visible: Bool[Array, "..."], all_visible: Bool[Array, "..."]) -> Int[Array, "nQ nK"]:
    """The block mask over all leading axes: EMPTY where all are EMPTY, FULL where all are FULL."""
    xp = np if isinstance(any_visible, np.ndarray) else jnp
    axes = tuple(range(any_visible.ndim - 2))
    partial_or_empty = xp.where(any_visible.any(axis=axes), PARTIAL, EMPTY)
    return xp.where(all_visible.all(axis=axes), FULL, partial_or_empty).astype(np.int32)


def runs(kinds: Sequence[int]) -> list[tuple[int, int, int]]:
    """Merge neighbouring tiles of a row that are not EMPTY into runs (kind, first, count), PARTIAL if any tile is."""
    merged = []
    for column, kind in enumerate(kinds):
        if kind == EMPTY:
            continue
        last_kind, first, count = merged[-1] if merged else (EMPTY, 0, 0)
        if count and first + count == column:
            merged[-1] = (min(last_kind, kind), first, count + 1)
        else:
            merged.append((kind, column, 1))
    return merged


def visit_order(
    block_mask: Int[Array, "*b n m"],
) -> tuple[Int[Array, "*b n m"], Int[Array, "*b n"], Int[Array, "*b n"]]:
    """Return for each row its columns (FULL, then PARTIAL, then EMPTY), how many are FULL, and how many not EMPTY."""
    xp = np if isinstance(block_mask, np.ndarray) else jnp
    columns = xp.argsort(-block_mask, axis=-1, stable=True)
    return columns, (block_mask == FULL).sum(axis=-1), (block_mask > EMPTY).sum(axis=-1)


def block_masks(
    mask: Mask | None, lengths: tuple[int, int], block_sizes: tuple[int, int], **where
) -> Int[Array, "*b H nQ nK"]:
    """The block mask of each example and head, `[*batch or 1s, H or 1, nQ, nK]`; NumPy where known while tracing."""
    any_visible, all_visible = _tiles(mask, lengths, block_sizes, where)
    xp = np if isinstance(any_visible, np.ndarray) else jnp
    kinds = xp.where(any_visible, xp.where(all_visible, FULL, PARTIAL), EMPTY).astype(np.int32)
    return _within(kinds, block_sizes, lengths)


def _clipped(block_sizes, lengths):
    return tuple(map(min, block_sizes, lengths))


def _tiles(mask, lengths, block_sizes, where):
    """Return (any_visible, all_visible) for each tile, `[B or 1, H or 1, nQ, nK]`."""
    if mask is not None:
        return mask.tiles(*lengths, block_sizes, **where)
    return (np.ones([1, 1, *(-(-n // size) for n, size in zip(lengths, block_sizes))], bool),) * 2


def _block_mask(mask, lengths, block_sizes, where):
    return _within(block_mask_of(*_tiles(mask, lengths, block_sizes, where)), block_sizes, lengths)


def _within(block_mask, block_sizes, lengths):
    """The block mask, with PARTIAL in place of FULL for ragged tiles at the ends."""
    rows, columns = (
        (np.arange(n) == n - 1) & bool(length % size)
        for n, size, length in zip(block_mask.shape[-2:], block_sizes, lengths)
    )
    xp = np if isinstance(block_mask, np.ndarray) else jnp
    return xp.minimum(block_mask, np.where(rows[:, None] | columns, PARTIAL, FULL).astype(np.int32))


def _coarsened(x, by):
    """Whether any entry of each `by` × `by` block is set."""
    n, m = x.shape
    x = np.pad(x, [(0, -n % by), (0, -m % by)])
    return x.reshape(-(-n // by), by, -(-m // by), by).any(axis=(1, 3))


def _cost(costs, rows, block_sizes, block_mask):
    scores = rows * block_sizes[0] * block_sizes[1]
    scores *= costs.uncached if scores > costs.cached_scores else 1
    fixed = costs.per_tile + costs.per_row * max(block_sizes)
    num_full, num_partial = (block_mask == FULL).sum(), (block_mask == PARTIAL).sum()
    return num_full * (scores + fixed) + num_partial * (scores * costs.comparing + fixed)
