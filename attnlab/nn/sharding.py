"""Sharding of parameters and activations by the names of their axes (Flax's logical axes).

`flax.linen.logical_axis_rules` maps names to the mesh axes that split them; without rules nothing changes. With

    rules = (("batch", ("data", "fsdp")), ("length", "context"), ("embed", "fsdp"), ("heads", "tensor"),
             ("kv_heads", "tensor"), ("mlp", "tensor"), ("vocab", "tensor"))

activations are split by example and along the sequence, as in `attnlab.context_parallel("context")`; heads, hidden
features and the vocabulary are split by "tensor" (Shoeybi et al. 2019). Parameters are stored in shards along "embed".
A layer's parameters are gathered before the layer is computed and again for its gradient, which is summed into shards
(Zhao et al. 2023, section 3; Rajbhandari et al. 2020, stage 3).
"""

import functools
import math
import re

import flax.linen as nn
import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from attnlab.ops.meshes import names_of
from attnlab.types import Array

# Axis names by parameter path; parameters that match no rule, such as norms and some biases, have none.
PARAMETERS = (
    (r"query/kernel$", ("embed", "heads", None)),
    (r"(key|value)/kernel$", ("embed", "kv_heads", None)),
    (r"query/bias$", ("heads", None)),
    (r"(key|value)/bias$", ("kv_heads", None)),
    (r"attention/gate/kernel$", ("embed", "heads", None)),
    (r"attention/gate/bias$", ("heads", None)),
    # Not split along "embed": one column per head is small, and a gather would round it to the computation's type.
    (r"attention/forget/kernel$", (None, "heads")),
    (r"attention/forget/bias$", ("heads",)),
    (r"attention/(a|b)/kernel$", (None, "heads")),
    (r"attention/(A_log|dt_bias|D)$", ("heads",)),
    (r"attention/(decay|gate|a|v)_up/kernel$", (None, "heads", None)),
    (r"attention/(decay|gate|a|v)_up/bias$", ("heads", None)),
    (r"attention/(k_k|k_a|r_k|lower_bound)$", ("heads", None)),
    (r"query_conv/kernel$", (None, "heads", None)),
    (r"(key|value)_conv/kernel$", (None, "kv_heads", None)),
    # Features that belong to all heads, and layers without heads, are split along "embed" alone.
    (r"attention/(in|linear|query_down|latent|rotary)/kernel$", ("embed", None)),
    (r"attention/conv/kernel$", ("embed",)),
    (r"attention/cell/\w+/kernel$", ("embed", None)),
    (r"attention/out/kernel$", ("heads", None, "embed")),
    (r"mlp/(up|gate)/kernel$", ("embed", "mlp")),
    (r"mlp/(up|gate)/bias$", ("mlp",)),
    (r"mlp/down/kernel$", ("mlp", "embed")),
    (r"(embed|output)/embedding$", ("vocab", "embed")),
    (r"positions/embedding$", (None, "embed")),
)


def parameter_names(path: str, rank: int) -> tuple[str | None, ...]:
    """The axis names of a parameter or of a part of its kernel, "…/kernel/0"; stacked layers have one more in front."""
    path = re.sub(r"/kernel/\d+$", "/kernel", path)
    names = next((names for rule, names in PARAMETERS if re.search(rule, path)), ())
    return (*(None,) * (rank - len(names)), *names)


def spec_of(names, shape, mesh) -> PartitionSpec:
    """The mesh axes that split an array by the current rules; they split no axis whose size they do not divide."""

    def splits(axes, size):
        axes = tuple(name for name in names_of(axes) if name not in _manual(mesh))
        known = all(name in mesh.shape for name in axes)
        divides = known and size % math.prod(mesh.shape[name] for name in axes) == 0
        return (axes if len(axes) > 1 else axes[0]) if axes and divides else None

    mesh_axes = nn.logical_to_mesh_axes(names) or (None,) * len(names)
    return PartitionSpec(*map(splits, mesh_axes, shape))


def shards(name: str, x: Array) -> int:
    """The number of shards of an axis of this name, by the current rules and the mesh of `x`."""
    mesh = _mesh(x)
    if mesh is None:
        return 1
    return math.prod(mesh.shape[axis] for axis in _axes_of(name) if axis in _auto(mesh))


def over_tokens(function, x: Array, weights: Array, targets: Array) -> Array:
    """Run `function(x, weights, targets)` on each device's tokens if only batch and length are split, else on all.

    The gradient of the weights is then summed over devices once; XLA would sum it in every iteration of a loop.
    """
    mesh = _mesh(x)
    if mesh is None or shards("batch", x) * shards("length", x) != math.prod(_auto(mesh).values()):
        return function(x, weights, targets)
    split = spec_of(("batch", "length"), x.shape[:2], mesh)
    if any(axes is None and shards(name, x) > 1 for axes, name in zip(split, ("batch", "length"))):
        return function(x, weights, targets)
    specs = (split, PartitionSpec(), split)
    run = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=split, axis_names=set(_auto(mesh)))
    return run(x, weights, targets)


def over_examples(function, whole, batch):
    """Run `function(whole, batch, axes)` on each device's examples; devices that split `whole` work as one group.

    The function must sum or average its results over the mesh axes `axes`, so that they are equal on all devices;
    `axes` is None if the function gets all examples at once. `batch` is a tree of arrays `[B, ...]`.
    """
    x = jax.tree.leaves(batch)[0]
    mesh = _mesh(x)
    axes = () if mesh is None else [name for name in _axes_of("batch") if _auto(mesh).get(name, 1) > 1]
    axes = tuple(name for name in axes if name not in _axes_of("embed"))  # axes of "embed" also split parameters
    if not axes or x.shape[0] % math.prod(mesh.shape[name] for name in axes):
        return function(whole, batch, None)
    run = functools.partial(function, axes=axes)
    # Unchecked, because with the check JAX would sum the gradient of replicated values as soon as it is computed.
    options = {"axis_names": set(axes), "check_vma": False}
    specs = (PartitionSpec(), PartitionSpec(axes))
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), **options)(whole, batch)


def is_active(x: Array) -> bool:
    """Whether there are rules and a mesh of several devices over which they can split `x`."""
    return _mesh(x) is not None


def constrain(x: Array, *names: str | None) -> Array:
    """Split `x` by the names of its axes: "batch", "length", "heads", "kv_heads", "mlp", "vocab", or None."""
    mesh = _mesh(x)
    if mesh is None:
        return x
    return lax.with_sharding_constraint(x, NamedSharding(mesh, spec_of(names, x.shape, mesh)))


def gathered(params, dtype=None, prefix: str = ""):
    """Gather a layer's parameters along "embed", cast to `dtype` before if they are split, so that fewer bytes move.

    The gradient comes back in shards. `prefix` is the path of the tree within a model's parameters, e.g. "embed".
    """

    def whole(path, x):
        name = "/".join((prefix, jax.tree_util.keystr(path, simple=True, separator="/")))
        names = parameter_names(name, x.ndim)
        mesh = _mesh(x) if "embed" in names else None
        if mesh is None:
            return x
        stored = spec_of(names, x.shape, mesh)
        used = spec_of(tuple(None if name == "embed" else name for name in names), x.shape, mesh)
        if stored == used:
            return x
        gather = _gathered_table if name.endswith("embedding") else _gathered
        return gather(x.astype(dtype or x.dtype), NamedSharding(mesh, used), NamedSharding(mesh, stored))

    return jax.tree_util.tree_map_with_path(whole, params)


def gathering(owner: nn.Module, call):
    """Wrap `call(module, …)` so that the module's split parameters are gathered, in the dtype of `owner`."""
    if owner.is_initializing() or not nn.get_logical_axis_rules():
        return call

    def run(module, *args):
        def gather(variables):
            return {"params": gathered(variables["params"], owner.dtype, prefix=module.name)}

        return nn.map_variables(call, "params", trans_in_fn=gather)(module, *args)

    return run


def _gather(x, used, stored):
    return lax.with_sharding_constraint(x, used)


def _gathered_forward(x, used, stored):
    # Inlined, because `is_gather` would not find the constraint within a call.
    return lax.with_sharding_constraint(x, used), None


def _gathered_backward(used, stored, _, g):
    return (lax.with_sharding_constraint(g, stored),)


def _table_backward(used, stored, _, g):
    # Summed first, then split: otherwise XLA would split the activations that were looked up in the table.
    return (lax.with_sharding_constraint(lax.with_sharding_constraint(g, used), stored),)


_gathered = jax.custom_vjp(_gather, nondiff_argnums=(1, 2))
_gathered.defvjp(_gathered_forward, _gathered_backward)
_gathered_table = jax.custom_vjp(_gather, nondiff_argnums=(1, 2))
_gathered_table.defvjp(_gathered_forward, _table_backward)


def is_gather(primitive) -> bool:
    """Whether a primitive of a jaxpr may be a gather of parameters, whose result must not be stored."""
    return primitive.name == "sharding_constraint"


def _mesh(x):
    """The mesh over which rules can split an array, or None; `shard_map` axes and Explicit meshes are left alone."""
    if not nn.get_logical_axis_rules() or not isinstance(x, jax.Array):
        return None
    mesh = jax.typeof(x).sharding.mesh
    has_rules = AxisType.Explicit not in mesh.axis_types
    return mesh if has_rules and math.prod(_auto(mesh).values()) > 1 else None


def _auto(mesh) -> dict[str, int]:
    """The mesh axes over which XLA splits arrays, and their sizes."""
    return {name: size for name, size in mesh.shape.items() if name not in _manual(mesh)}


def _manual(mesh) -> list[str]:
    """The mesh axes over which an enclosing `shard_map` has split arrays."""
    return [name for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Manual]


def _axes_of(name: str) -> tuple[str, ...]:
    """The mesh axes that split axes of this name, by the current rules."""
    (axes,) = nn.logical_to_mesh_axes((name,))
    return names_of(axes)
