"""Read and write folders of `transformers`: config.json and safetensors files, tensor by tensor."""

import contextlib
import itertools
import json
import math
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from attnlab.interop.tensors import Tensor
from attnlab.support import extras, files
from attnlab.support.errors import UserError

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
_SHARD = re.compile(r"[^/\0]+\.safetensors")


class StoredTensor:
    """A tensor in a file; indexing reads a part of it."""

    def __init__(self, stored, name: str):
        self.shape = tuple(stored.get_shape())
        self._stored, self._name = stored, name

    def __getitem__(self, index) -> np.ndarray:
        try:
            return self._stored[index]
        except AttributeError as error:  # a type that NumPy does not have
            raise UserError(
                f"{self._name} is {self._stored.get_dtype()}, expected float32 or a 16-bit float"
            ) from error


def is_hf(path: str | Path) -> bool:
    """Whether a path is a folder or file of `transformers`, as opposed to a workdir of attnlab."""
    path = Path(path)
    if path.suffix == ".safetensors":
        return True
    with contextlib.suppress(OSError, ValueError):
        config = files.read_json(path / "config.json")
        return isinstance(config, dict) and "model_type" in config
    return False


def read_config(path: Path) -> dict:
    """Read the `config.json` in a folder, or beside a file."""
    file = (path if path.is_dir() else path.parent) / "config.json"
    if not path.exists():
        raise UserError(f"{path}: no such file or folder; download it first, with its config.json and tokenizer files")
    try:
        config = files.read_json(file)
    except FileNotFoundError as error:
        raise UserError(f"{file}, which contains the number of heads, is missing: put it there") from error
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON ({error}): restore it") from error
    if not isinstance(config, dict):
        raise UserError(f"{file} holds a {type(config).__name__}, expected an object: restore it")
    return config


def read_tensors(path: Path) -> dict[str, StoredTensor]:
    """Map the tensors of a safetensors file, or of the files in a folder's index, into memory."""
    library, tensors = extras.require("safetensors", "hf", str(path)), {}
    for file, names in weight_files(path).items():
        if not file.is_file():  # a pipe would wait for its writer
            raise UserError(f"{file} is missing: only safetensors files can be read")
        try:
            opened = library.safe_open(file, "numpy")
        except (OSError, library.SafetensorError) as error:
            raise UserError(f"{file} is not a complete safetensors file ({error}): download it again") from error
        stored = set(opened.keys())
        if absent := sorted(set(names or ()) - stored):
            raise UserError(f"{file} has no tensor {absent[0]}, which {INDEX} says it holds: download both again")
        tensors |= {name: StoredTensor(opened.get_slice(name), f"{file}: {name}") for name in names or sorted(stored)}
    return tensors


def weight_files(path: Path) -> dict[Path, list[str] | None]:
    """The safetensors file at a path, or the files of a folder, with the tensors to read from each; None for all.

    Raises:
      UserError: a damaged index, or an index that does not name the model.safetensors beside it.
    """
    index = path / INDEX
    if not path.is_dir() or not index.exists():
        return {path / WEIGHTS if path.is_dir() else path: None}
    shards = {}
    try:
        for tensor, name in files.read_json(index)["weight_map"].items():
            if not _SHARD.fullmatch(name):
                raise ValueError(f"it names the file {name!r}")
            shards.setdefault(path / name, []).append(tensor)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is not an index of tensors ({error}): restore it") from error
    if (other := path / WEIGHTS) not in shards and other.exists():  # transformers would read this file
        raise UserError(f"{path} has both {WEIGHTS} and {INDEX}, which does not name it: remove the older one")
    return shards


def write_tensors(
    folder: Path, tensors: Sequence[Tensor], arrays: Iterable[tuple[str, np.ndarray]], dtype, max_shard_bytes: int
) -> None:
    """Write tensors beside config.json to a safetensors file, or several with an index; `arrays` has the same order.

    Raises:
      OSError: a file cannot be written.
    """
    library, dtype = extras.require("safetensors", "hf", str(folder)), np.dtype(dtype)
    from safetensors.numpy import save_file

    shards, arrays, places = _shards(tensors, dtype, max_shard_bytes), iter(arrays), {}
    for n, shard in enumerate(shards, 1):
        name = WEIGHTS if len(shards) == 1 else f"model-{n:05}-of-{len(shards):05}.safetensors"
        state = {key: array.astype(dtype, copy=False) for key, array in itertools.islice(arrays, len(shard))}
        places |= dict.fromkeys(state, name)
        try:
            save_file(state, folder / name, metadata={"format": "pt"})
        except library.SafetensorError as error:
            raise OSError(str(error)) from error
        shutil.copymode(folder / "config.json", folder / name)  # the library makes files that only their owner can read
    if len(shards) > 1:
        total = sum(_bytes(tensor, dtype) for tensor in tensors)
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(tensors: Sequence[Tensor], dtype: np.dtype, max_bytes: int) -> list[list[Tensor]]:
    shards, size = [[]], 0
    for tensor in tensors:
        if shards[-1] and size + _bytes(tensor, dtype) > max_bytes:
            shards, size = [*shards, []], 0
        shards[-1].append(tensor)
        size += _bytes(tensor, dtype)
    return shards


def _bytes(tensor: Tensor, dtype: np.dtype) -> int:
    return math.prod(tensor.shape) * dtype.itemsize


def check_dtype(dtype) -> None:
    """Raise UserError unless tensors can be read and written as this type."""
    supported = (jnp.float32, jnp.bfloat16, jnp.float16)
    if dtype is None or jnp.dtype(dtype) not in map(jnp.dtype, supported):
        raise UserError(f"dtype = {dtype}: expected float32, bfloat16 or float16")
