"""Map the parameters of a module to the tensors of another framework's state dict."""

import itertools
import math
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from attnlab.support.errors import UserError

_CHUNK = 2**24  # bytes of a tensor that are read at once
_ALIGNED = 64  # bytes; JAX copies arrays of other alignments on CPUs


class Tensor(NamedTuple):
    """One tensor of a state dict, the concatenation of some parameters along their outputs."""

    name: str
    shape: tuple[int, ...]
    leaves: tuple[str, ...]  # paths, "block_0/attention/query/kernel", in the order of their outputs
    transposed: bool = False  # [out, in], as in torch's Linear, instead of [in, out]; "in" may span several axes
    slice: int | None = None  # index on the leaves' first axis, if the leaves stack several tensors
    groups: int = 1  # number of groups of outputs; each concatenates one part of every leaf
    # In each group, output i of the parameters is output order[i] of the tensor (a vector or transposed); () keeps i.
    order: tuple[int, ...] = ()
    constant: float | None = None  # the value of the leaves, if the state dict does not hold the tensor

    @property
    def inputs(self) -> int:
        """The size of the axes "in", 1 for vectors."""
        if len(self.shape) == 1:
            return 1
        return math.prod(self.shape[1:]) if self.transposed else self.shape[0]

    @property
    def outputs(self) -> int:
        """The size of the axis "out"."""
        return math.prod(self.shape) // self.inputs


_ENDINGS = {"kernel": "weight", "scale": "weight", "embedding": "weight", "bias": "bias"}


def named(
    shapes: Mapping[str, tuple[int, ...]],
    name: str,
    path: str,
    lines: Mapping[str, str],
    *,
    transposed: bool = True,
    groups: int = 1,
    details: Mapping[str, Mapping] = {},
) -> Iterator[Tensor]:
    """Yield the tensors of a table of names: for each line a weight and a bias, or a vector, if the parameters exist.

    A line maps a name without its ending to the paths of its parameters: "query key value" are concatenated, and in
    "query+gate" each group has a part of both. `name` and `path` are prefixes of all names and paths. `details` maps
    some entries of the table, such as "query+gate", to other fields of their tensors.
    """
    for stem, parameters in lines.items():
        paths = [path + each for each in re.split("[ +]", parameters)]
        fields = {"groups": groups if "+" in parameters else 1} | details.get(parameters, {})
        for leaf, ending in _ENDINGS.items():
            leaves = tuple(f"{each}/{leaf}" for each in paths)
            if leaves[0] in shapes:
                shape = _shape(leaves, shapes, transposed)
                is_transposed = leaf == "kernel" and (transposed or len(shape) == 3)
                yield Tensor(f"{name}{stem}.{ending}", shape, leaves, is_transposed, **fields)
        if paths[0] in shapes:
            yield Tensor(f"{name}{stem}", shapes[paths[0]], tuple(paths))


def _shape(leaves: Sequence[str], shapes: Mapping, transposed: bool) -> tuple[int, ...]:
    """The shape of the tensor that holds these parameters."""
    module, _, leaf = leaves[0].rpartition("/")
    if leaf == "embedding":
        return shapes[leaves[0]]
    sizes = sum(math.prod(shapes[each]) for each in leaves)
    if leaf != "kernel":
        return (sizes,)
    # Output projections have the axes heads, features and outputs; other kernels have inputs, heads and features.
    axes = shapes[leaves[0]][:-1] if module.rpartition("/")[2] == "out" else shapes[leaves[0]][:1]
    inputs = math.prod(axes)
    if module.endswith("conv"):
        return (sizes // inputs, 1, inputs)
    return (sizes // inputs, inputs) if transposed else (inputs, sizes // inputs)


def stacked(tensors: Sequence[Tensor], shapes: Mapping) -> list[Tensor]:
    """Adapt tensors to parameters with these shapes, whose layers are stacked by `attnlab.nn.stack_layers`."""
    names = ["blocks"] if "blocks" in shapes else [f"blocks_{n}" for n in range(len(shapes)) if f"blocks_{n}" in shapes]
    stacked_layers = len(names) * jax.tree.leaves(shapes[names[0]])[0].shape[0]

    def convert(tensor):
        layer = re.match(r"block_(\d+)/", tensor.leaves[0])
        if not layer or int(layer[1]) >= stacked_layers:
            return tensor
        turn, place = divmod(int(layer[1]), len(names))
        leaves = tuple(re.sub(r"^block_\d+/", f"{names[place]}/", leaf) for leaf in tensor.leaves)
        return tensor._replace(leaves=leaves, slice=turn)

    return list(map(convert, tensors))


def load(
    tensors: Sequence[Tensor],
    state: Mapping,
    shapes,
    source: str,
    ignored: Sequence[str] = (),
    *,
    shardings=None,
    dtype=jnp.float32,
):
    """Read all parameters from a state dict, a chunk of one tensor at a time, into a tree like `shapes`.

    The values of `state` have a `shape`, and indexing them gives NumPy or torch arrays. With `shardings`, a tree like
    `shapes`, each device gets its share. `source` names the state dict in errors; `ignored` names are not parameters.
    """
    check_names(tensors, state, source, ignored)
    for tensor in tensors:
        _check(state.get(tensor.name), tensor, f"{source}: {tensor.name}")
    wanted = flat_shapes(shapes)
    places = None if shardings is None else traverse_util.flatten_dict(shardings, sep="/")
    flat = {}
    # Group the tensors by their parameters, so that few arrays, e.g. of stacked layers, are incomplete at a time.
    by_leaves = operator.attrgetter("leaves")
    for leaves, slices in itertools.groupby(sorted(tensors, key=by_leaves), key=by_leaves):
        loaded = {leaf: _empty(wanted[leaf], dtype) for leaf in leaves}
        for tensor in slices:
            parts = [array if tensor.slice is None else array[tensor.slice] for array in loaded.values()]
            parts = [part.reshape(tensor.inputs, tensor.groups, -1) for part in parts]
            _fill(parts, tensor, state, f"{source}: {tensor.name}")
        for leaf, array in loaded.items():
            if places is None:
                flat[leaf] = jax.device_put(array)
            else:
                flat[leaf] = jax.make_array_from_callback(array.shape, places[leaf], array.__getitem__)
            flat[leaf].block_until_ready()  # so that few arrays are in transit
    return traverse_util.unflatten_dict(flat, sep="/")


def unload(tensors: Sequence[Tensor], params) -> dict[str, np.ndarray]:
    """Return the float32 state dict of `params`, the inverse of `load`; raise UserError for float64."""
    return dict(arrays(tensors, params))


def arrays(tensors: Sequence[Tensor], params) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the items of `unload` one at a time."""
    flat = traverse_util.flatten_dict(params, sep="/")
    for tensor in tensors:
        leaves = [flat[leaf] if tensor.slice is None else flat[leaf][tensor.slice] for leaf in tensor.leaves]
        grouped = (tensor.inputs, tensor.groups, -1)
        leaves = [as_numpy(leaf, f"parameter {path}").reshape(grouped) for path, leaf in zip(tensor.leaves, leaves)]
        array = np.concatenate(leaves, axis=-1) if len(leaves) > 1 else leaves[0]
        array = (array[..., np.argsort(tensor.order)] if tensor.order else array).reshape(tensor.inputs, -1)
        yield tensor.name, np.ascontiguousarray(array.T if tensor.transposed else array).reshape(tensor.shape)


def _fill(parts: Sequence[np.ndarray], tensor: Tensor, state: Mapping, name: str) -> None:
    """Copy a tensor to its parameters, each `[inputs, groups, outputs per group]`, some inputs at a time."""
    if tensor.constant is not None:
        parts[0][:] = tensor.constant
        return
    bounds = np.cumsum([part.shape[2] for part in parts])[:-1]
    is_matrix = len(tensor.shape) == 2
    for piece in pieces(tensor.inputs, tensor.outputs) if is_matrix else [slice(None)]:
        index = (slice(None), piece) if is_matrix and tensor.transposed else piece
        chunk = as_numpy(state[tensor.name][index], name)
        chunk = chunk.reshape(tensor.outputs, -1).T if tensor.transposed else chunk
        chunk = chunk.reshape(-1, tensor.groups, tensor.outputs // tensor.groups)
        chunk = chunk[..., tensor.order] if tensor.order else chunk
        for part, values in zip(parts, np.split(chunk, bounds, axis=2)):
            part[piece] = values


def pieces(rows: int, size: int) -> Iterator[slice]:
    """Slices of `rows` rows, each small enough to be read at once; a row has `size` numbers."""
    step = max(1, _CHUNK // (4 * size))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def check_names(tensors: Sequence[Tensor], state: Mapping, source: str, ignored: Sequence[str] = ()) -> None:
    """Raise UserError unless a state dict holds the tensors and, except for ignored ones, no others."""
    expected = dict.fromkeys(tensor.name for tensor in tensors if tensor.constant is None)
    if missing := [name for name in expected if name not in state]:
        raise UserError(f"{source} lacks the tensor {_few(missing)}: is it complete, and for this architecture?")
    if extra := [name for name in state if name not in expected and name not in ignored]:
        raise UserError(f"{source} holds the tensor {_few(extra)}, which the model does not have")


def _check(value, tensor: Tensor, name: str) -> None:
    """Raise UserError unless a tensor has its shape and a known type."""
    if tensor.constant is not None:
        return
    if tuple(value.shape) != tensor.shape:
        raise UserError(f"{name} has shape {tuple(value.shape)}, expected {tensor.shape}")
    as_numpy(value[:0], name)


def _empty(shape, dtype) -> np.ndarray:
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNED, np.uint8)
    start = -memory.ctypes.data % _ALIGNED
    return memory[start : start + size].view(dtype).reshape(shape)


def bare(variables) -> dict:
    """Return the parameters in variables `{"params": …}`; raise UserError for anything else."""
    if not isinstance(variables, Mapping) or "params" not in variables:
        raise UserError('expected variables {"params": …}, as model.init and attnlab.load return them')
    return variables["params"]


def check(params, shapes, model: str) -> None:
    """Raise UserError with a path unless parameters have these `shapes`; `model` names the module in errors."""
    actual = {path: np.shape(leaf) for path, leaf in traverse_util.flatten_dict(params, sep="/").items()}
    wanted = flat_shapes(shapes)
    if missing := [path for path in wanted if path not in actual]:
        raise UserError(f"the parameters lack {_few(missing)}, which {model} has")
    if extra := [path for path in actual if path not in wanted]:
        raise UserError(f"the parameters hold {_few(extra)}, which {model} does not have")
    for path, shape in wanted.items():
        if actual[path] != shape:
            raise UserError(f"parameter {path} has shape {actual[path]}, expected {shape} in {model}")


def shapes_of(module, *inputs):
    return jax.eval_shape(module.init, jax.random.key(0), *inputs)["params"]


def flat_shapes(shapes) -> dict[str, tuple[int, ...]]:
    """The shapes of parameters by path."""
    return {path: leaf.shape for path, leaf in traverse_util.flatten_dict(shapes, sep="/").items()}


def as_numpy(array, name: str) -> np.ndarray:
    """Convert another framework's array to float32 NumPy; widen 16-bit types, raise UserError for others."""
    if hasattr(array, "detach"):  # a torch tensor; torch cannot convert bfloat16 to NumPy
        if array.is_meta:
            raise UserError(f"{name} is a meta tensor without data: load the weights first")
        array = array.detach().cpu()
        array = (array.float() if array.is_floating_point() and array.itemsize <= 4 else array).numpy()
    array = np.asarray(array)
    if array.dtype == np.float32:
        return array
    # Some types of ml_dtypes, such as bfloat16, have the kind "V".
    if array.dtype.itemsize <= 2 and array.dtype.kind in "fV":
        return array.astype(np.float32)
    raise UserError(f"{name} is {array.dtype}, expected float32 or a 16-bit float: convert it first")


def as_torch(state: Mapping[str, np.ndarray], caller: str) -> dict:
    """Convert a state dict to torch tensors; `caller` is the function named in errors."""
    torch = import_torch(caller)
    return {name: torch.from_numpy(array.copy()) for name, array in state.items()}


def import_torch(caller: str):
    try:
        import torch
    except ImportError as error:
        raise UserError(f"{caller} needs torch, which is not installed: pip install torch") from error
    return torch


def _few(names: Sequence[str]) -> str:
    """The first name and the number of others."""
    return str(names[0]) + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")
