"""A device's part of a call, within `shard_map`: its queries, the keys that they need, and the indices of both."""

import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool

from attnlab.ops.context import ring
from attnlab.ops.context.exchange import move, routes
from attnlab.ops.context.layouts import Layout
from attnlab.ops.mask_algebra import Mask
from attnlab.ops.meshes import names_of
from attnlab.ops.tiles import Shard
from attnlab.types import Array

if TYPE_CHECKING:
    pass

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


def examples(call: "Call", batch: tuple[int, ...]) -> Array | None:
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


def heads(call: "Call", num_heads: int) -> Array | None:
    """The indices of this device's query heads, `[H]`; None if they are not split."""
    names = call.splits.heads
    return lax.axis_index(names) * num_heads + jnp.arange(num_heads, dtype=jnp.int32) if names else None


def attend(call: "Call", layout: Layout | None, run: Callable, arguments: dict):
    """(out, (max, log_sum)) of this device's queries, in the order of the sequence."""
    q = arguments["q"]
    shard = Shard(examples(call, q.shape[:-3]), heads(call, q.shape[-2]))
    if layout is None:
        return run(of_shard(arguments, shard), shard)
    axis, me = call.context.axis, lax.axis_index(call.context.axis)
    lengths = [arguments[name].shape[-3] * call.devices for name in "qk"]
    there = routes(layout.queries)
    rows = jnp.asarray(layout.rows(layout.queries, lengths[0]))[me]
    arguments = {name: _moved(name, x, there, axis, OF_QUERIES) for name, x in arguments.items()}
    arguments["q_positions"] = rows if arguments["q_positions"] is None else arguments["q_positions"]
    shard = shard._replace(queries=rows)
    way = {"gather": _gathered, "halo": _with_halo, "ring": _in_a_ring}[layout.way]
    out, log_sums = way(call, layout, run, arguments, shard, lengths[1])
    back = None if there is None else there.back()
    return move(out, back, axis, -3), tuple(move(x, back, axis, -2) for x in log_sums)


def arrays_and_others(arguments: dict) -> tuple[dict, dict]:
    static = {name: x for name, x in arguments.items() if isinstance(x, numbers.Number)}
    return {name: x for name, x in arguments.items() if name not in static}, static


def of_shard(arguments: dict, shard: Shard) -> dict:
    mask = None if arguments["mask"] is None else arguments["mask"].of_shard(shard)
    return {**arguments, "mask": mask, "score_mods": tuple(mod.of_shard(shard) for mod in arguments["score_mods"])}


def _moved(name, x, there, axis, sides):
    return x if x is None or name not in sides or x.shape[sides[name]] == 1 else move(x, there, axis, sides[name])


def _gathered(call, layout, run, arguments, shard, kv_length):
    def gathered(arguments):
        keys = {name: arguments[name] for name in OF_KEYS if arguments[name] is not None}
        for name, x in keys.items():
            keys[name] = lax.all_gather(x, call.context.axis, axis=x.ndim + OF_KEYS[name], tiled=True)
        keys.setdefault("kv_positions", jnp.arange(kv_length, dtype=jnp.int32))
        return run(of_shard({**arguments, **keys}, shard), shard)

    # Gathered again for the gradient: kept, they would be as many copies as there are layers.
    arrays, static = arrays_and_others(arguments)
    policy = jax.checkpoint_policies.save_only_these_names("attention")
    return jax.checkpoint(lambda arrays: gathered({**arrays, **static}), policy=policy)(arrays)


def _with_halo(call, layout, run, arguments, shard, kv_length):
    """With the keys of neighbouring rows, from as many devices to either side as needed."""
    axis, devices = call.context.axis, call.devices
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

    positions = arguments["kv_positions"]
    arguments = {**arguments, **{name: extended(arguments[name], OF_KEYS[name]) for name in "kv"}}
    arguments["kv_positions"] = keys if positions is None else extended(positions, -1)
    shard = shard._replace(keys=keys)
    arguments = of_shard(with_columns(arguments, keys), shard)
    mask = arguments["mask"]
    return run({**arguments, "mask": Existing(exists) if mask is None else mask & Existing(exists)}, shard)


def with_columns(arguments: dict, keys: Array) -> dict:
    bias = arguments["bias"]
    return arguments if bias is None else {**arguments, "bias": jnp.take(bias, keys, axis=-1)}


def _in_a_ring(call, layout, run, arguments, shard, kv_length):
    axis = call.context.axis
    there = routes(layout.keys)
    arguments = {name: _moved(name, x, there, axis, OF_KEYS) for name, x in arguments.items()}
    positions, rows = arguments["kv_positions"], layout.rows(layout.keys, kv_length)
    arguments["kv_positions"] = rows if positions is None else jnp.moveaxis(lax.all_gather(positions, axis), 0, -2)

    def run_with_keys_of(device, arguments, shard, given):
        shard = shard._replace(keys=jnp.asarray(rows)[device])
        arguments = {**arguments, "kv_positions": arguments["kv_positions"][..., device, :]}
        return run(of_shard(with_columns(arguments, shard.keys), shard), shard, given)

    return ring.attend(run_with_keys_of, axis, call.devices, *arrays_and_others(arguments), shard)
