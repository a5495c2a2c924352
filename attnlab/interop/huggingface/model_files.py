"""Read and write folders of `transformers`: config.json, and safetensors files, tensor by tensor.

A safetensors file: 8 bytes with the length of its header; the header in JSON, with the type, shape and place of each
tensor; the tensors.
"""

import contextlib
import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from attnlab.interop.tensors import Tensor
from attnlab.support import files
from attnlab.support.errors import UserError

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": np.dtype(jnp.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
_SHARD = re.compile(r"[^/\0]+\.safetensors")
_LONGEST_HEADER = 100_000_000  # bytes, as in the library of safetensors


class StoredTensor(NamedTuple):
    """A tensor in a file, from byte `start` on, which only `rows` reads."""

    path: Path
    start: int
    dtype: np.dtype
    shape: tuple[int, ...]

    def rows(self, start: int, stop: int) -> np.ndarray:
        """A range of the first axis; UserError for a truncated file."""
        size = math.prod(self.shape[1:])
        # Not mapped into memory, because pages of the file would then count beside the parameters.
        with self.path.open("rb") as file:
            file.seek(self.start + start * size * self.dtype.itemsize)
            content = np.fromfile(file, self.dtype, (stop - start) * size)
        if len(content) < (stop - start) * size:
            raise UserError(f"{self.path} has become shorter: download it again")
        return content.reshape(stop - start, *self.shape[1:])


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
        raise UserError(f"{file} is missing, which contains the number of heads: put it there") from error
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON ({error}): restore it") from error
    if not isinstance(config, dict):
        raise UserError(f"{file} holds a {type(config).__name__}, expected an object: restore it")
    return config


def read_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, or of all safetensors files of a folder."""
    return {name: tensor for file in weight_files(path) for name, tensor in _read_header(file).items()}


def weight_files(path: Path) -> list[Path]:
    """The safetensors file at a path, or the safetensors files of a folder; UserError for a damaged index."""
    if not path.is_dir():
        return [path]
    index = path / INDEX
    if not index.exists():
        return [path / WEIGHTS]
    try:
        names = sorted(set(files.read_json(index)["weight_map"].values()))
        if odd := [name for name in names if not _SHARD.fullmatch(name)]:
            raise ValueError(f"it names the file {odd[0]!r}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is not an index of tensors ({error}): restore it") from error
    return [path / name for name in names]


def _read_header(path: Path) -> dict[str, StoredTensor]:
    try:
        with files.opened(path) as file:
            size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
            header = file.read(length) if 8 + length <= size and length <= _LONGEST_HEADER else b""
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing: only safetensors files can be read") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): download it again") from error
    try:
        places = {name: at for name, at in files.parsed(header).items() if name != "__metadata__"}
        found = {name: _stored(path, 8 + length, at) for name, at in places.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is not a complete safetensors file (of {size:,} bytes, its header is truncated or damaged): "
            "download it again"
        ) from error
    ends = {name: 8 + length + at["data_offsets"][1] for name, at in places.items()}
    if cut := sorted((name for name, end in ends.items() if end > size), key=ends.get):
        raise UserError(
            f"{path} is not a complete safetensors file (it ends within the tensor {cut[0]}, at {size:,} of "
            f"{max(ends.values()):,} bytes): download it again"
        )
    return found


def _stored(path: Path, after_header: int, at: dict) -> StoredTensor:
    """A tensor by its entry in the header; any of several errors for a damaged entry."""
    dtype, shape, (start, end) = _DTYPES[at["dtype"]], tuple(at["shape"]), at["data_offsets"]
    if not all(isinstance(size, int) and size >= 0 for size in (*shape, start, end)):
        raise ValueError("a negative size")
    if end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError("a size that is not its shape's")
    return StoredTensor(path, after_header + start, dtype, shape)


def write_tensors(
    folder: Path, tensors: Sequence[Tensor], arrays: Iterable[tuple[str, np.ndarray]], dtype, max_shard_bytes: int
) -> None:
    """Write tensors, one at a time, to one safetensors file, or to several with an index; `arrays` in equal order."""
    dtype = np.dtype(dtype)
    shards, arrays = _shards(tensors, dtype, max_shard_bytes), iter(arrays)
    number = len(shards)
    names = [f"model-{n:05}-of-{number:05}.safetensors" for n in range(1, number + 1)] if number > 1 else [WEIGHTS]
    for name, shard in zip(names, shards):
        with (folder / name).open("wb") as file:
            file.write(_header(shard, dtype))
            for tensor, (name_of_array, array) in zip(shard, arrays):
                assert tensor.name == name_of_array, (tensor.name, name_of_array)
                array.astype(dtype, copy=False).tofile(file)
    if number > 1:
        total = sum(_bytes(tensor, dtype) for tensor in tensors)
        places = {tensor.name: name for name, shard in zip(names, shards) for tensor in shard}
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


def _header(tensors: Sequence[Tensor], dtype: np.dtype) -> bytes:
    header, start = {"__metadata__": {"format": "pt"}}, 0
    for tensor in tensors:
        end = start + _bytes(tensor, dtype)
        header[tensor.name] = {"dtype": _CODES[dtype], "shape": tensor.shape, "data_offsets": [start, end]}
        start = end
    content = json.dumps(header, separators=(",", ":")).encode()
    content += b" " * (-len(content) % 8)  # tensors begin at multiples of 8 bytes
    return len(content).to_bytes(8, "little") + content


def _bytes(tensor: Tensor, dtype: np.dtype) -> int:
    return math.prod(tensor.shape) * dtype.itemsize


def check_dtype(dtype) -> None:
    """Raise UserError unless tensors can be read and written as this type."""
    supported = (jnp.float32, jnp.bfloat16, jnp.float16)
    if dtype is None or jnp.dtype(dtype) not in map(jnp.dtype, supported):
        raise UserError(f"dtype = {dtype}: expected float32, bfloat16 or float16")
