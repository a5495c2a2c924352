"""Where the parameters of a module stand in the state dict of another framework."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from flax import traverse_util

from attnlab.errors import UserError


class Tensor(NamedTuple):
    """One tensor of a state dict, and the parameters that stand side by side in it.

    Attributes:
      name: its key.
      shape: as it stands there.
      leaves: paths of parameters, "block_0/attention/query/kernel"; each takes an equal share of the outputs.
      transposed: whether it is `[out, in]`, as torch's Linear keeps it, and not `[in, out]`.
      slice: which slice of its leaves' first axis it holds, where the others are other tensors; None for all of it.
    """

    name: str
    shape: tuple[int, ...]
    leaves: tuple[str, ...]
    transposed: bool = False
    slice: int | None = None


def load(tensors: Sequence[Tensor], state: Mapping, shapes, source: str, ignored: Sequence[str] = ()):
    """The parameters that a state dict holds: all of them, or an error.

    Args:
      tensors: where they stand.
      state: arrays, or whatever NumPy takes, by name.
      shapes: tree of the parameters' shapes (`jax.eval_shape`).
      source: what the state dict is called in errors.
      ignored: names in it that are no parameters.

    Returns:
      A tree like `shapes`, float32 NumPy arrays.

    Raises:
      UserError: a tensor is missing, is one too many, has another shape, or holds no floating point numbers.
    """
    expected = {tensor.name for tensor in tensors}
    if missing := [tensor.name for tensor in tensors if tensor.name not in state]:
        raise UserError(f"{source} lacks the tensor {_few(missing)}: is it of this architecture, and whole?")
    if extra := [name for name in state if name not in expected and name not in ignored]:
        raise UserError(f"{source} holds the tensor {_few(extra)}, for which the model has no place")
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
    """The state dict that holds `params`, float32: what `load` takes apart, put together; UserError for float64."""
    flat = traverse_util.flatten_dict(params, sep="/")
    state = {}
    for tensor in tensors:
        # As wide as its share, whatever axes it has: [in, out], or [out].
        rows = tensor.shape[::-1] if tensor.transposed else tensor.shape
        share = (*rows[:-1], rows[-1] // len(tensor.leaves))
        at = ... if tensor.slice is None else tensor.slice
        leaves = [as_numpy(flat[leaf], f"parameter {leaf}")[at].reshape(share) for leaf in tensor.leaves]
        array = np.concatenate(leaves, axis=-1)
        state[tensor.name] = np.ascontiguousarray(array.T if tensor.transposed else array)
    return state


def check(variables, shapes, what: str):
    """The parameters in variables `{"params": …}`; UserError, naming a path, where they are not of these `shapes`."""
    if not isinstance(variables, Mapping) or "params" not in variables:
        raise UserError('expected variables {"params": …}, as model.init and attnlab.load give them')
    params = variables["params"]
    given = {path: np.shape(leaf) for path, leaf in traverse_util.flatten_dict(params, sep="/").items()}
    wanted = {path: leaf.shape for path, leaf in traverse_util.flatten_dict(shapes, sep="/").items()}
    if missing := [path for path in wanted if path not in given]:
        raise UserError(f"the parameters lack {_few(missing)}, which {what} has")
    if extra := [path for path in given if path not in wanted]:
        raise UserError(f"the parameters hold {_few(extra)}, for which {what} has no place")
    for path, shape in wanted.items():
        if given[path] != shape:
            raise UserError(f"parameter {path} has shape {given[path]}, expected {shape} in {what}")
    return params


def shapes_of(module, *inputs):
    """Tree of the shapes of a module's parameters, called with such inputs."""
    return jax.eval_shape(module.init, jax.random.key(0), *inputs)["params"]


def as_numpy(array, name: str) -> np.ndarray:
    """A NumPy array, float32, of what another framework holds; 16 bits are widened, 64 refused."""
    if hasattr(array, "detach"):  # torch's, which has no NumPy array of a bfloat16
        if array.is_meta:
            raise UserError(f"{name} is a meta tensor, expected numbers: load the weights first")
        array = array.detach().cpu()
        array = (array.float() if array.is_floating_point() and array.itemsize <= 4 else array).numpy()
    array = np.asarray(array)
    if array.dtype == np.float32:
        return array
    # Not all of ml_dtypes' say that they are floating point.
    if array.dtype.itemsize <= 2 and array.dtype.kind in "fV":
        return array.astype(np.float32)
    raise UserError(f"{name} is {array.dtype}, expected float32, or 16 bits: convert it first")


def as_torch(state: Mapping[str, np.ndarray], what: str) -> dict:
    """A state dict of torch tensors, for the function that is called `what`."""
    torch = import_torch(what)
    return {name: torch.from_numpy(array.copy()) for name, array in state.items()}


def import_torch(what: str):
    """The module torch; UserError where it is not installed."""
    try:
        import torch
    except ImportError as error:
        raise UserError(f"{what} needs torch, which is not installed: pip install torch") from error
    return torch


def _few(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    return str(names[0]) + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")
