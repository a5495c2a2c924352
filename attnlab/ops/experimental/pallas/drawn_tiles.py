"""Tiles of a mask drawn beforehand, each different tile once.

For masks that gather, such as a `BlockSparse` whose blocks are not multiples of the tiles. Only tiles that are compared
are drawn, and only of a mask that is known while tracing.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.ops.experimental.pallas.splitting import Input, Program, Scores, Split
from attnlab.ops.masks import Mask
from attnlab.ops.schedule import PARTIAL
from attnlab.ops.tiles import whole
from attnlab.types import Array

# A program that returns its one input, a tile.
_AS_DRAWN = Program("a drawn tile", (Input("tile", np.dtype(bool)),), equations=(), places=(0,), result=0)


class Drawn(NamedTuple):
    """The tiles of a mask."""

    split: Split  # the mask as a kernel takes it; its array has the different tiles, `[1s, 1, n, queries, keys]`
    at: Array  # index of each tile in that array, `[*batch or 1s, H or 1, nQ, nK]`


def draw(mask: Mask, scores: Scores, kinds: Array, block_sizes: tuple[int, int], most_bytes: int) -> Drawn | None:
    """The tiles to compare; None above `most_bytes`, or if they differ between heads or examples that share `kinds`."""
    found, at, leading = {}, np.zeros(kinds.shape, np.int32), tuple(range(kinds.ndim - 2))
    # Heads of a group share the visits of keys, where a tile that is EMPTY for one and FULL for another is PARTIAL.
    is_compared = (kinds == PARTIAL).any(axis=leading) | (kinds.min(axis=leading) < kinds.max(axis=leading))
    batch, num_heads, lengths, *positions, shard = scores
    with jax.ensure_compile_time_eval():
        covers = whole(*lengths, num_heads, *positions, batch, np, shard)

        @jax.jit
        def visible(i, j):
            queries, keys = covers.queries.block(i, block_sizes[0]), covers.keys.block(j, block_sizes[1])
            return mask.visible(covers._replace(queries=queries, keys=keys)).astype(jnp.int8)

        for i, j in np.argwhere(is_compared).tolist():
            tiles = np.asarray(visible(i, j))
            tiles = tiles.reshape((1,) * (kinds.ndim - tiles.ndim) + tiles.shape)
            if any(own > shared for own, shared in zip(tiles.shape[:-2], kinds.shape)):
                return None
            tiles = np.broadcast_to(tiles, (*kinds.shape[:-2], *block_sizes))
            for of_head in np.ndindex(*kinds.shape[:-2]):
                at[(*of_head, i, j)] = found.setdefault(tiles[of_head].tobytes(), len(found))
            if len(found) * block_sizes[0] * block_sizes[1] > most_bytes:
                return None
    store = np.frombuffer(b"".join(found), np.int8).reshape(*(1,) * (kinds.ndim - 2), -1, *block_sizes)
    return Drawn(Split(_AS_DRAWN, lambda: (jnp.asarray(store),), drawn_bytes=store.size), at)
