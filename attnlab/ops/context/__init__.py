"""One call over many devices: a mesh axis splits queries, keys and values along the sequence.

Each device gathers all keys and values. Every mask and score mod works, because masks and score mods receive indices in
the whole call (`attnlab.ops.tiles.Shard`).

Files: `layouts` (the rows that each device computes), `shards` (a device's part of a call).
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from attnlab.ops import checks, dropout
from attnlab.ops.call import AttentionCall, Result
from attnlab.ops.context import layouts, shards
from attnlab.ops.context.layouts import Layout
from attnlab.ops.meshes import Splits, in_shards, mesh_of, names_of, on_all_devices, splits_of
from attnlab.ops.schedule import ACCELERATOR, CPU
from attnlab.types import Array


class SplitContext(NamedTuple):
    axis: str | None
    batch: tuple[str, ...]
    heads: tuple[str, ...]


_current = jax.make_user_context(default_value=None)  # part of the cache key of compiled programs


@checks.known_keywords
def context_parallel(axis: str | None, *, batch: str | Sequence[str] = (), heads: str | Sequence[str] = ()):
    """Context in which `attention` splits queries, keys and values along the sequence over a mesh axis.

    If XLA partitions the arrays, as in `jit` over a mesh, nothing else is needed: the call is split over `axis`, and
    over the other mesh axes as without this context. Results and gradients are the same as without the split, for
    every mask and score mod, and with dropout. Each device computes some of the queries with all keys; `explain` shows
    how evenly the work is shared.

    Within a `shard_map`, name the axes that split batch and heads. All arrays of a call (q, k, v, bias, positions,
    sinks, dropout keys) are then this device's shards, in sequence order, but a bias has all its columns. Masks and
    score mods belong to the whole call, and so do their arrays.

    Args:
      axis: the mesh axis that splits the sequence; None if the sequence is whole.
      batch, heads: within `shard_map`, the axes that split the first batch axis and the heads.

    Raises:
      ValueError: an axis is named twice. In `attention`: the mesh or the `shard_map` lacks an axis, `batch` or `heads`
        outside a `shard_map`, or the number of devices does not divide the length of the sequence.
      TypeError: an unknown argument.

    >>> mesh = jax.make_mesh((1,), ("context",))
    >>> q = k = v = jnp.ones((8, 4, 16))
    >>> with jax.set_mesh(mesh), context_parallel("context"):
    ...     out = jax.jit(lambda q, k, v: attention(q, k, v, mask=Causal()))(q, k, v)
    >>> out.shape
    (8, 4, 16)
    """
    context = SplitContext(axis, names_of(batch), names_of(heads))
    named = _named(context)
    if len(set(named)) < len(named):
        names = ", ".join(map(repr, named))
        raise ValueError(f"context_parallel names {names}: an axis can split only one thing, so name it once")
    return _current(context)


def _named(context: SplitContext) -> list[str]:
    return [name for name in (context.axis, *context.batch, *context.heads) if name is not None]


class ShardedCall(NamedTuple):
    """The split of a call over a mesh."""

    context: SplitContext
    is_manual: bool  # whether the arrays are shards already, within a `shard_map` over these axes
    splits: Splits  # the mesh axes that split batch and heads
    sizes: tuple[int, int, int]  # numbers of shards: batch, heads, sequence

    @property
    def devices(self) -> int:
        return self.sizes[2]

    def whole(self, batch: tuple[int, ...], num_heads: int, *lengths: int) -> tuple:
        """Batch, number of heads and lengths of the whole call, from the shapes of this call's arrays."""
        if not self.is_manual:
            return (batch, num_heads, *lengths)
        by_batch, by_heads, by_length = self.sizes
        batch = (batch[0] * by_batch, *batch[1:]) if batch else ()
        return (batch, num_heads * by_heads, *(length * by_length for length in lengths))

    def per_example(self, key, batch: tuple[int, ...]):
        """Dropout keys, one per example."""
        index = shards.examples(self, batch) if self.is_manual and not dropout.batch_rank(key) else None
        if index is None:
            return dropout.per_example(key, batch)
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, index.reshape(-1))
        return keys.reshape(*batch, *jnp.shape(key))


def current(q: Array, k: Array) -> ShardedCall | None:
    """The split of a call with these queries and keys; None if the call runs as it would outside `context_parallel`."""
    context = _current.value
    if context is None:
        return None
    mesh = mesh_of(q)
    named = _named(context)
    for name in named:
        if name not in mesh.axis_names:
            raise ValueError(
                f"context_parallel names the axis {name!r}, but the mesh of q has "
                f"{', '.join(map(repr, mesh.axis_names)) or 'none'}: name one of its axes, and use jax.set_mesh"
            )
    kinds = dict(zip(mesh.axis_names, mesh.axis_types))
    manual = [name for name in named if kinds[name] == AxisType.Manual]
    if manual and manual != named:
        mapped, others = (", ".join(map(repr, names)) for names in (manual, [x for x in named if x not in manual]))
        raise ValueError(
            f"context_parallel names {mapped}, which the shard_map around the call has, and {others}, which it lacks: "
            "use one shard_map over all of them, or none"
        )
    is_manual = bool(manual)
    if not is_manual and (ignored := (*context.batch, *context.heads)):
        raise ValueError(
            f"context_parallel names {', '.join(map(repr, ignored))} for batch or heads, which it uses only within a "
            "shard_map: remove batch= and heads=, XLA's own split of them is kept"
        )
    splits = Splits(context.batch, context.heads) if is_manual else splits_of(q, k, without=(context.axis,))

    def size(names):
        return math.prod(mesh.shape[name] for name in names)

    by_batch = size(name for axes in splits.batch for name in names_of(axes))
    by_length = size((context.axis,) if context.axis else ())
    call = ShardedCall(context, is_manual, splits, (by_batch, size(splits.heads), by_length))
    if not is_manual and 0 in (q.shape[-3], k.shape[-3]):
        return None
    if not is_manual and call.devices > 1:
        for name, length in (("queries", q.shape[-3]), ("keys", k.shape[-3])):
            if length % call.devices:
                raise ValueError(
                    f"{length} {name} cannot be split over the {call.devices} devices of the mesh axis "
                    f"{context.axis!r}: pad the sequence to a multiple of {call.devices}, or use fewer devices"
                )
    return call if call.devices > 1 or is_manual else None


def layout(split: ShardedCall, call: AttentionCall, platform: str) -> Layout | None:
    """The layout of a `prepared` call; None if the sequence is whole or empty."""
    if split.devices == 1 or 0 in call.lengths:
        return None
    batch, num_heads, *lengths = split.whole(call.batch, call.num_heads, *call.lengths)
    positions = {"q_positions": call.q_positions, "kv_positions": call.kv_positions}
    positions = {name: x for name, x in positions.items() if x is not None}
    are_known = not split.is_manual and not any(isinstance(x, jax.core.Tracer) for x in positions.values())
    return layouts.choose(
        layouts.known_part(call.mask, are_known or not positions),
        tuple(lengths),
        split.devices,
        block_sizes=call.block_sizes,
        costs=CPU if platform == "cpu" else ACCELERATOR,
        num_heads=num_heads,
        batch=batch,
        **(positions if are_known else {}),
    )


def attend(split: ShardedCall, layout: Layout | None, run: Callable, call: AttentionCall) -> Result:
    """Return (out, (max, log_sum)), where run(call) computes one device's part."""
    if split.is_manual:
        return shards.attend(split, layout, run, call)
    (batch, heads), axis = split.splits, split.context.axis
    sides = {"q": (axis, heads, None), "k": (axis, heads, None), "v": (axis, heads, None), "sinks": (heads,)}
    sides |= {"q_positions": (axis,), "kv_positions": (axis,), "dropout_keys": (None,)}
    sides["bias"] = (heads, axis, None)

    def spec(x, sides):
        """Partition spec of `[*batch or 1s, *sides]`, or `[*sides]`; axes of size 1 are not split."""
        return P(*(axes if n > 1 else None for axes, n in zip((*batch, *sides)[-x.ndim :], x.shape)))

    specs = {name: spec(x, sides[name]) for name in sides if (x := getattr(call, name)) is not None}
    specs = jax.tree.map(lambda _: P(), call).replace(**specs)
    compute = functools.partial(shards.attend, split, layout, run)
    return in_shards(compute, call.q, (call,), (specs,), P(*batch, axis, heads))


def prepared(split: ShardedCall | None, call: AttentionCall) -> AttentionCall:
    """The call with dropout keys as words, and with masks and mods whose functions close over no traced arrays."""
    if split is None:
        return call
    # Every device holds whole masks and score mods.
    mask, score_mods = on_all_devices((call.mask, call.score_mods))
    *_, q_length, kv_length = split.whole(call.batch, call.num_heads, *call.lengths)
    dtype = jnp.promote_types(call.q.dtype, jnp.float32)
    return call.replace(
        mask=None if mask is None else mask.for_tiles(q_length, kv_length),
        score_mods=tuple(mod.for_tiles(dtype) for mod in score_mods),
        dropout_keys=None if call.dropout_keys is None else dropout.key_words(call.dropout_keys),
    )
