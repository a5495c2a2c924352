"""Sharding by type: meshes whose axes are of AxisType.Explicit, the default of `jax.make_mesh`."""

import functools
from collections.abc import Callable

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


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
