"""Layers as JSON, in `config.json`: kinds and options by name, masks and score mods by class and fields.

An array is named by its sha256, and its bytes stand in a file beside it. Code is named, and never run: it is found
where this process has imported it. Where it has not, an `Absent` part takes its place, and says so when it is used.
"""

import dataclasses
import functools
import hashlib
import inspect
import json
import sys
import weakref
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
_WRITTEN = weakref.WeakValueDictionary()  # functions by the records of them that this process has written


@dataclasses.dataclass(frozen=True)
class Absent(Mask, ScoreMod):
    """In place of a mask or a score mod whose code this process has not."""

    record: str  # JSON
    STATIC = ("record",)

    def missing(self, *_):
        """Raise UserError."""
        name, file = next(((each["name"], each["file"]) for each in code_in(json.loads(self.record))), ("code", ""))
        where = f"import {file}, " if file and "<" not in name else ""
        raise UserError(f"the run's layers have {name}, which this process has not: {where}or pass it again in Python")

    visible = bounds = check = apply = missing


def of_layer(layer: LayerConfig) -> dict[str, Any]:
    """The record of a layer: its kind, options, mask and score mods; UserError for a value that JSON cannot hold.

    >>> record = of_layer(KINDS["local"](window=8, mask=masks.PrefixLM(4)))
    >>> record["kind"], record["window"], record["mask"]
    ('local', 8, {'class': 'PrefixLM', 'length': 4})
    """
    found, default = {"kind": layer.kind}, type(layer)()
    for field in dataclasses.fields(layer):
        value = getattr(layer, field.name)
        if is_recorded(field) or value is not getattr(default, field.name):
            try:
                found[field.name] = dataclasses.asdict(value) if _is_group(field, value) else of_value(value)
            except TypeError as error:
                raise UserError(f"{layer.kind}.{field.name} has {error}, which config.json cannot hold") from None
    return found


def layer_of(record: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> LayerConfig:
    """The layer of a record; `arrays` as from `arrays_of`."""
    kind, values = KINDS[record["kind"]], {name: value for name, value in record.items() if name != "kind"}
    for field in (field for field in dataclasses.fields(kind) if field.name in values):
        value = values[field.name]
        values[field.name] = field.type(**value) if _is_group(field, value) else value_of(value, arrays)
    return kind(**values)


def of_value(value) -> Any:
    """A value as JSON has it; TypeError with its type for one that cannot be."""
    if isinstance(value, Absent):
        return json.loads(value.record)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):  # whose type counts in products
        return of_value(np.asarray(value)) | {"scalar": True}
    if isinstance(value, tuple):
        return list(map(of_value, value))
    if isinstance(value, jax.Array | np.ndarray) and not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return {"array": _sha256(value), "dtype": str(value.dtype), "shape": list(value.shape)}
    if isinstance(value, Mask | ScoreMod):
        name, fields = type(value).__name__, dataclasses.fields(value)
        record = {"class": name if _BUILT_IN.get(name) is type(value) else named(type(value))}
        record |= {field.name: of_value(getattr(value, field.name)) for field in fields}
        if isinstance(value, Function):
            record["fn"]["function"]["version"] = _version(value)
            _WRITTEN[json.dumps(record["fn"])] = value.fn
        return record
    if inspect.isfunction(value):
        return {"function": named(value)}
    raise TypeError(f"a {type(value).__name__}")


def value_of(record, arrays: Mapping[str, np.ndarray]) -> Any:
    """The value of a record; ValueError for an array that is missing or another one."""
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
    """The functions and classes of users in a record: name, module, and file, which is "" for none."""
    if isinstance(record, list | dict):
        for key, each in record.items() if isinstance(record, dict) else enumerate(record):
            if key in _CODE and "module" in each:
                yield each
            else:
                yield from code_in(each)


def code_of(layer: LayerConfig) -> list[Callable]:
    """The functions and classes of a user in a layer's mask and score mods; UserError for an absent one."""
    found = {}
    for each in code_in(of_layer(layer)):
        if (code := _found(each)) is None:
            Absent(json.dumps({"class": each})).missing()
        found[each["name"]] = code
    return list(found.values())


def arrays_of(value) -> dict[str, np.ndarray]:
    """The bytes of all arrays in layers, masks and score mods, by sha256."""
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return {_sha256(value): np.frombuffer(np.asarray(value).tobytes(), np.uint8)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = tuple(getattr(value, field.name) for field in dataclasses.fields(value))
    parts = map(arrays_of, value) if isinstance(value, tuple) else ()
    return functools.reduce(lambda found, more: found | more, parts, {})


def same(a, b) -> bool:
    """Whether two values have one record, whatever their functions compute, of which a run saves the version."""
    try:
        return a is b or _without_versions(of_value(a)) == _without_versions(of_value(b))
    except TypeError:
        return a == b


def _without_versions(record):
    if isinstance(record, list):
        return list(map(_without_versions, record))
    if not isinstance(record, dict):
        return record
    return {name: _without_versions(x) for name, x in record.items() if name != "version" or "module" not in record}


def _array_of(record: Mapping, arrays: Mapping[str, np.ndarray]) -> np.ndarray | np.generic:
    if (name := record["array"]) not in arrays:
        raise ValueError(f"the array {name[:12]}… is missing")
    array = np.frombuffer(arrays[name].tobytes(), jnp.dtype(record["dtype"])).reshape(record["shape"])
    if _sha256(array) != name:
        raise ValueError(f"the array {name[:12]}… is another one")
    return array[()] if "scalar" in record else array


def _sha256(array) -> str:
    return hashlib.sha256(np.asarray(array).tobytes()).hexdigest()


def _is_group(field: dataclasses.Field, value) -> bool:
    """Whether a value is a group of options, or the record of one."""
    return is_recorded(field) and "option" not in field.metadata and value is not None


def _version(value: Function) -> str:
    """Twelve digits of what a function of a mask or score mod computes."""
    scores = (jax.ShapeDtypeStruct((), jnp.float32),) if isinstance(value, ScoreFn) else ()
    digest, index = Digest(), jax.ShapeDtypeStruct((), jnp.int32)
    digest.add(value.fn, *scores, *[index] * 4, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in value.arrays))
    return digest.hexdigest()[:12]


def named(code: Callable) -> dict[str, str]:
    """Where code is: its name, its module, and the module's file."""
    file = getattr(sys.modules.get(code.__module__), "__file__", None) or ""
    return {"name": code.__qualname__, "module": code.__module__, "file": file}


def _found(code: Mapping[str, str]) -> Callable | None:
    """A function, or a class of masks or score mods, of this process; None where it has none of this name."""
    if (written := _WRITTEN.get(json.dumps({"function": code}))) is not None:
        return written
    of_file = (each for each in list(sys.modules.values()) if code["file"] == (getattr(each, "__file__", None) or 0))
    for module in (sys.modules.get(code["module"]), *of_file):
        with_name = module
        for name in code["name"].split("."):
            with_name = getattr(with_name, name, None)
        if inspect.isfunction(with_name) or (inspect.isclass(with_name) and issubclass(with_name, Mask | ScoreMod)):
            return with_name
    return None
