"""Which tiles of a score array are to be computed, how large they are, and in which order they are visited."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from attnlab.ops.masks import Mask
from attnlab.types import Array

NONE, PART, FULL = 0, 1, 2  # of a tile's pairs are visible


class _Costs(NamedTuple):
    """What a tile of n scores costs, in units of one: n by the factors that hold, and per_tile + per_row·(its side).

    Attributes:
      sizes: that may be chosen.
      most: scores a tile may hold, over all heads and examples.
      roomy: scores beyond which a tile no longer fits the nearest caches.
      crowding: the factor for those.
      comparing: the factor for tiles whose pairs must be compared.
      per_tile, per_row: what a tile costs beside its scores.
    """

    sizes: tuple[int, ...]
    most: int
    roomy: int
    crowding: float
    comparing: float
    per_tile: float
    per_row: float


# Fitted on two x86 cores with 1 MiB of L2 each: float32, 8 to 128 heads times examples, 64 features a head.
_CPU = _Costs((64, 128, 256, 512), most=2**21, roomy=2**19, crowding=1.15, comparing=1.25, per_tile=0, per_row=1450)
# Of a handful of kernels a tile, about 5 µs each to launch; not fitted.
_ACCELERATOR = _Costs(
    (128, 256, 512, 1024), most=2**26, roomy=2**26, crowding=1.0, comparing=1.0, per_tile=1e7, per_row=0
)


def schedule(
    mask: Mask | None,
    q_length: int,
    kv_length: int,
    block_sizes: tuple[int, int] | None = None,
    *,
    q_positions=None,
    kv_positions=None,
    num_heads: int = 1,
    batch: tuple[int, ...] = (),
) -> tuple[tuple[int, int], Int[Array, "nQ nK"]]:
    """Tile sizes, and what of each tile is visible to any head of any example: NONE, PART or FULL.

    Sizes are those given, or the cheapest for what the mask shows. What is known while tracing is NumPy; when a mask
    comes as data, the tiles are of moderate size and it is for the running program to say which are needed.

    >>> from attnlab.ops.masks import SlidingWindow
    >>> sizes, kinds = schedule(SlidingWindow(left=255), 8192, 8192, num_heads=8)
    >>> sizes, int((kinds > NONE).sum()), kinds.size
    ((128, 128), 189, 4096)
    """
    lengths = (q_length, kv_length)

    def tiles(size):
        if mask is None:
            return (np.ones([1, 1, *(-(-n // side) for n, side in zip(lengths, size))], bool),) * 2
        return mask.tiles(
            *lengths, size, q_positions=q_positions, kv_positions=kv_positions, num_heads=num_heads, batch=batch
        )

    def clipped(size):
        return min(size, q_length), min(size, kv_length)

    if block_sizes is not None:
        block_sizes = tuple(map(min, block_sizes, lengths))
        return block_sizes, _within(shared_kinds(*tiles(block_sizes)), block_sizes, lengths)

    costs = _CPU if jax.default_backend() == "cpu" else _ACCELERATOR
    rows = num_heads * int(np.prod(batch))
    # The finest division that can be looked at in no time; the others are made from it.
    finest, *coarser = [size for size in costs.sizes if size * 2048 >= max(lengths)] or costs.sizes[-1:]
    moderate = max([size for size in costs.sizes if rows * size**2 <= costs.roomy and size <= 256], default=finest)
    some, every = tiles(clipped(finest))
    if not isinstance(some, np.ndarray):
        size = clipped(moderate)
        return size, _within(shared_kinds(*tiles(size)), size, lengths)
    some, every = (x.any(axis=tuple(range(x.ndim - 2))) for x in (some, ~every))

    def candidate(size):
        kinds = np.where(
            _coarsened(some, size // finest), np.where(_coarsened(every, size // finest), PART, FULL), NONE
        )
        return clipped(size), _within(kinds.astype(np.int32), clipped(size), lengths)

    def cost(sizes, kinds):
        scores = rows * sizes[0] * sizes[1]
        scores *= costs.crowding if scores > costs.roomy else 1
        beside = costs.per_tile + costs.per_row * max(sizes)
        return (kinds == FULL).sum() * (scores + beside) + (kinds == PART).sum() * (scores * costs.comparing + beside)

    fits = [finest, *(size for size in coarser if rows * np.prod(clipped(size)) <= costs.most)]
    return min(map(candidate, fits), key=lambda chosen: cost(*chosen))


def shared_kinds(some: Array, every: Array) -> Int[Array, "nQ nK"]:
    """Kinds of tiles that all leading axes share: computed if any needs it, without comparisons if none needs them."""
    xp = np if isinstance(some, np.ndarray) else jnp
    axis = tuple(range(some.ndim - 2))
    return xp.where(every.all(axis=axis), FULL, xp.where(some.any(axis=axis), PART, NONE)).astype(np.int32)


class Visits(NamedTuple):
    """For each row of tiles, its columns in the order in which to visit them.

    Attributes:
      columns: `[n, m]`; FULL ones first, then PART, then those to leave out.
      full: `[n]`, how many are FULL.
      some: `[n]`, how many are FULL or PART.
    """

    columns: Int[Array, "n m"]
    full: Int[Array, " n"]
    some: Int[Array, " n"]


def visits(kinds: Int[Array, "n m"]) -> Visits:
    """The order of visits, row by row."""
    columns = jnp.argsort(-kinds, axis=1, stable=True)
    return Visits(columns, (kinds == FULL).sum(axis=1), (kinds > NONE).sum(axis=1))


def _within(kinds, block_sizes, lengths):
    """Beyond the ends there is nothing to see: a ragged tile is at most PART."""
    rows, columns = (
        (np.arange(n) == n - 1) & bool(length % size) for n, size, length in zip(kinds.shape, block_sizes, lengths)
    )
    xp = np if isinstance(kinds, np.ndarray) else jnp
    return xp.minimum(kinds, np.where(rows[:, None] | columns, PART, FULL).astype(np.int32))


def _coarsened(x, by):
    """Whether any entry of a `by` × `by` block is set."""
    n, m = x.shape
    x = np.pad(x, [(0, -n % by), (0, -m % by)])
    return x.reshape(-(-n // by), by, -(-m // by), by).any(axis=(1, 3))
