"""The linear recurrence over a sequence that `attnlab.context_parallel` splits over devices.

Each device summarizes its tokens as an affine map of the state (`chunked.summary`). All devices gather the maps, whose
size does not depend on the length. Each applies the maps of the devices before it to get its initial state.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from attnlab.ops.context import ShardedCall
from attnlab.ops.meshes import in_shards
from attnlab.ops.recurrence import chunked
from attnlab.ops.recurrence.terms import Terms


def over_devices(run: Callable, call: ShardedCall, terms: Terms, state, size: int):
    """Return (outputs `[..., T, H, G, V]`, last state `[..., H, K, V]`) of the whole call or a shard, using `run`."""
    axis = call.context.axis

    def run_shard(terms, state):
        maps = lax.all_gather(chunked.summary(run, terms, size), axis)
        mine = begin = state
        for device in range(call.devices):
            mine = jnp.where(index(call) == device, begin, mine)
            m, n = jax.tree.map(lambda x, device=device: x[device], maps)
            begin = m @ begin + n
        return run(terms, mine, size)[0], begin

    if call.is_manual:
        return run_shard(terms, state)
    batch, heads = call.splits.batch, call.splits.heads

    def spec(x):
        return P(*batch, axis, *((heads,) if x.ndim > len(batch) + 1 else ()))

    specs = jax.tree.map(spec, terms), P(*batch, heads)
    return in_shards(run_shard, terms.v, (terms, state), specs, (P(*batch, axis, heads), P(*batch, heads)))


def index(call: ShardedCall):
    """The index of this device in sequence order, within a `shard_map`."""
    return lax.axis_index(call.context.axis)


def from_before(call: ShardedCall, x, otherwise):
    """x of the previous device in sequence order, or `otherwise` on the first device, within a `shard_map`."""
    moved = lax.ppermute(x, call.context.axis, [(n, n + 1) for n in range(call.devices - 1)])
    return jnp.where(index(call) == 0, otherwise, moved)
