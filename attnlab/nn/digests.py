"""A sha256 of code: of all that a user's layer, mask or score mod computes with, by the values that it has now.

Of functions and classes of the user it takes the definitions, without comments and docstrings, and what they reach:
globals, closures, defaults, attributes and bases. Of a library's it takes the names. So it is the same for the
same code in a file, in the cells of a notebook, and in a copy.
"""

import ast
import dataclasses
import dis
import enum
import functools
import hashlib
import inspect
import linecache
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, EllipsisType, FunctionType, MethodType, ModuleType, NoneType, SimpleNamespace

import flax.linen as nn
import jax
import numpy as np

from attnlab.support.errors import UserError

_LITERALS = (NoneType, bool, int, float, complex, str, bytes, EllipsisType)
_ARRAYS = (np.ndarray, np.generic, jax.Array)
_METHODS = (FunctionType, MethodType, staticmethod, classmethod, property, functools.partial)
_FOLDERS = "|".join(re.escape(str(each)) for each in (Path(__file__).parents[1], sysconfig.get_paths()["stdlib"]))
_LIBRARIES = re.compile(rf"({_FOLDERS})[/\\]|.*[/\\](site|dist)-packages|<frozen ")


def digest(value) -> str:
    """The sha256 of the code of a function, a class or a value.

    >>> digest(lambda x: 2 * x) == digest(lambda x: 2 * x), digest(lambda x: 2 * x) == digest(lambda x: 3 * x)
    (True, False)
    """
    try:
        return hashlib.sha256(_Reader().read(value).encode()).hexdigest()
    except Exception as error:  # of any object that it reaches
        name, why = getattr(value, "__name__", type(value).__name__), next(iter(str(error).splitlines()), "")
        raise UserError(
            f"{name} computes with a value that has no digest ({type(error).__name__}: {why}): keep it out of globals, "
            "closures and attributes"
        ) from error


def cell(file: str) -> str:
    """The text of the cell of a notebook that code has as its file; "" for a file."""
    return "" if Path(file).exists() else "".join(linecache.getlines(file))


def functions(value) -> list[FunctionType]:
    """The function that a value is or wraps, or its methods."""
    values = vars(value).values() if isinstance(value, type) else [value]
    return [inspect.unwrap(each) for each in values if callable(each) and inspect.isfunction(inspect.unwrap(each))]


class _Reader:
    """Reads values as texts, each once."""

    def __init__(self):
        self._seen = {}  # by id: their number, and the value, so that no other gets the id

    def read(self, value) -> str:
        """The text of a value."""
        if isinstance(value, _LITERALS):
            return repr(value)
        if id(value) in self._seen:
            return f"#{self._seen[id(value)][0]}"
        self._seen[id(value)] = len(self._seen), value
        if isinstance(value, jax.core.Tracer):  # which a call has left in a list
            return f"traced {value.aval}"
        if isinstance(value, SimpleNamespace):
            return self.read(vars(value))
        if isinstance(value, _ARRAYS):
            is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
            array = np.asarray(jax.random.key_data(value) if is_key else value)
            if array.dtype.hasobject:
                return f"{list(array.shape)} {self.read(array.ravel().tolist())}"
            return f"{array.dtype}{list(array.shape)} {hashlib.sha256(array.tobytes()).hexdigest()}"
        if isinstance(value, Mapping | tuple | list | set | frozenset) and _is_users_class(type(value)):
            plain = dict if isinstance(value, Mapping) else set if isinstance(value, set | frozenset) else list
            return f"{self.read(type(value))} {self.read(plain(value))}"
        if isinstance(value, Mapping):
            return f"{[(self.read(key), self.read(x)) for key, x in value.items()]}"
        if isinstance(value, tuple | list | set | frozenset):
            inner = map(self.read, value)
            return f"{type(value).__name__}{sorted(inner) if isinstance(value, set | frozenset) else list(inner)}"
        if isinstance(value, functools.partial | functools.partialmethod):
            return self.read((value.func, value.args, value.keywords))
        if isinstance(value, staticmethod | classmethod | MethodType):
            return self.read((value.__func__, getattr(value, "__self__", None)))
        if isinstance(value, property):
            return self.read((value.fget, value.fset))
        if isinstance(value, functools.cached_property):
            return self.read(value.func)
        if isinstance(value, ModuleType):
            return self._module(value)
        if isinstance(value, FunctionType):
            return self._function(value)
        return self._class(value) if isinstance(value, type) else self._object(value)

    def _module(self, module: ModuleType) -> str:
        """The name of a library's module; text and values of any other."""
        file = getattr(module, "__file__", None) or ""
        if module.__spec__ if not file else not is_users(file):
            return module.__name__
        kinds = (*_LITERALS, *_ARRAYS, FunctionType, ModuleType, type)
        values = {name: x for name, x in vars(module).items() if name[:2] != "__" and isinstance(x, kinds)}
        return f"{_shape(_tree(_text(file)))} {self.read(dict(sorted(values.items())))}"

    def _function(self, function: FunctionType) -> str:
        """Its definition and the values of its names; of a library's its name, and functions as jax.vmap wraps them."""
        code, values = function.__code__, {}
        for name, found in zip(code.co_freevars, function.__closure__ or ()):
            try:
                values[name] = found.cell_contents
            except ValueError:  # not set yet
                continue
        if not is_users(code.co_filename):
            return f"{code.co_name} {self.read(_plain(values))}"
        values |= {name: function.__globals__[name] for name in _names(code) if name in function.__globals__}
        values |= {f"import {name}": sys.modules.get(name) for name in _names(code, ("IMPORT_NAME",))}
        values["defaults"] = function.__defaults__, function.__kwdefaults__
        values["attributes"] = {name: x for name, x in vars(function).items() if name != "__wrapped__"}
        return f"{_definition(code)} {self.read(dict(sorted(values.items())))}"

    def _class(self, cls: type) -> str:
        """The names of it and its bases; where the user defined them, also definitions, methods and attributes."""
        found = []
        for base in cls.__mro__:
            if not _is_users_class(base):
                found.append(base.__qualname__)
                continue
            nodes = (node for node in ast.walk(_tree(_home(base))) if isinstance(node, ast.ClassDef))
            values = _attributes(base)
            texts = [_shape(node) for node in nodes if node.name == base.__name__]
            found.append(f"{texts} {self.read(dict(sorted(values.items())))}")
        return "\n".join(found)

    def _object(self, value) -> str:
        """Its class and fields; of a library's what it prints as, and functions, as of jax.custom_vjp."""
        cls = type(value)
        names = [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
        declared = [vars(base).get("__slots__", ()) for base in cls.__mro__]
        slots = [name for of in declared for name in ((of,) if isinstance(of, str) else of) if hasattr(value, name)]
        held = getattr(value, "__dict__", {}) | {name: getattr(value, name) for name in slots}
        fields = {name: getattr(value, name, None) for name in names} or held
        fields = {name: x for name, x in fields.items() if name[:2] != "__"}
        if not (_is_users_class(cls) or cls.__module__.startswith("attnlab.")):
            wrapped = getattr(value, "__wrapped__", None)  # as of jax.jit
            shown = np.asarray(value) if hasattr(value, "__array__") else re.sub(r" at 0x[0-9a-f]+", "", repr(value))
            public = {name: x for name, x in fields.items() if name[0] != "_"}
            fields = _plain(public) | {"wrapped": wrapped, "shown": shown}
        return f"{self.read(cls)} {self.read(fields)}"


def _plain(fields: Mapping) -> dict:
    """The literals, arrays, functions and tuples among fields of a library's object, which may hold anything."""
    kinds = (*_LITERALS, *_ARRAYS, *_METHODS, tuple)
    return {name: x for name, x in fields.items() if isinstance(x, kinds) or hasattr(x, "__wrapped__")}


def _attributes(cls: type) -> dict:
    """The attributes that a class has from its user, and not from Flax, dataclasses or enum."""
    if issubclass(cls, enum.Enum):
        return {member.name: member.value for member in cls}
    fields = vars(cls).get("__dataclass_fields__", {}).values()
    found = {f"{field.name}=": x for field in fields if (x := field.default_factory) is not dataclasses.MISSING}
    for name, value in vars(cls).items():
        value = getattr(value, "wrapped", value) if type(value).__module__.startswith("flax.") else value
        code = getattr(inspect.unwrap(getattr(value, "__func__", value)), "__code__", None)
        is_made = name[:2] == "__" and code is not None and code.co_filename == "<string>"  # by dataclasses
        is_users_function = code is not None and not is_made and is_users(code.co_filename)
        if is_users_function or not (name[:2] == "__" or (issubclass(cls, nn.Module) and hasattr(nn.Module, name))):
            found[name] = value
    return found


def is_users(file: str) -> bool:
    """Whether a file, a cell of a notebook, or what else a prompt or `exec` runs, is the user's."""
    return not _LIBRARIES.match(file) and (file[:1] == "<" or bool(_text(file)))


def _is_users_class(cls: type) -> bool:
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return is_users(file) if file else cls.__module__.partition(".")[0] not in sys.stdlib_module_names


def _home(cls: type) -> str:
    """The text of the file or cell of a class; "" for a cell without its methods."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    texts = [_text(file)] if file else [_text(function.__code__.co_filename) for function in functions(cls)]
    return next((text for text in texts if f"class {cls.__name__}" in text), "")


def _text(file: str) -> str:
    linecache.checkcache(file)
    return "".join(linecache.getlines(file))


@functools.lru_cache(256)
def _tree(text: str) -> ast.Module:
    """The tree of a text, without docstrings, and annotations of functions."""
    tree = ast.parse(text)
    for node in (each for each in ast.walk(tree) if isinstance(each, ast.arg | ast.FunctionDef | ast.AsyncFunctionDef)):
        setattr(node, "annotation" if isinstance(node, ast.arg) else "returns", None)
    for node in (each for each in ast.walk(tree) if isinstance(getattr(each, "body", None), list)):
        node.body = [each for each in node.body if not _is_docstring(each)] or [ast.Pass()]
    return tree


def _shape(node) -> str:
    """A tree as text, the same in all versions of Python: without what is empty, which they add."""
    if isinstance(node, list):
        return f"[{', '.join(map(_shape, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = (f"{name}={_shape(x)}" for name, x in ast.iter_fields(node) if x is not None and x != [])
    return f"{type(node).__name__}({', '.join(fields)})"


def _is_docstring(node) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


@functools.lru_cache(256)
def _codes(text: str) -> frozenset[tuple[str, int, bytes]]:
    """The names, first lines and instructions of all functions of a text."""
    found = _nested(compile(text, "text", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True))
    return frozenset((code.co_name, code.co_firstlineno, code.co_code) for code in found)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _nested(inner)


def _names(code: CodeType, of: tuple[str, ...] = ("LOAD_GLOBAL", "LOAD_NAME")) -> set[str]:
    """The names that instructions of a function, and of functions within it, load: by default the global names."""
    instructions = (each for inner in _nested(code) for each in dis.get_instructions(inner))
    return {each.argval for each in instructions if each.opname in of}


def _definition(code: CodeType) -> str:
    """The definition of a function; its instructions where its file has changed since, or a hook has changed it."""
    text = _text(code.co_filename)
    if (code.co_name, code.co_firstlineno, code.co_code) not in _codes(text):
        constants = [repr(each) for each in code.co_consts if not isinstance(each, CodeType)]
        return f"{[inner.co_code for inner in _nested(code)]} {code.co_names} {constants}"
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    nodes = [node for node in ast.walk(_tree(text)) if isinstance(node, kinds)]
    first = [min(each.lineno for each in (node, *getattr(node, "decorator_list", ()))) for node in nodes]
    names = [getattr(node, "name", "<lambda>") for node in nodes]
    here = [node for node, *at in zip(nodes, names, first) if at == [code.co_name, code.co_firstlineno]]
    spans, ends = set(code.co_positions()), ("lineno", "end_lineno", "col_offset", "end_col_offset")
    of_one = [node for node in here if tuple(getattr(node.body, end, None) for end in ends) in spans]
    return f"{list(map(_shape, of_one or here))}"  # of several lambdas in a line, one
