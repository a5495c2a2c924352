"""Calls with sharded arguments: Explicit mesh axes (the default of `jax.make_mesh`), and kernels on any mesh."""

import functools
import math
from collections.abc import Callable

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

# How the axes of a mesh are used where its types do not tell: these split heads, these the sequence, all others the
# batch.
HEAD_AXES = ("tensor", "model", "tp", "mp", "heads")
SEQUENCE_AXES = ("context", "sequence", "seq", "sp", "cp")


def on_auto_axes(out_specs: Callable) -> Callable:
    """Decorator for `fn(q, *operands, **named)`, which runs it with Explicit mesh axes turned into Auto ones.

    Loops and grouped heads would need a sharding spelled out for each intermediate array; on Auto axes XLA finds them.
    Operands keep their sharding, and without Explicit axes nothing changes.

    Args:
      out_specs: maps the partition specs of q's axes `[..., Tq, H, D]` to a tuple of `PartitionSpec`, one a result.
    """

    def decorator(fn):
        @functools.wraps(fn)
        def run(q, *operands, **named):
            leaves, treedef = jax.tree.flatten((q, operands, named))
            at = [n for n, leaf in enumerate(leaves) if _has_explicit_axes(leaf)]
            if not at:
                return fn(q, *operands, **named)

            def on_auto(*sharded):
                for n, leaf in zip(at, sharded):
                    leaves[n] = leaf
                q, operands, named = jax.tree.unflatten(treedef, leaves)
                return fn(q, *operands, **named)

            mesh = jax.typeof(leaves[at[0]]).sharding.mesh
            spec = tuple(jax.typeof(q).sharding.spec)
            spec += (None,) * (q.ndim - len(spec))
            out_sharding = tuple(NamedSharding(mesh, spec) for spec in out_specs(spec))
            return jax.sharding.auto_axes(on_auto, out_sharding=out_sharding)(*(leaves[n] for n in at))

        return run

    return decorator


def like_queries(spec: tuple) -> tuple[P, P]:
    """Specs of out `[..., Tq, H, Dv]` and lse `[..., Tq, H]`."""
    return P(*spec[:-1], None), P(*spec[:-1])


def like_scores(spec: tuple) -> tuple[P, P]:
    """Specs of weights `[..., H, rows, Tk]` and lse `[..., H, rows]`."""
    *batch, _, heads, _ = spec
    return P(*batch, heads, None, None), P(*batch, heads, None)


def _has_explicit_axes(leaf) -> bool:
    return isinstance(leaf, jax.Array) and AxisType.Explicit in jax.typeof(leaf).sharding.mesh.axis_types


def over_shards(kernel: Callable, q, k, v, sinks=None, ids=None):
    """`kernel(q, k, v, sinks, ids)` on each device's own examples and heads, for kernels that XLA cannot partition.

    The batch and the heads stay split as they are, by `jax.shard_map`: over Explicit axes as their types say, over Auto
    axes by the names in `HEAD_AXES` and `SEQUENCE_AXES`, as far as sizes divide. A sequence that is split is gathered.
    Within a user's `shard_map` the kernel runs on what it is given. `vmap` over an axis that an Explicit mesh axis
    splits is not supported.

    Args:
      kernel: returns `[..., Tq, H, Dv]`.
      q, k, v: `[..., T, H, D]`.
      sinks: `[H]` or None.
      ids: `[..., T]` with q's batch axes, `[T]`, or None.
    """
    mesh = jax.typeof(q).sharding.mesh
    free = {name for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind != AxisType.Manual}
    if math.prod(mesh.shape[name] for name in free) == 1:
        return kernel(q, k, v, sinks, ids)
    is_explicit = AxisType.Explicit in mesh.axis_types
    batch, heads = _explicit_axes(mesh, q, k) if is_explicit else _named_axes(mesh, free, q, k)
    spec = P(*batch, None, heads, None)
    arrays = (q, k, v, sinks, ids)
    specs = (spec, spec, spec, P(heads), P(None) if ids is None or ids.ndim == 1 else P(*batch, None))
    specs = tuple(None if x is None else at for x, at in zip(arrays, specs))
    if is_explicit:  # k, v, sinks or ids may be split otherwise than q
        arrays = jax.tree.map(functools.partial(_resharded, mesh), arrays, specs)
    # Kernels do not tell over which axes their results vary.
    run = jax.shard_map(kernel, mesh=mesh, in_specs=specs, out_specs=spec, axis_names=free, check_vma=False)
    out = run(*arrays)
    return _resharded(mesh, out, like_queries(_spec(q))[0]) if is_explicit else out


def _resharded(mesh, x, spec):
    sharding = NamedSharding(mesh, spec)
    return x if jax.typeof(x).sharding == sharding else jax.sharding.reshard(x, sharding)


def is_checked_manual(*arrays) -> bool:
    """Whether a call is inside a `shard_map` that checks over which axes values vary, which few kernels tell it."""
    return any(jax.typeof(x).manual_axis_type.varying for x in arrays)


def _explicit_axes(mesh, q, k) -> tuple[tuple, tuple[str, ...]]:
    """The mesh axes that split each batch axis of q, and its heads as far as they divide those of k."""
    spec = _spec(q)
    return spec[:-3], _dividing(mesh, _names(spec[-2]), k.shape[-2])


def _names(axes) -> tuple[str, ...]:
    """The mesh axes in an entry of a partition spec."""
    return (axes,) if isinstance(axes, str) else axes or ()


def _spec(x) -> tuple:
    """The mesh axes that split each axis of an array, by its type."""
    return (*jax.typeof(x).sharding.spec, *(None,) * x.ndim)[: x.ndim]


def _named_axes(mesh, free: set[str], q, k) -> tuple[tuple, tuple]:
    """The same by the names of the axes, in the order of the mesh."""
    names = [name for name in mesh.axis_names if name in free and name not in SEQUENCE_AXES]
    heads = _dividing(mesh, (name for name in names if name in HEAD_AXES), k.shape[-2])
    rank = q.ndim - 3
    batch = _dividing(mesh, (name for name in names if name not in HEAD_AXES), q.shape[0]) if rank else ()
    return ((batch, *(None,) * (rank - 1)) if rank else ()), heads


def _dividing(mesh, names, size) -> tuple[str, ...]:
    """The first of the named axes whose product divides a size."""
    taken = []
    for name in names:
        if size % math.prod(mesh.shape[n] for n in (*taken, name)) == 0:
            taken.append(name)
    return tuple(taken)
