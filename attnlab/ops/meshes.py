"""Calls with sharded arguments: Explicit mesh axes (the default of `jax.make_mesh`), and kernels on any mesh."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attnlab.types import Array

# What a mesh axis splits if types do not say: HEAD_AXES heads, SEQUENCE_AXES the sequence, and any other the batch.
HEAD_AXES = ("tensor", "model", "tp", "mp", "heads")
SEQUENCE_AXES = ("context", "sequence", "seq", "sp", "cp")


def on_auto_axes(out_specs: Callable) -> Callable:
    """Decorator: run `fn(q or call, …)` with Explicit axes as Auto; `out_specs` maps q's spec to the results' specs."""

    def decorator(fn):
        @functools.wraps(fn)
        def run(first, *operands, **named):
            leaves, treedef = jax.tree.flatten((first, operands, named))
            at = [n for n, leaf in enumerate(leaves) if _has_explicit_axes(leaf)]
            if not at:
                return fn(first, *operands, **named)

            def on_auto(*sharded):
                for n, leaf in zip(at, sharded):
                    leaves[n] = leaf
                first, operands, named = jax.tree.unflatten(treedef, leaves)
                return fn(first, *operands, **named)

            mesh, q = jax.typeof(leaves[at[0]]).sharding.mesh, getattr(first, "q", first)
            spec = tuple(jax.typeof(q).sharding.spec)
            spec += (None,) * (q.ndim - len(spec))
            out_sharding = jax.tree.map(functools.partial(NamedSharding, mesh), out_specs(spec), is_leaf=_is_spec)
            return jax.sharding.auto_axes(on_auto, out_sharding=out_sharding)(*(leaves[n] for n in at))

        return run

    return decorator


def like_queries(spec: tuple) -> tuple[P, tuple[P, P]]:
    """Specs of out `[..., Tq, H, Dv]` and of (max, log_sum) `[..., Tq, H]`, from q's spec."""
    return P(*spec[:-1], None), (P(*spec[:-1]),) * 2


def like_scores(spec: tuple) -> P:
    """The spec of weights `[..., H, rows, Tk]`, from q's spec."""
    *batch, _, heads, _ = spec
    return P(*batch, heads, None, None)


def _has_explicit_axes(leaf) -> bool:
    return isinstance(leaf, jax.Array) and AxisType.Explicit in jax.typeof(leaf).sharding.mesh.axis_types


class Splits(NamedTuple):
    batch: tuple  # for each batch axis of q, the mesh axes that split it: a name, a tuple of names, or None
    heads: tuple[str, ...]  # the mesh axes that split the heads of q, k and v


def splits_of(q, k, without: Sequence[str] = ()) -> Splits:
    """The mesh axes that split batch and heads, except `without`: Explicit axes by q's type, Auto axes by name."""
    mesh, rank = mesh_of(q), q.ndim - 3
    if AxisType.Explicit in mesh.axis_types:
        spec = _spec(q)
        if without:
            spec = tuple(tuple(name for name in names_of(axes) if name not in without) or None for axes in spec)
        return Splits(spec[:-3], _dividing(mesh, names_of(spec[-2]), k.shape[-2]))
    free = _free(mesh) - {*without, *SEQUENCE_AXES}
    names = [name for name in mesh.axis_names if name in free]
    heads = _dividing(mesh, (name for name in names if name in HEAD_AXES), k.shape[-2])
    batch = _dividing(mesh, (name for name in names if name not in HEAD_AXES), q.shape[0]) if rank else ()
    return Splits((batch, *(None,) * (rank - 1)) if rank else (), heads)


def over_shards(kernel: Callable, q, k, v, others=()):
    """Run `kernel(q, k, v, others)` on each device's examples and heads, for kernels that XLA cannot partition.

    A split sequence is gathered. Leaves of `others` are `[*batch or 1s, H or 1, …]`. `vmap` over an axis that an
    Explicit mesh axis splits is not supported.
    """
    if not is_partitioned(q):
        return kernel(q, k, v, others)
    batch, heads = splits_of(q, k)
    spec = P(*batch, None, heads, None)

    def spec_of(x):
        return P(*(axes if size > 1 else None for axes, size in zip((*batch, heads), x.shape)))

    arrays, specs = (q, k, v, others), (spec, spec, spec, jax.tree.map(spec_of, others))
    return in_shards(kernel, q, arrays, specs, P(*batch, None, heads))


def in_shards(function: Callable, q, arrays: tuple, specs: tuple, out_spec: P | tuple[P, ...]):
    """Run `function(*arrays)` in `jax.shard_map` over all axes of q's mesh that are not Manual already."""
    mesh = mesh_of(q)
    is_explicit = AxisType.Explicit in mesh.axis_types
    if is_explicit:  # some arrays may be split differently from q
        specs = jax.tree.map(lambda spec, tree: jax.tree.map(lambda _: spec, tree), specs, arrays, is_leaf=_is_spec)
        arrays = jax.tree.map(functools.partial(_resharded, mesh), arrays, specs)
    # Most kernels do not declare over which axes their results vary, and a nested shard_map cannot check this.
    run = jax.shard_map(
        function, mesh=mesh, in_specs=specs, out_specs=out_spec, axis_names=_free(mesh), check_vma=False
    )
    results = run(*arrays)
    if not is_explicit:
        return results
    like_q = _spec(q)[:-1]
    return jax.tree.map(lambda x: _resharded(mesh, x, P(*like_q, *(None,) * (x.ndim - len(like_q)))), results)


def on_all_devices(tree):
    """Replicate the arrays of a tree that are on Explicit axes, so that every device has them whole."""

    def whole(x):
        return _resharded(jax.typeof(x).sharding.mesh, x, P(*(None,) * x.ndim)) if _has_explicit_axes(x) else x

    return jax.tree.map(whole, tree)


def _is_spec(x) -> bool:
    return isinstance(x, P)


def mesh_of(x):
    """The mesh over which a traced array may be split: the mesh of its type, or the mesh in context."""
    mesh = jax.typeof(x).sharding.mesh
    return jax.sharding.get_abstract_mesh() if mesh.empty else mesh


def is_partitioned(x) -> bool:
    """Whether XLA partitions computations with x, so that `over_shards` runs kernels in a `shard_map`."""
    mesh = jax.typeof(x).sharding.mesh
    return math.prod(mesh.shape[name] for name in _free(mesh)) > 1


def _free(mesh) -> set[str]:
    """The axes of a mesh over which XLA partitions a program."""
    return {name for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind != AxisType.Manual}


def _resharded(mesh, x, spec):
    sharding = NamedSharding(mesh, spec)
    return x if jax.typeof(x).sharding == sharding else jax.sharding.reshard(x, sharding)


def varying_like(x: Array, tree):
    """`tree` marked, within `shard_map`, as varying over the mesh axes that `x` varies over."""
    return jax.tree.map(lambda leaf: _varying(leaf, _axes(x)), tree)


def equally_varying(tree):
    """`tree` with each leaf marked as varying over the mesh axes that any leaf varies over."""
    axes = frozenset().union(*(_axes(leaf) for leaf in jax.tree.leaves(tree)))
    return jax.tree.map(lambda leaf: _varying(leaf, axes), tree)


def _varying(x, axes):
    missing = tuple(axes - _axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def _axes(x):
    return jax.typeof(x).manual_axis_type.varying


def is_checked_manual(*arrays) -> bool:
    """Whether a call is inside a `shard_map` that checks which axes values vary over; few kernels declare these."""
    return any(_axes(x) for x in arrays)


def names_of(axes: str | Sequence[str] | None) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def _spec(x) -> tuple:
    return (*jax.typeof(x).sharding.spec, *(None,) * x.ndim)[: x.ndim]


def _dividing(mesh, names, size) -> tuple[str, ...]:
    taken = []
    for name in names:
        if size % math.prod(mesh.shape[n] for n in (*taken, name)) == 0:
            taken.append(name)
    return tuple(taken)
