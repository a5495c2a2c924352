"""Rows that move between devices: from the order of the sequence to the device that computes them, and back."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Int

from attnlab.ops.context.layouts import is_contiguous
from attnlab.types import Array


class Routes(NamedTuple):
    """The moves of blocks of rows: in each turn every device sends one block and receives one."""

    to: Int[np.ndarray, "turns n"]  # the device that each device sends to
    sent: Int[np.ndarray, "turns n"]  # which of its blocks each device sends
    received: Int[np.ndarray, "turns n"]  # which of its blocks each device receives

    def back(self) -> "Routes":
        return Routes(np.argsort(self.to, axis=1), self.received, self.sent)


def routes(blocks: Int[np.ndarray, "n blocks"]) -> Routes | None:
    """The routes from block b at device b // blocks to `blocks` of each device, None if nothing moves.

    Each device sends and receives as many blocks as it has, so this takes as many turns of one block (König 1916: a
    regular bipartite graph is a union of perfect matchings).
    """
    # A dependency of JAX, and slow to import.
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_bipartite_matching

    n, count = blocks.shape
    if is_contiguous(blocks):
        return None
    waiting = [[[] for _ in range(n)] for _ in range(n)]  # from device, to device: blocks of both
    for device, slot in np.ndindex(n, count):
        sender, block = divmod(int(blocks[device, slot]), count)
        waiting[sender][device].append((block, slot))
    turns = []
    for _ in range(count):
        if all(waiting[device][device] for device in range(n)):
            to = np.arange(n)  # nothing is sent
        else:
            to = maximum_bipartite_matching(csr_array([[len(x) for x in row] for row in waiting]), "column")
        moved = [waiting[sender][device].pop(0) for sender, device in enumerate(to)]
        sent, slots = zip(*moved)
        received = np.empty(n, np.int64)
        received[to] = slots
        turns.append((to, sent, received))
    return Routes(*(np.array(x) for x in zip(*turns)))


def move(x: Array, routes: Routes | None, axis_name: str, axis: int) -> Array:
    """Within `shard_map`, this device's rows after its blocks, as many as turns, have moved; `axis` is negative."""
    if routes is None:
        return x
    me, count = lax.axis_index(axis_name), len(routes.to)
    axis = axis % x.ndim
    blocks = x.reshape(*x.shape[:axis], count, -1, *x.shape[axis + 1 :])
    received = []
    for to, sent in zip(routes.to.tolist(), routes.sent):
        block = lax.dynamic_index_in_dim(blocks, jnp.asarray(sent, jnp.int32)[me], axis)
        stays = to == list(range(len(to)))
        received.append(block if stays else lax.ppermute(block, axis_name, list(enumerate(to))))
    turn_of_block = jnp.asarray(np.argsort(routes.received, axis=0).T, jnp.int32)[me]
    return jnp.take(jnp.concatenate(received, axis=axis), turn_of_block, axis=axis).reshape(x.shape)
