"""A device's part of a call, within `shard_map`: its queries, all keys, and the indices of its queries."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from attnlab.ops.call import AttentionCall, Result
from attnlab.ops.context.layouts import Layout
from attnlab.ops.meshes import names_of
from attnlab.ops.tiles import Shard
from attnlab.types import Array


def examples(call: "ShardedCall", batch: tuple[int, ...]) -> Array | None:  # noqa: F821 (imports this)
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


def heads(call: "ShardedCall", num_heads: int) -> Array | None:  # noqa: F821
    """The indices of this device's query heads, `[H]`; None if they are not split."""
    names = call.splits.heads
    return lax.axis_index(names) * num_heads + jnp.arange(num_heads, dtype=jnp.int32) if names else None


def attend(split, layout: Layout | None, run: Callable, call: AttentionCall) -> Result:
    """Return (out, (max, log_sum)) for this device's queries, in sequence order."""
    call = call.replace(shard=Shard(examples(split, call.batch), heads(split, call.num_heads)))
    if layout is None:
        return run(call.of_shard())
    axis = split.context.axis
    q_length, kv_length = (length * split.devices for length in call.lengths)
    if layout.is_zigzag:
        sides = {"q": -3, "q_positions": -1, "bias": -2}
        values = {name: x for name in sides if (x := getattr(call, name)) is not None and x.shape[sides[name]] > 1}
        call = call.replace(**{name: to_zigzag(x, axis, sides[name]) for name, x in values.items()})
    rows = jnp.asarray(layout.rows(q_length))[lax.axis_index(axis)]
    positions = rows if call.q_positions is None else call.q_positions
    call = call.replace(q_positions=positions, shard=call.shard._replace(queries=rows))
    out, log_sums = _with_all_keys(run, call, axis, kv_length)
    if not layout.is_zigzag:
        return out, log_sums
    return from_zigzag(out, axis, -3), tuple(from_zigzag(x, axis, -2) for x in log_sums)


def _with_all_keys(run: Callable, call: AttentionCall, axis: str, kv_length: int) -> Result:
    def gathered(call):
        def whole(x, at):
            return lax.all_gather(x, axis, axis=x.ndim + at, tiled=True)

        positions = call.kv_positions
        positions = jnp.arange(kv_length, dtype=jnp.int32) if positions is None else whole(positions, -1)
        return run(call.replace(k=whole(call.k, -3), v=whole(call.v, -3), kv_positions=positions).of_shard())

    # The gradient gathers keys and values again: storing them would take a copy of the whole sequence per layer.
    policy = jax.checkpoint_policies.save_only_these_names("attention")
    return jax.checkpoint(gathered, policy=policy)(call)


def to_zigzag(x: Array, axis_name: str, axis: int) -> Array:
    """Exchange halves of contiguous rows between devices, so that each device gets its chunks of `layouts.zigzag`."""
    return _moved(x, axis_name, axis, lambda chunk, n: (chunk // 2, min(chunk, 2 * n - 1 - chunk)))


def from_zigzag(x: Array, axis_name: str, axis: int) -> Array:
    """The inverse of `to_zigzag`."""
    return _moved(x, axis_name, axis, lambda chunk, n: (min(chunk, 2 * n - 1 - chunk), chunk // 2))


def _moved(x: Array, axis_name: str, axis: int, route: Callable) -> Array:
    # No device has two even-numbered or two odd-numbered chunks, so one `ppermute` moves each of the two sets.
    n, halves = lax.axis_size(axis_name), jnp.split(x, 2, axis)
    routes = ([route(chunk, n) for chunk in range(first, 2 * n, 2)] for first in (0, 1))
    return jnp.concatenate([lax.ppermute(half, axis_name, to) for half, to in zip(halves, routes)], axis)
