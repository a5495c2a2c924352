"""Map the parameters of a module to the tensors of another framework's state dict."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    transposed: bool = False  # [out, in], as in torch's Linear, instead of [in, out]; in may be several axes
    slice: int | None = None  # index on the leaves' first axis, if the other slices are other tensors
    groups: int = 1  # the outputs are so many parts, each the concatenation of one part of every leaf
    # In each part, output i of the parameters is output order[i] of the tensor, a vector or transposed; () for i.
    order: tuple[int, ...] = ()
    constant: float | None = None  # the value of parameters that the state dict does not hold

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


def stacked(tensors: Sequence[Tensor], shapes: Mapping) -> list[Tensor]:
    """The same tensors for parameters of these shapes, with layers stacked by `attnlab.nn.stack_layers`."""
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

    The values of `state` are arrays of NumPy or torch, or have `shape` and `rows(start, stop)`. With `shardings`, a
    tree like `shapes`, this process reads only its devices' shares. `source` names the state dict in errors; names in
    `ignored` are not parameters.
    """
    check_names(tensors, state, source, ignored)
    wanted = {path: leaf.shape for path, leaf in traverse_util.flatten_dict(shapes, sep="/").items()}
    places = None if shardings is None else traverse_util.flatten_dict(shardings, sep="/")
    parts = {}
    for tensor in tensors:
        stored, first = _stored(state.get(tensor.name), tensor, source), 0
        for leaf in tensor.leaves:
            shape = wanted[leaf] if tensor.slice is None else wanted[leaf][1:]
            parts.setdefault(leaf, []).append(_Part(tensor, stored, shape, first))
            first += math.prod(shape) // tensor.inputs // tensor.groups
    flat = {}
    for leaf, pieces in parts.items():
        read = _reader(pieces, wanted[leaf], dtype)
        if places is None:
            array = jax.device_put(read((slice(None),) * len(wanted[leaf])))
        else:
            array = jax.make_array_from_callback(wanted[leaf], places[leaf], read)
        flat[leaf] = array.block_until_ready()  # so that only one array is in transit
    return traverse_util.unflatten_dict(flat, sep="/")


def unload(tensors: Sequence[Tensor], params) -> dict[str, np.ndarray]:
    """The state dict of `params`, float32, the inverse of `load`; UserError for float64."""
    return dict(arrays(tensors, params))


def arrays(tensors: Sequence[Tensor], params) -> Iterator[tuple[str, np.ndarray]]:
    """The items of `unload`, one at a time."""
    flat = traverse_util.flatten_dict(params, sep="/")
    for tensor in tensors:
        leaves = [flat[leaf] if tensor.slice is None else flat[leaf][tensor.slice] for leaf in tensor.leaves]
        grouped = (tensor.inputs, tensor.groups, -1)
        leaves = [as_numpy(leaf, f"parameter {path}").reshape(grouped) for path, leaf in zip(tensor.leaves, leaves)]
        array = np.concatenate(leaves, axis=-1) if len(leaves) > 1 else leaves[0]
        array = (array[..., np.argsort(tensor.order)] if tensor.order else array).reshape(tensor.inputs, -1)
        yield tensor.name, np.ascontiguousarray(array.T if tensor.transposed else array).reshape(tensor.shape)


class _Part(NamedTuple):
    """A parameter of a `shape`, or one slice of it, in a tensor, from output `first` of each group on."""

    tensor: Tensor
    stored: object
    shape: tuple[int, ...]
    first: int

    def fill(self, out: np.ndarray, bounds: Sequence[tuple[int, int]]) -> None:
        """Copy a range of every axis to `out`.

        The parameter is a matrix `[in, out]` with split axes: `[F, H, D]`, or `[H, D, F]`. Only rows and columns in the
        ranges of the first axis of "in" and of "out" are read.
        """
        inputs = self.tensor.inputs
        split = next(n for n in range(len(self.shape) + 1) if math.prod(self.shape[:n]) == inputs)
        rows = _range(self.shape[:split], bounds[:split])
        columns = _range(self.shape[split:], bounds[split:])
        leading = (0, split)  # axes of the ranges `rows` and `columns`; other axes are read whole
        whole = [(0, size) if n not in leading else at for n, (size, at) in enumerate(zip(self.shape, bounds))]
        is_whole = whole == list(bounds)
        block = out if is_whole else np.empty([end - start for start, end in whole], out.dtype)
        self._copy(block.reshape(rows[1] - rows[0], columns[1] - columns[0]), rows, columns)
        if not is_whole:
            out[...] = block[tuple(slice(None) if n in leading else slice(*at) for n, at in enumerate(bounds))]

    def _copy(self, out, rows, columns) -> None:
        """Copy rows and columns of the matrix to `out`, which has their shape."""
        for columns_of_group, shift in self._in_tensor(*columns):
            if len(self.tensor.shape) == 1:
                out[0, slice(*(at - shift for at in columns_of_group))] = self.stored.rows(*columns_of_group)
            elif self.tensor.transposed:
                for start, end in self._chunks(columns_of_group, self.tensor.inputs):
                    chunk = self.stored.rows(start, end).reshape(end - start, -1)[:, slice(*rows)]
                    out[:, start - shift : end - shift] = chunk.T
            else:
                to = slice(*(at - shift for at in columns_of_group))
                for start, end in self._chunks(rows, self.tensor.outputs):
                    chunk = self.stored.rows(start, end)[:, slice(*columns_of_group)]
                    out[start - rows[0] : end - rows[0], to] = chunk

    def _in_tensor(self, start: int, end: int) -> Iterator[tuple[tuple[int, int], int]]:
        """The outputs of the tensor that hold a range of the parameter's: ranges, and how far each is from its copy."""
        groups, begin = self.tensor.groups, start
        size, step = math.prod(self.shape) // self.tensor.inputs // groups, self.tensor.outputs // groups
        while start < end:
            group, within = divmod(start, size)
            count, first = min(end - start, size - within), group * step + self.first + within
            yield (first, first + count), first - (start - begin)
            start += count

    def _chunks(self, bounds, size: int) -> Iterator[tuple[int, int]]:
        """Parts of a range of lines, of `size` numbers each."""
        count = max(1, _CHUNK // (4 * size))
        for start in range(*bounds, count):
            yield start, min(start + count, bounds[1])


class _InMemory(NamedTuple):
    """An array of another framework with the interface of a stored tensor."""

    array: object
    name: str

    def rows(self, start: int, stop: int) -> np.ndarray:
        return as_numpy(self.array[start:stop], self.name)


class Joined(NamedTuple):
    """Tensors of a state dict that are one tensor, with the interface of a stored one."""

    parts: Sequence  # that follow one another along the first axis
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:]

    def rows(self, start: int, stop: int) -> np.ndarray:
        pieces, first = [], 0
        for part in self.parts:
            bounds = (min(max(at - first, 0), part.shape[0]) for at in (start, stop))
            pieces.append(rows(part, *bounds, self.name))
            first += part.shape[0]
        return np.concatenate(pieces)


class _Ordered(NamedTuple):
    """A stored tensor in the order of its parameters' outputs, with the interface of a stored one."""

    stored: object
    tensor: Tensor

    def rows(self, start: int, stop: int) -> np.ndarray:
        order, size = self.tensor.order, self.tensor.outputs // self.tensor.groups
        wanted = np.array([at // size * size + order[at % size] for at in range(start, stop)], np.int64)
        first, end = int(wanted.min()), int(wanted.max()) + 1
        if end - first <= 2 * len(wanted):  # in one read, as each opens the file
            return self.stored.rows(first, end)[wanted - first]
        runs = np.split(wanted, np.flatnonzero(np.diff(wanted) != 1) + 1)
        return np.concatenate([self.stored.rows(int(run[0]), int(run[-1]) + 1) for run in runs])


class _Constant(NamedTuple):
    """A tensor of one value, with the interface of a stored one."""

    tensor: Tensor

    def rows(self, start: int, stop: int) -> np.ndarray:
        return np.full((stop - start, *self.tensor.shape[1:]), self.tensor.constant, np.float32)


def check_names(tensors: Sequence[Tensor], state: Mapping, source: str, ignored: Sequence[str] = ()) -> None:
    """Raise UserError unless a state dict holds the tensors, and no others but the ignored."""
    expected = dict.fromkeys(tensor.name for tensor in tensors if tensor.constant is None)
    if missing := [name for name in expected if name not in state]:
        raise UserError(f"{source} lacks the tensor {_few(missing)}: is it complete, and of this architecture?")
    if extra := [name for name in state if name not in expected and name not in ignored]:
        raise UserError(f"{source} holds the tensor {_few(extra)}, which the model does not have")


def _stored(value, tensor: Tensor, source: str):
    """An object with `rows`; UserError for another shape or type."""
    if tensor.constant is not None:
        return _Constant(tensor)
    name = f"{source}: {tensor.name}"
    if tuple(value.shape) != tensor.shape:
        raise UserError(f"{name} has shape {tuple(value.shape)}, expected {tensor.shape}")
    rows(value, 0, 0, name)  # checks the type
    stored = value if hasattr(value, "rows") else _InMemory(value, name)
    return _Ordered(stored, tensor) if tensor.order else stored


def rows(value, start: int, stop: int, name: str) -> np.ndarray:
    """A range of the first axis of a stored tensor or an array, float32."""
    return as_numpy(value.rows(start, stop) if hasattr(value, "rows") else value[start:stop], name)


def _range(shape, bounds) -> tuple[int, int]:
    """The range of flattened axes for a range of the first of them."""
    if not shape:
        return 0, 1
    unit = math.prod(shape[1:])
    return bounds[0][0] * unit, bounds[0][1] * unit


def _reader(parts: Sequence[_Part], shape, dtype) -> Callable[[tuple[slice, ...]], np.ndarray]:
    """A function that reads a share of a parameter, from a slice of each axis."""
    by_slice = {part.tensor.slice: part for part in parts}

    def read(index):
        bounds = [axis.indices(size)[:2] for axis, size in zip(index, shape)]
        out = _empty([end - start for start, end in bounds], dtype)
        if None in by_slice:
            by_slice[None].fill(out, bounds)
        else:
            for at, n in enumerate(range(*bounds[0])):
                by_slice[n].fill(out[at], bounds[1:])
        return out

    return read


def _empty(shape, dtype) -> np.ndarray:
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNED, np.uint8)
    start = -memory.ctypes.data % _ALIGNED
    return memory[start : start + size].view(dtype).reshape(shape)


def bare(variables) -> dict:
    """The parameters in variables `{"params": …}`; UserError for anything else."""
    if not isinstance(variables, Mapping) or "params" not in variables:
        raise UserError('expected variables {"params": …}, as model.init and attnlab.load return them')
    return variables["params"]


def check(params, shapes, model: str) -> None:
    """Raise UserError with a path unless parameters have these `shapes`; `model` names the module in errors."""
    found = {path: np.shape(leaf) for path, leaf in traverse_util.flatten_dict(params, sep="/").items()}
    wanted = {path: leaf.shape for path, leaf in traverse_util.flatten_dict(shapes, sep="/").items()}
    if missing := [path for path in wanted if path not in found]:
        raise UserError(f"the parameters lack {_few(missing)}, which {model} has")
    if extra := [path for path in found if path not in wanted]:
        raise UserError(f"the parameters hold {_few(extra)}, which {model} does not have")
    for path, shape in wanted.items():
        if found[path] != shape:
            raise UserError(f"parameter {path} has shape {found[path]}, expected {shape} in {model}")


def shapes_of(module, *inputs):
    return jax.eval_shape(module.init, jax.random.key(0), *inputs)["params"]


def as_numpy(array, name: str) -> np.ndarray:
    """Another framework's array as float32 NumPy; 16-bit types are widened, others are a UserError."""
    if hasattr(array, "detach"):  # torch's, which cannot convert bfloat16 to NumPy
        if array.is_meta:
            raise UserError(f"{name} is a meta tensor without data: load the weights first")
        array = array.detach().cpu()
        array = (array.float() if array.is_floating_point() and array.itemsize <= 4 else array).numpy()
    array = np.asarray(array)
    if array.dtype == np.float32:
        return array
    # Not all types of ml_dtypes are of kind "f".
    if array.dtype.itemsize <= 2 and array.dtype.kind in "fV":
        return array.astype(np.float32)
    raise UserError(f"{name} is {array.dtype}, expected float32 or a 16-bit float: convert it first")


def as_torch(state: Mapping[str, np.ndarray], caller: str) -> dict:
    """A state dict of torch tensors; `caller` is the function named in errors."""
    torch = import_torch(caller)
    return {name: torch.from_numpy(array.copy()) for name, array in state.items()}


def import_torch(caller: str):
    try:
        import torch
    except ImportError as error:
        raise UserError(f"{caller} needs torch, which is not installed: pip install torch") from error
    return torch


def _few(names: Sequence[str]) -> str:
    """The first name, and the number of others."""
    return str(names[0]) + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")
