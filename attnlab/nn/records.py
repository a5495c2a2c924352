"""Layers as JSON, in `config.json`: kinds and options by name, masks and score mods by class and fields.

An array is named by its sha256; its bytes are in a file beside `config.json`. Code is only named, never run: a name
resolves if this process has imported the code; otherwise an `Absent` replaces it, which raises an error when used.
"""

import dataclasses
import functools
import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.nn.config import KINDS
from attnlab.nn.layer import LayerConfig
from attnlab.ops import mask_algebra, masks, score_mods
from attnlab.ops.elementwise import Function
from attnlab.ops.jaxprs import Digest
from attnlab.ops.mask_algebra import Mask
from attnlab.ops.score_mods import ScoreFn, ScoreMod
from attnlab.support.errors import UserError
from attnlab.support.options import is_recorded

_BUILT_IN = {
    name: each
    for module in (mask_algebra, masks, score_mods)
    for name, each in vars(module).items()
    if inspect.isclass(each) and issubclass(each, Mask | ScoreMod)
}
_CODE = ("class", "function")
_WRITTEN: dict[str, Callable] = {}  # by record: code that this process has recorded, importable or not


@dataclasses.dataclass(frozen=True)
class Absent(Mask, ScoreMod):
    """Placeholder for a mask or a score mod whose code this process does not have."""

    record: str  # JSON
    STATIC = ("record",)

    def missing(self, *_):
        """Raise UserError with the name of the missing code."""
        name, file = next(((each["name"], each["file"]) for each in code_in(json.loads(self.record))), ("code", ""))
        where = f"pass --import={file}, or " if file and "<" not in name else ""
        raise UserError(f"the run's layers use {name}, which this process lacks: {where}pass it again in Python")

    visible = bounds = check = apply = missing


def of_layer(layer: LayerConfig) -> dict[str, Any]:
    """The record of a layer: its kind, options, mask and score mods; UserError for a value that JSON cannot hold.

    >>> record = of_layer(KINDS["local"](window=8, mask=masks.PrefixLM(4)))
    >>> record["kind"], record["window"], record["mask"]
    ('local', 8, {'class': 'PrefixLM', 'length': 4})
    """
    record, default = {"kind": layer.kind}, type(layer)()
    for field in dataclasses.fields(layer):
        value = getattr(layer, field.name)
        if is_recorded(field) or value is not getattr(default, field.name):
            try:
                record[field.name] = dataclasses.asdict(value) if _is_group(field, value) else of_value(value)
            except TypeError as error:
                raise UserError(f"{layer.kind}.{field.name} has {error}, which config.json cannot hold") from None
    return record


def layer_of(record: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> LayerConfig:
    """The layer of a record; `arrays` come from `arrays_of`."""
    kind, values = KINDS[record["kind"]], {name: value for name, value in record.items() if name != "kind"}
    for field in (field for field in dataclasses.fields(kind) if field.name in values):
        value = values[field.name]
        values[field.name] = field.type(**value) if _is_group(field, value) else value_of(value, arrays)
    return kind(**values)


def of_value(value) -> Any:
    """The JSON form of a value; TypeError with the value's type if there is none."""
    if isinstance(value, Absent):
        return json.loads(value.record)
    if isinstance(value, np.generic):  # its type matters in products
        return of_value(np.asarray(value)) | {"scalar": True}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value) is tuple:
        return list(map(of_value, value))
    if isinstance(value, jax.Array | np.ndarray) and not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return {"array": _sha256(value), "dtype": str(value.dtype), "shape": list(value.shape)}
    if isinstance(value, Mask | ScoreMod):
        name, fields = type(value).__name__, [field for field in dataclasses.fields(value) if field.init]
        record = {"class": name if _is_built_in(type(value)) else _written(type(value))}
        if isinstance(value, Function):
            return record | {"fn": {"function": _written(value.fn, _version(value))}, "arrays": of_value(value.arrays)}
        return record | {field.name: of_value(getattr(value, field.name)) for field in fields}
    if inspect.isfunction(value):
        return {"function": _written(value)}
    raise TypeError(f"a {type(value).__name__}")


def value_of(record, arrays: Mapping[str, np.ndarray]) -> Any:
    """The value of a record; ValueError for an array that is missing or does not match its sha256."""
    if isinstance(record, list):
        return tuple(value_of(each, arrays) for each in record)
    if not isinstance(record, dict):
        return record
    if "array" in record and "class" not in record:
        return _array_of(record, arrays)
    if any(_found(each) is None for each in code_in(record)):
        return Absent(json.dumps(record))
    if "class" not in record:
        return _found(record["function"])
    kind, values = record["class"], {name: value_of(x, arrays) for name, x in record.items() if name != "class"}
    kind = _BUILT_IN[kind] if isinstance(kind, str) else _found(kind)
    return kind(values["fn"], *values["arrays"]) if issubclass(kind, Function) else kind(**values)


def code_in(record) -> Iterator[dict[str, str]]:
    """The user-defined functions and classes in a record: name, module, and file ("" for none)."""
    if isinstance(record, list | dict):
        for key, each in record.items() if isinstance(record, dict) else enumerate(record):
            if key in _CODE and isinstance(each, dict) and "module" in each:
                yield each
            else:
                yield from code_in(each)


def code_of(value) -> list[Callable]:
    """The user-defined functions and classes in a layer's mask and score mods; UserError for absent code."""
    if isinstance(value, Absent):
        value.missing()
    if inspect.isfunction(value):
        return [value]
    parts = value if isinstance(value, tuple) else ()
    if isinstance(value, LayerConfig | Mask | ScoreMod):
        parts = [getattr(value, field.name) for field in dataclasses.fields(value)]
    is_own = isinstance(value, Mask | ScoreMod) and not _is_built_in(type(value))
    return [type(value)] * is_own + [each for part in parts for each in code_of(part)]


def arrays_of(value) -> dict[str, np.ndarray]:
    """The bytes of all arrays in layers, masks and score mods, by sha256."""
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return {_sha256(value): np.frombuffer(np.asarray(value).tobytes(), np.uint8)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = tuple(getattr(value, field.name) for field in dataclasses.fields(value))
    parts = map(arrays_of, value) if isinstance(value, tuple) else ()
    return functools.reduce(lambda arrays, more: arrays | more, parts, {})


def same(a, b, *, by_version: bool = False) -> bool:
    """Whether two values have equal records. Code is ignored unless `by_version`, because runs compare versions."""
    try:
        return a is b or _text(of_value(a), by_version) == _text(of_value(b), by_version)
    except TypeError:
        return a == b


def _text(record, by_version: bool) -> str:
    def compared(each):
        if isinstance(each, list):
            return list(map(compared, each))
        if not isinstance(each, dict):
            return each
        if "module" in each:
            return each.get("version") if by_version else ""
        return {name: compared(x) for name, x in each.items()}

    return json.dumps(compared(record))


def _array_of(record: Mapping, arrays: Mapping[str, np.ndarray]) -> np.ndarray | np.generic:
    if (name := record["array"]) not in arrays:
        raise ValueError(f"the array {name[:12]}… is missing")
    array = np.frombuffer(arrays[name].tobytes(), jnp.dtype(record["dtype"])).reshape(record["shape"])
    if _sha256(array) != name:
        raise ValueError(f"the array {name[:12]}… has other contents")
    return array[()] if "scalar" in record else array


def _sha256(array) -> str:
    return hashlib.sha256(np.asarray(array).tobytes()).hexdigest()


def _is_group(field: dataclasses.Field, value) -> bool:
    """Whether a value is a group of options, or the record of one."""
    return is_recorded(field) and "option" not in field.metadata and value is not None


def _version(value: Function) -> str:
    """12 digits that identify what the function of a mask or score mod computes; "" if it cannot be traced alone."""
    scores = (jax.ShapeDtypeStruct((), jnp.float32),) if isinstance(value, ScoreFn) else ()
    arrays = (jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "shape") else x for x in value.arrays)
    digest, index = Digest(), jax.ShapeDtypeStruct((), jnp.int32)
    try:
        digest.add(value.fn, *scores, *[index] * 4, *arrays)
    except Exception:  # user code may raise anything; the operator reports it
        return ""
    return digest.hexdigest()[:12]


def _is_built_in(kind: type) -> bool:
    return _BUILT_IN.get(kind.__name__) is kind


def named(code: Callable) -> dict[str, str]:
    """The location of code: its name, its module, and the module's file."""
    file = getattr(sys.modules.get(code.__module__), "__file__", None) or ""
    return {"name": code.__qualname__, "module": code.__module__, "file": file}


def _written(code: Callable, version: str | None = None) -> dict[str, str]:
    """Record code so that this process finds it again."""
    record = named(code) | ({} if version is None else {"version": version})
    _WRITTEN[json.dumps(record)] = code
    return record


def _found(code: Mapping[str, str]) -> Callable | None:
    """The function, mask class or score mod class that a record names in this process; None if there is none."""
    imported, written = in_module(code), _WRITTEN.get(json.dumps(code))
    return (written or imported) if "version" in code else (imported or written)


def in_module(code: Mapping[str, str]) -> Callable | None:
    """The function or class that a record names, in the module of this name or in any module of the same file."""
    same_file = (each for each in list(sys.modules.values()) if code["file"] == (getattr(each, "__file__", None) or 0))
    for module in (sys.modules.get(code["module"]), *same_file):
        value = module
        for name in code["name"].split("."):
            value = getattr(value, name, None)
        if inspect.isfunction(value) or (inspect.isclass(value) and issubclass(value, Mask | ScoreMod)):
            return value
    return None
