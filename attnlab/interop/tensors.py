"""Map the parameters of a module to the tensors of another framework's state dict."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from flax import traverse_util

from attnlab.errors import UserError


class Tensor(NamedTuple):
    """One tensor of a state dict, and the parameters concatenated in it.

    Attributes:
      name: its key.
      shape: its shape there.
      leaves: paths of parameters, "block_0/attention/query/kernel"; each takes an equal share of the outputs.
      transposed: whether it is `[out, in]`, as in torch's Linear, instead of `[in, out]`.
      slice: index on its leaves' first axis, if the other slices are other tensors; None for the whole leaves.
    """

    name: str
    shape: tuple[int, ...]
    leaves: tuple[str, ...]
    transposed: bool = False
    slice: int | None = None


def load(tensors: Sequence[Tensor], state: Mapping, shapes, source: str, ignored: Sequence[str] = ()):
    """Read all parameters from a state dict.

    Args:
      tensors: the layout of the state dict.
      state: arrays by name.
      shapes: tree of the parameters' shapes (`jax.eval_shape`).
      source: name of the state dict in errors.
      ignored: names in it that are not parameters.

    Returns:
      A tree like `shapes`, float32 NumPy arrays.

    Raises:
      UserError: a tensor is missing, unexpected, of another shape, or not of a floating type.
    """
    expected = {tensor.name for tensor in tensors}
    if missing := [tensor.name for tensor in tensors if tensor.name not in state]:
        raise UserError(f"{source} lacks the tensor {_few(missing)}: is it complete, and of this architecture?")
    if extra := [name for name in state if name not in expected and name not in ignored]:
        raise UserError(f"{source} holds the tensor {_few(extra)}, which the model does not have")
    flat = {}  # the slices of each leaf
    wanted = traverse_util.flatten_dict(shapes, sep="/")
    for tensor in tensors:
        array = as_numpy(state[tensor.name], f"{source}: {tensor.name}")
        if array.shape != tensor.shape:
            raise UserError(f"{source}: {tensor.name} has shape {array.shape}, expected {tensor.shape}")
        parts = np.split(array.T if tensor.transposed else array, len(tensor.leaves), axis=-1)
        for leaf, part in zip(tensor.leaves, parts):
            flat.setdefault(leaf, []).append(part.ravel())
    flat = {leaf: np.concatenate(parts).reshape(wanted[leaf].shape) for leaf, parts in flat.items()}
    return traverse_util.unflatten_dict(flat, sep="/")


def unload(tensors: Sequence[Tensor], params) -> dict[str, np.ndarray]:
    """The state dict of `params`, float32, the inverse of `load`; UserError for float64."""
    flat = traverse_util.flatten_dict(params, sep="/")
    state = {}
    for tensor in tensors:
        # Its share of the tensor, whatever its own axes: [in, out], or [out].
        rows = tensor.shape[::-1] if tensor.transposed else tensor.shape
        share = (*rows[:-1], rows[-1] // len(tensor.leaves))
        at = ... if tensor.slice is None else tensor.slice
        leaves = [as_numpy(flat[leaf], f"parameter {leaf}")[at].reshape(share) for leaf in tensor.leaves]
        array = np.concatenate(leaves, axis=-1)
        state[tensor.name] = np.ascontiguousarray(array.T if tensor.transposed else array)
    return state


def bare(variables) -> dict:
    """The parameters in variables `{"params": …}`; UserError for anything else."""
    if not isinstance(variables, Mapping) or "params" not in variables:
        raise UserError('expected variables {"params": …}, as model.init and attnlab.load return them')
    return variables["params"]


def check(params, shapes, model: str) -> None:
    """Raise UserError, naming a path, unless parameters have these `shapes`; `model` is the module's name in errors."""
    given = {path: np.shape(leaf) for path, leaf in traverse_util.flatten_dict(params, sep="/").items()}
    wanted = {path: leaf.shape for path, leaf in traverse_util.flatten_dict(shapes, sep="/").items()}
    if missing := [path for path in wanted if path not in given]:
        raise UserError(f"the parameters lack {_few(missing)}, which {model} has")
    if extra := [path for path in given if path not in wanted]:
        raise UserError(f"the parameters hold {_few(extra)}, which {model} does not have")
    for path, shape in wanted.items():
        if given[path] != shape:
            raise UserError(f"parameter {path} has shape {given[path]}, expected {shape} in {model}")


def shapes_of(module, *inputs):
    """Tree of the shapes of a module's parameters when called with `inputs`."""
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
    """The module torch; UserError if it is not installed."""
    try:
        import torch
    except ImportError as error:
        raise UserError(f"{caller} needs torch, which is not installed: pip install torch") from error
    return torch


def _few(names: Sequence[str]) -> str:
    """The first name, and the number of others."""
    return str(names[0]) + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")
