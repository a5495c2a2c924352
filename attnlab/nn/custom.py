"""Kinds of layers that a user wrote: a command runs the files that its user names, and their names resolve.

`--import=FILE` runs a file, and its layers, score mods and masks become kinds by their names. The names in a saved
`config.json` run nothing, nor does the copy of the file that a run keeps: `check_imported` finds them among the
imported kinds, whose code must be the same, by `digests.digest`.
"""

import ast
import contextlib
import contextvars
import dataclasses
import hashlib
import importlib.util
import inspect
import linecache
import symtable
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from attnlab.nn.config import KINDS, ModelConfig
from attnlab.nn.digests import cell, digest, functions
from attnlab.nn.layer import Context, Layer, LayerConfig, LayerOut
from attnlab.nn.mixers.interface import RecurrentConfig, RecurrentMixer
from attnlab.nn.multihead import AttentionConfig, MultiHeadAttention, as_tuple
from attnlab.ops.mask_algebra import Mask
from attnlab.ops.score_mods import ScoreMod
from attnlab.support import files as contents
from attnlab.support.errors import UserError
from attnlab.types import Array


class Source(NamedTuple):
    """The file of a kind, or a name for its cell; the text that is copied; and the sha256 of all that it reaches."""

    path: Path
    text: str
    sha256: str


_BUILT_IN = frozenset(KINDS.values())
_TAKEN: contextvars.ContextVar[dict[int, tuple[Any, str]] | None] = contextvars.ContextVar("digests", default=None)
_SOURCES: dict[str, tuple[Any, str, Path, str]] = {}  # by kind: a value, and its name in the text of a path


class Inputs(NamedTuple):
    """The cache of a plain module: the newest inputs of each sequence, in their order, and the number of all."""

    inputs: Float[Array, "B S F"]
    length: Int[Array, " B"]


class Plain(Layer):
    """A module from `[B, T, F]` to `[B, T, F]` as a layer: each step of decoding is a pass over its inputs so far."""

    plain: ClassVar[type[nn.Module]]

    def forward(self, x, context: Context, cache: Inputs | None = None) -> LayerOut:
        """A pass of the module over x, or over the newest inputs, as many as the cache holds."""
        for name, remedy in {"mask": "pass None", "segments": "pass None, or config.data.packing=stream"}.items():
            if getattr(context, name) is not None:
                raise UserError(f"{type(self).__name__} is a plain module, which takes no {name}: {remedy}")
        new = x.shape[1]
        lengths = jnp.full(len(x), new) if context.lengths is None else context.lengths
        x = jnp.where((jnp.arange(new) < lengths[:, None])[..., None], x, 0)
        if cache is None:
            return LayerOut(self._pass(x))
        if new > (capacity := cache.inputs.shape[1]):
            raise ValueError(f"{new} tokens do not fit a cache of {capacity}: prefill only the last {capacity}")
        held = jnp.minimum(cache.length, capacity)
        start = jnp.maximum(held + lengths - capacity, 0)

        def padded(y):
            return jnp.pad(y, ((0, 0), (0, new), (0, 0)))

        update = jax.vmap(jax.lax.dynamic_update_slice_in_dim, (0, 0, 0, None))
        take = jax.vmap(jax.lax.dynamic_slice_in_dim, (0, 0, None))
        inputs = take(update(padded(cache.inputs), x.astype(cache.inputs.dtype), held, 0), start, capacity)
        out = take(padded(self._pass(inputs.astype(x.dtype))), held - start, new)
        return LayerOut(out, Inputs(inputs, cache.length + lengths))

    def init_cache(self, batch, features, capacity=0):
        dtype = getattr(self, "dtype", None) or jnp.float32
        return Inputs(jnp.zeros((batch, capacity, features), dtype), jnp.zeros(batch, jnp.int32))

    def _pass(self, x):
        call = self.plain.__call__
        options = {"deterministic": True} if "deterministic" in inspect.signature(call).parameters else {}
        return call(self, x, **options).astype(x.dtype)


def register(value: type[nn.Module] | type[LayerConfig] | ScoreMod | Mask | Callable, name: str | None = None) -> str:
    """Make a layer a kind, and return its name for `layers`.

    Args:
      value: a class of layers, such as a subclass of `CausalMixer` or `MultiHeadAttention`, whose options are the
        fields that it declares by `option`; a subclass of `LayerConfig`, which says more; a `flax.linen.Module` whose
        `__call__(x)` maps `[B, T, F]` to `[B, T, F]`; a score mod, also as a function `fn(score, b, h, i, j)`, or a
        mask, with which softmax attention is then computed.
      name: of the kind; the name of the class or function for None.

    Raises:
      UserError: a value of another type, a class of no file and without methods of a notebook's cell, a field without
        a default, a name in use.

    >>> from attnlab.score_mods import SoftCap
    >>> GPT.of(layers=register(SoftCap(5.0), "capped"), width=8, num_heads=2).config.layers[0].kind
    'capped'
    """
    if name is None and not _is_code(value):
        raise UserError(f"{type(value).__name__}(…) needs a name: register(value, name)")
    kind = name or (value.kind if _is_class(value, LayerConfig) else value.__name__)
    is_named = _is_code(value) and value.__name__ != "<lambda>"
    return _add(value, kind, *(_source_of(value) if is_named else ("", Path(), "")))


def import_file(file: str | Path) -> list[str]:
    """Run a file, and return the kinds that it defines; UserError for a file that fails or has none."""
    path = Path(file).expanduser().absolute()
    module, text = _run(path), _text(path)
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    own = {n: x for n, x in public.items() if not _is_code(x) or x.__module__ == module.__name__}
    parts = {name: value for name, value in own.items() if _is_part(value)}
    if not parts:
        raise UserError(f"--import={file}: it defines no layer, score mod or mask")
    configs = [value for value in parts.values() if _is_class(value, LayerConfig)]
    described = {config.module for config in configs}
    return [
        _add(value, value.kind if value in configs else name, name, path, text)
        for name, value in parts.items()
        if value not in described
    ]


def is_custom(kind: str) -> bool:
    """Whether a user has added a kind."""
    return KINDS[kind] not in _BUILT_IN


def check_used(files: Sequence[str], layers: Sequence[LayerConfig]) -> None:
    """Raise UserError for an imported file of which no layer is."""
    used = {str(_SOURCES[layer.kind][2]) for layer in layers if layer.kind in _SOURCES}
    for file in files:
        if str(Path(file).expanduser().absolute()) not in used:
            kinds = ", ".join(dict.fromkeys(layer.kind for layer in layers))
            raise UserError(f"--import={file}: no layer is from it, as they are {kinds}: set config.model.layers")


def files() -> list[Path]:
    """The files of all custom kinds."""
    return list(dict.fromkeys(path for _, _, path, text in _SOURCES.values() if text))


def sources(layers: Sequence[LayerConfig]) -> dict[str, Source]:
    """The sources of the custom kinds among layers, with what these reach in their files, and digests of it."""
    found = {layer.kind: _SOURCES[layer.kind] for layer in layers if layer.kind in _SOURCES}
    names = {path: [name for _, name, of, _ in found.values() if of == path] for _, _, path, _ in found.values()}
    return {
        kind: Source(path, text and reached(text, names[path]), _digest(kind))
        for kind, (_, _, path, text) in found.items()
    }


@contextlib.contextmanager
def versions_taken_once() -> Iterator[None]:
    """Context, or decorator, in which the code of each kind is read once: what calls leave in globals is no edit."""
    token = _TAKEN.set({} if _TAKEN.get() is None else _TAKEN.get())
    try:
        yield
    finally:
        _TAKEN.reset(token)


def _digest(kind: str) -> str:
    """The sha256 of the code of a kind."""
    value, taken = _SOURCES[kind][0], _TAKEN.get()
    if taken is None:
        return digest(value)
    if id(value) not in taken:
        taken[id(value)] = value, digest(value)  # the value, so that no other gets its id
    return taken[id(value)][1]


def version(layers: Sequence[LayerConfig]) -> str:
    """Six hex digits of the code of the custom kinds among layers: equal for equal code; "" where there is none."""
    code = sorted(map(_digest, {layer.kind for layer in layers} & {*_SOURCES}))
    return hashlib.sha256("".join(code).encode()).hexdigest()[:6] if code else ""


def check_imported(code: Mapping[str, Mapping[str, str]], where) -> None:
    """Raise UserError unless the kinds that a saved run uses are imported, and unchanged.

    Args:
      code: the file and the sha256 of each kind, as the run saved them.
      where: the run's folder.
    """
    for kind, saved in code.items():
        known = _SOURCES.get(kind)
        if known is None and not saved["file"]:
            raise UserError(f"{where} uses a value of Python, {kind!r}: attnlab.nn.register it again with this name")
        if known is None:
            raise UserError(
                f"{where} uses custom code, {kind!r}: pass --import={saved['file']}, or the run's copy, to run it"
            )
        if _digest(kind) != saved["sha256"]:
            raise UserError(
                f"the code of {kind!r} in {known[2]} has changed since {where} began: restore it, pass the run's "
                f"copy by --import, or choose a new --workdir"
            )


def reached(text: str, names: Sequence[str]) -> str:
    """The definitions of some names in a Python file, and of all that they reach, in their order.

    Statements below the first of them that only use it, and what is for a script alone, are no part of it.

    >>> print(reached("base, other = 2, 3\\nthird = 1\\ndef f(x):\\n    return base * x\\nprint(f(base))", ["f"]))
    base, other = 2, 3
    def f(x):
        return base * x
    """
    body = [node for node in ast.parse(text).body if not _is_of_script(node)]
    defined = {each: [node for node in body if each in _defined(node)] for node in body for each in _defined(node)}
    wanted = [name for name in names if name in defined] or list(defined)  # of a class within a function, all
    end = min((body.index(defined[name][0]) for name in wanted), default=len(body))
    found = {node.lineno: node for node in body[:end] if not _defined(node)}
    wanted += [each.id for node in found.values() for each in ast.walk(node) if isinstance(each, ast.Name)]
    while wanted:
        for node in defined.get(wanted.pop(), ()):
            if node.lineno not in found:
                found[node.lineno] = node
                wanted += [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]
    lines = text.splitlines()
    first = {
        at: min(each.lineno for each in (node, *getattr(node, "decorator_list", ()))) for at, node in found.items()
    }
    return "\n".join("\n".join(lines[first[at] - 1 : found[at].end_lineno]) for at in sorted(found))


def _is_of_script(node) -> bool:
    """Whether a statement is for a script, or a notebook, alone."""
    shown = ast.unparse(node.test if isinstance(node, ast.If) else node)
    return (isinstance(node, ast.If) and "__name__" in shown) or "get_ipython()" in shown


def _defined(node) -> set[str]:
    """The names that a statement defines, or whose values it changes; none for an import of names that it hides."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        return set() if "*" in names or getattr(node, "module", "") == "__future__" else names
    inner = (_defined(each) for each in ast.iter_child_nodes(node))
    changed = isinstance(node, ast.expr) and isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)
    return set().union(*inner, {each.id for each in ast.walk(node) if changed and isinstance(each, ast.Name)})


def _add(value, name: str, *source) -> str:
    config = _config_of(value, name)
    if not name.isidentifier() or name in {field.name for field in dataclasses.fields(ModelConfig)}:
        raise UserError(f"{name!r}: expected a name such as 'mine', and none of a field of ModelConfig")
    if name in KINDS and not is_custom(name):
        raise UserError(f"{name!r} is a kind of attnlab: choose another name")
    KINDS[name] = config  # in place of another of this name, as in a notebook's cell that runs again
    _SOURCES[name] = value, *source
    return name


def _config_of(value, name: str) -> type[LayerConfig]:
    """The config of the layers of a value."""
    if _is_class(value, LayerConfig):
        return value
    if _is_class(value, nn.Module) and (missing := _without_default(value)):
        raise UserError(f"{name}: its field {missing[0]} has no default: give it one")
    if not _is_part(value):
        shown = f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"
        raise UserError(
            f"{name} is {shown}: expected a subclass of attnlab.nn.Layer or LayerConfig, a module of one input whose "
            "fields have defaults, a score mod, a function of (score, b, h, i, j) or a mask"
        )
    if not isinstance(value, type):
        field, value = ("mask", value) if isinstance(value, Mask) else ("score_mod", as_tuple(value)[0])
        content = {field: value, "__annotations__": {field: ClassVar[Any]}, "__doc__": f"Attention with {name}."}
        return type(name, (AttentionConfig,), content, kind=name)
    value = _layer_of(value)
    bases = {MultiHeadAttention: AttentionConfig, RecurrentMixer: RecurrentConfig, Layer: LayerConfig}
    base = next(config for layer, config in bases.items() if issubclass(value, layer))
    return type(f"{name}Config", (base,), {"__doc__": value.__doc__}, of=value, kind=name)


def as_layer(module: nn.Module) -> Layer:
    """A module as a layer: itself, or a `Plain` one of the same fields; UserError for anything else."""
    if not isinstance(module, nn.Module):
        name = getattr(module, "__name__", None)
        raise UserError(f"{module!r} is no module: expected {f'one of it, {name}(…)' if name else 'a layer'}")
    if isinstance(module, Layer):
        return module
    fields = [field.name for field in dataclasses.fields(module) if field.init and field.name not in ("parent", "name")]
    return _layer_of(type(module))(**{name: getattr(module, name) for name in fields})


def _layer_of(module: type[nn.Module]) -> type[Layer]:
    """A class of layers: a module's own, or a `Plain` one."""
    if issubclass(module, Layer):
        return module
    content = {"plain": module, "__module__": module.__module__, "__doc__": module.__doc__}
    return type(module.__name__, (Plain, module), content)


def _without_default(module: type[nn.Module]) -> list[str]:
    """The fields of a module that a model cannot fill."""
    fields = (field for field in dataclasses.fields(module) if field.init and field.name != "num_heads")
    return [field.name for field in fields if field.default is field.default_factory is dataclasses.MISSING]


def _run(path: Path):
    """The module of a file that is run, once."""
    name = f"attnlab_custom_{hashlib.sha256(_text(path).encode()).hexdigest()}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:  # whatever a user's file raises
            del sys.modules[name]
            first = next(iter(str(error).splitlines()), "")
            raise UserError(f"{path} failed ({type(error).__name__}: {first})") from error
    return sys.modules[name]


def _source_of(value) -> tuple[str, Path, str]:
    """The name of a class or a function, and path and text of its file, or of its cell and what it needs of others."""
    name, top = value.__name__, value.__qualname__.partition(".")[0]  # of a function that makes it
    for function in functions(value.module if _is_class(value, LayerConfig) else value):
        text = cell(function.__code__.co_filename)
        if any(top in _defined(node) for node in ast.parse(text).body):
            return name, Path(f"{name}.py"), reached(_with_other_cells(text, function.__globals__), [name])
    try:
        path = Path(inspect.getsourcefile(sys.modules.get(value.__module__) or functions(value)[0])).absolute()
    except (TypeError, OSError, IndexError) as error:
        remedy = "write it into a file, or into a cell without %%, so that a run can find it"
        raise UserError(f"{value!r} is of no file, and no method of it of a notebook's cell: {remedy}") from error
    return name, path, _text(path)


def _with_other_cells(text: str, names: Mapping[str, Any]) -> str:
    """A cell's text behind the statements of other cells that give the names that it uses their values."""
    found, parts = {each for node in ast.parse(text).body for each in _defined(node)}, []

    def add(text: str) -> None:
        for name in sorted(_globals(symtable.symtable(text, "cell", "exec")) & {*names} - found):
            if name not in found:
                found.add(name)
                add(_definition(name, names[name]))
        parts.append(text)

    add(text)
    return "\n".join(parts)


def _globals(table: symtable.SymbolTable) -> set[str]:
    """The global names that a text refers to."""
    is_class = table.get_type() == "class"  # whose body may read a global of the name that it defines
    symbols = (each for each in table.get_symbols() if each.is_referenced() and (each.is_global() or is_class))
    return {symbol.get_name() for symbol in symbols}.union(*map(_globals, table.get_children()))


def _definition(name: str, value) -> str:
    """The statement that gives a name its value: of a function's or class' cell, or the last cell; "" for none."""
    with contextlib.suppress(ValueError, SyntaxError, MemoryError):
        return f"{name} = {ast.literal_eval(repr(value))!r}"
    own = [function.__code__.co_filename for function in functions(value)]
    for text in map(cell, [*own, *reversed(linecache.cache)]):
        with contextlib.suppress(SyntaxError):
            for node in reversed(ast.parse(text).body):
                if name in _defined(node):
                    return ast.unparse(node)
    return ""


def _text(path: Path) -> str:
    try:
        return contents.read(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {getattr(error, 'strerror', error)}: expected a Python file") from error


def _is_class(value, base) -> bool:
    return isinstance(value, type) and issubclass(value, base)


def _is_code(value) -> bool:
    return isinstance(value, type) or inspect.isfunction(value)


def _is_part(value) -> bool:
    if _is_class(value, Layer | LayerConfig) or isinstance(value, ScoreMod | Mask):
        return True
    if inspect.isfunction(value):
        return list(inspect.signature(value).parameters) == ["score", "b", "h", "i", "j"]
    return _is_class(value, nn.Module) and not _without_default(value)
