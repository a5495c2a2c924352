"""A device's part of a call, within `shard_map`: its queries, the keys that they need, and the indices of both."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool

from attnlab.ops.call import AttentionCall, Result
from attnlab.ops.context import ring
from attnlab.ops.context.exchange import move, routes
from attnlab.ops.context.layouts import Layout
from attnlab.ops.mask_algebra import Mask
from attnlab.ops.meshes import names_of
from attnlab.ops.tiles import Shard
from attnlab.types import Array

# The arguments that have an axis of queries, or of keys, and which.
OF_QUERIES = {"q": -3, "bias": -2, "q_positions": -1}
OF_KEYS = {"k": -3, "v": -3, "kv_positions": -1}


@dataclass(frozen=True)
class Existing(Mask):
    """Masks rows of a halo that reach beyond the ends of the sequence."""

    exists: Bool[Array, " Tk"]

    def visible(self, tile):
        return tile.of_keys(self.exists)

    def bounds(self, tiling):
        none_missing, any_exist = tiling.of_keys(self.exists)
        return any_exist, none_missing


def examples(call: "ShardedCall", batch: tuple[int, ...]) -> Array | None:
    """The indices of this device's examples in the whole batch, `[*batch]`; None if the batch is not split."""
    if not batch or not any(map(names_of, call.splits.batch)):
        return None
    split = call.splits.batch if not call.is_manual else (call.splits.batch, *(None,) * (len(batch) - 1))
    index = jnp.zeros((), jnp.int32)
    for size, axes in zip(batch, split):
        axes = names_of(axes)
        whole = size * (lax.axis_size(axes) if axes else 1)
        start = lax.axis_index(axes) * size if axes else 0
        index = index[..., None] * whole + start + jnp.arange(size, dtype=jnp.int32)
    return index


def heads(call: "ShardedCall", num_heads: int) -> Array | None:
    """The indices of this device's query heads, `[H]`; None if they are not split."""
    names = call.splits.heads
    return lax.axis_index(names) * num_heads + jnp.arange(num_heads, dtype=jnp.int32) if names else None


def attend(split, layout: Layout | None, run: Callable, call: AttentionCall) -> Result:
    """(out, (max, log_sum)) of this device's queries, in the order of the sequence."""
    call = call.replace(shard=Shard(examples(split, call.batch), heads(split, call.num_heads)))
    if layout is None:
        return run(call.of_shard())
    axis, me = split.context.axis, lax.axis_index(split.context.axis)
    q_length, kv_length = (length * split.devices for length in call.lengths)
    there = routes(layout.queries)
    rows = jnp.asarray(layout.rows(layout.queries, q_length))[me]
    call = _moved(call, there, axis, OF_QUERIES)
    positions = rows if call.q_positions is None else call.q_positions
    call = call.replace(q_positions=positions, shard=call.shard._replace(queries=rows))
    way = {"gather": _gathered, "halo": _with_halo, "ring": _in_a_ring}[layout.way]
    out, log_sums = way(split, layout, run, call, kv_length)
    back = None if there is None else there.back()
    return move(out, back, axis, -3), tuple(move(x, back, axis, -2) for x in log_sums)


def _moved(call: AttentionCall, there, axis, sides: dict[str, int]) -> AttentionCall:
    found = {name: (getattr(call, name), at) for name, at in sides.items()}
    return call.replace(
        **{name: move(x, there, axis, at) for name, (x, at) in found.items() if x is not None and x.shape[at] > 1}
    )


def _gathered(split, layout, run, call, kv_length):
    def gathered(call):
        keys = {name: (getattr(call, name), at) for name, at in OF_KEYS.items()}
        keys = {
            name: lax.all_gather(x, split.context.axis, axis=x.ndim + at, tiled=True)
            for name, (x, at) in keys.items()
            if x is not None
        }
        keys.setdefault("kv_positions", jnp.arange(kv_length, dtype=jnp.int32))
        return run(call.replace(**keys).of_shard())

    # Gathered again for the gradient: kept, they would be as many copies as there are layers.
    policy = jax.checkpoint_policies.save_only_these_names("attention")
    return jax.checkpoint(gathered, policy=policy)(call)


def _with_halo(split, layout, run, call, kv_length):
    """With the keys of neighbouring rows, from as many devices to either side as needed."""
    axis, devices = split.context.axis, split.devices
    own, (left, right) = kv_length // devices, layout.halo
    keys = lax.axis_index(axis) * own + jnp.arange(-left, own + right, dtype=jnp.int32)
    exists = (keys >= 0) & (keys < kv_length)
    keys = jnp.clip(keys, 0, kv_length - 1)

    def extended(x, at):
        at = x.ndim + at
        parts = [x]
        for hop in range(1, -(-left // own) + 1):
            piece = lax.slice_in_dim(x, own - min(own, left - (hop - 1) * own), own, axis=at)
            parts.insert(0, lax.ppermute(piece, axis, [(i, i + hop) for i in range(devices - hop)]))
        for hop in range(1, -(-right // own) + 1):
            piece = lax.slice_in_dim(x, 0, min(own, right - (hop - 1) * own), axis=at)
            parts.append(lax.ppermute(piece, axis, [(i, i - hop) for i in range(hop, devices)]))
        return jnp.concatenate(parts, axis=at)

    call = call.replace(
        k=extended(call.k, OF_KEYS["k"]),
        v=extended(call.v, OF_KEYS["v"]),
        kv_positions=keys if call.kv_positions is None else extended(call.kv_positions, -1),
    )
    call = _with_columns(call, keys).of_shard()
    return run(call.replace(mask=Existing(exists) if call.mask is None else call.mask & Existing(exists)))


def _with_columns(call: AttentionCall, keys: Array) -> AttentionCall:
    """The call with the columns of some keys, by their indices in the whole call."""
    bias = None if call.bias is None else jnp.take(call.bias, keys, axis=-1)
    return call.replace(bias=bias, shard=call.shard._replace(keys=keys))


def _in_a_ring(split, layout, run, call, kv_length):
    axis = split.context.axis
    call = _moved(call, routes(layout.keys), axis, OF_KEYS)
    positions, rows = call.kv_positions, layout.rows(layout.keys, kv_length)
    call = call.replace(
        kv_positions=rows if positions is None else jnp.moveaxis(lax.all_gather(positions, axis), 0, -2)
    )

    def run_with_keys_of(device, call, given):
        call = call.replace(kv_positions=call.kv_positions[..., device, :])
        return run(_with_columns(call, jnp.asarray(rows)[device]).of_shard(), given)

    return ring.attend(run_with_keys_of, axis, split.devices, call)
