"""User-defined kinds of layers. Only files that the user names are run.

`--import=FILE` runs a file; its layers, score mods and masks become kinds under their names. Reading a saved run
executes no code, neither what its `config.json` names nor its copy of the file: `check_imported` requires that these
kinds are imported, and a run continues only if its model has the same version (`attnlab.nn.versions`).
"""

import contextlib
import dataclasses
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from attnlab.nn import copies, records
from attnlab.nn.config import KINDS, ModelConfig
from attnlab.nn.layer import Context, Layer, LayerConfig, LayerOut
from attnlab.nn.mixers.interface import RecurrentConfig, RecurrentMixer
from attnlab.nn.multihead import AttentionConfig, MultiHeadAttention, as_tuple
from attnlab.ops.mask_algebra import Mask
from attnlab.ops.score_mods import ScoreMod
from attnlab.support.errors import UserError
from attnlab.types import Array


class Source(NamedTuple):
    """The file of a kind (or a name for its notebook cell), and the text that a run copies."""

    path: Path
    text: str


_BUILT_IN = frozenset(KINDS.values())
_RUN = "attnlab_custom_"  # prefix of the names of imported files' modules; a sha256 of path and text follows
_SOURCES: dict[str, tuple[Any, str, Path, str]] = {}  # by kind: value, its name in the text, path, text


class Inputs(NamedTuple):
    """The cache of a plain module: the newest inputs of each sequence, in order, and the number of inputs so far."""

    inputs: Float[Array, "B S F"]
    length: Int[Array, " B"]


class Plain(Layer):
    """A layer from a module that maps `[B, T, F]` to `[B, T, F]`: each decoding step runs it over the inputs so far."""

    plain: ClassVar[type[nn.Module]]

    def forward(self, x, context: Context, cache: Inputs | None = None) -> LayerOut:
        """Run the module over x or, with a cache, over the newest inputs including x, as many as the cache holds."""
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
    """Register a layer as a kind, and return its name for `layers`.

    Args:
      value: a class of layers, such as a subclass of `CausalMixer` or `MultiHeadAttention`, whose options are the
        fields that it declares by `option`; a subclass of `LayerConfig`, for more control; a `flax.linen.Module` whose
        `__call__(x)` maps `[B, T, F]` to `[B, T, F]`; or a mask, a score mod or a function `fn(score, b, h, i, j)`,
        for softmax attention that uses it.
      name: name of the kind; None for the name of the class or function.

    Raises:
      UserError: the value has another type or needs a name, its code is in no file or notebook cell, a field has no
        default, or the name is invalid, built in, or a field of `ModelConfig`.

    >>> from attnlab.score_mods import SoftCap
    >>> GPT.of(layers=register(SoftCap(5.0), "capped"), width=8, num_heads=2).config.layers[0].kind
    'capped'
    """
    if name is None and not _is_code(value):
        raise UserError(f"{type(value).__name__}(…) needs a name: register(value, name)")
    kind = name or (value.kind if _is_class(value, LayerConfig) else value.__name__)
    if not _is_code(value) or value.__name__ == "<lambda>":
        return _add(value, kind, "", Path(), "")
    return _add(value, kind, *copies.source_of(value, value.module if _is_class(value, LayerConfig) else value))


def import_file(file: str | Path) -> list[str]:
    """Run a file and return its kinds; UserError if it fails or defines no class, function, mask or score mod."""
    path = Path(file).expanduser().absolute()
    module, text = run(path), copies.text_of(path)
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    defined = {n: x for n, x in public.items() if not _is_code(x) or x.__module__ == module.__name__}
    parts = {name: value for name, value in defined.items() if _is_part(value)}
    if not parts and not any(_is_code(x) and x.__module__ == module.__name__ for x in public.values()):
        raise UserError(f"--import={file}: it defines no layer, score mod or mask")
    configs = [value for value in parts.values() if _is_class(value, LayerConfig)]
    described = {config.module for config in configs}
    return [
        _add(value, value.kind if value in configs else name, name, path, text)
        for name, value in parts.items()
        if value not in described
    ]


def is_custom(kind: str) -> bool:
    """Whether a kind is user-defined."""
    return KINDS[kind] not in _BUILT_IN


def check_used(files: Sequence[str], layers: Sequence[LayerConfig]) -> None:
    """Raise UserError for an imported file that no layer uses."""
    used = {str(_SOURCES[layer.kind][2]) for layer in layers if layer.kind in _SOURCES}
    used |= {records.named(part)["file"] for layer in layers for part in records.code_of(layer)}
    for file in files:
        if str(Path(file).expanduser().absolute()) not in used:
            kinds = ", ".join(dict.fromkeys(layer.kind for layer in layers))
            raise UserError(f"--import={file}: no layer comes from it (layers: {kinds}): set config.model.layers")


def to_load(models: Sequence[ModelConfig]) -> list[tuple[str, str]]:
    """(Path, mode for `load`) of each file with user code of the models: "import" if it defines kinds, else "run".

    Raises:
      UserError: code exists only in this process, or its name refers to something else in its file.
    """
    modes, run_files = {}, {module.__file__ for name, module in list(sys.modules.items()) if name.startswith(_RUN)}
    layers = list({layer: None for model in models for layer in model.layers})
    for layer in layers:
        if layer.kind in _SOURCES:
            name, path = layer.kind, str(_SOURCES[layer.kind][2])
            modes[path] = _checked(name, path, "import", path in run_files)
        for part in records.code_of(layer):
            place = records.named(part)
            path, is_found = place["file"], records.in_module(place) is part
            modes[path] = _checked(place["name"], path, modes.get(path, "run"), path in run_files and is_found)
    return list(modes.items())


def _checked(name: str, path: str, how: str, is_valid: bool) -> str:
    if is_valid:
        return how
    raise UserError(
        f"{name} exists only in this process, but jobs are separate processes: define it under this name in a file "
        "and pass --import=FILE (in Python, attnlab.nn.custom.import_file(FILE)), or train here, with jobs = 0"
    )


def load(code: Sequence[tuple[str, str]]) -> None:
    """Run the files that `to_load` returned, and register the kinds of files with mode "import"."""
    for path, how in code:
        import_file(path) if how == "import" else run(Path(path))


def sources(layers: Sequence[LayerConfig]) -> dict[str, Source]:
    """By name, the `Source` of each custom kind and of code in masks and score mods: the part of its file in use."""
    parts = {layer.kind: _SOURCES[layer.kind][1:] for layer in layers if layer.kind in _SOURCES}
    for part in (part for layer in layers for part in records.code_of(layer) if "<" not in part.__qualname__):
        with contextlib.suppress(UserError):  # the code has no file
            parts.setdefault(part.__qualname__, copies.source_of(part, part))
    names = {path: [name for name, file, _ in parts.values() if file == path] for _, path, _ in parts.values()}
    return {each: Source(path, text and copies.reached(text, names[path])) for each, (_, path, text) in parts.items()}


def code(model: ModelConfig) -> dict[str, Path]:
    """By name, the file of each custom kind of a model and of each function or class in its masks and score mods."""
    by_name = {layer.kind: _SOURCES[layer.kind][2] for layer in model.layers if layer.kind in _SOURCES}
    parts = (part for layer in model.layers for part in records.code_of(layer))
    return by_name | {part.__qualname__: Path(records.named(part)["file"]) for part in parts}


def layers_of(value) -> str | LayerConfig | Sequence[LayerConfig]:
    """Convert a value to kinds or configs of layers: a class is registered; a mask, a score mod or a function of
    scores gives softmax attention that uses it. UserError for anything else."""
    if isinstance(value, str | LayerConfig):
        return value
    if isinstance(value, list | tuple) and all(isinstance(each, LayerConfig) for each in value):
        return tuple(value)
    if isinstance(value, Mask | jax.Array | np.ndarray):
        return AttentionConfig(mask=value)
    mods = value if isinstance(value, tuple) and value else (value,)
    if all(_is_part(each) and not isinstance(each, type | Mask) for each in mods):
        return AttentionConfig(score_mod=value)
    if not isinstance(value, type):
        raise UserError(f"layers = {value!r}: expected kinds or configs of layers, a class, a mask or a score mod")
    return KINDS[register(value)]()


def add(layers: Sequence[LayerConfig]) -> None:
    """Register the classes of configs as kinds, unless they are kinds already."""
    for layer in layers:
        if KINDS.get(layer.kind) is not type(layer):
            register(type(layer))


def check_imported(code: Mapping[str, Mapping[str, str]], where) -> None:
    """Raise UserError unless the kinds that a saved run uses are imported.

    Args:
      code: what the run saved for each custom kind, such as its file.
      where: the run's folder.
    """
    for kind, saved in code.items():
        if kind not in _SOURCES and not saved["file"]:
            raise UserError(f"{where} uses {kind!r}, defined in Python: attnlab.nn.register it again under this name")
        if kind not in _SOURCES:
            raise UserError(
                f"{where} uses custom code, {kind!r}: pass --import={saved['file']}, or the run's copy, to run it"
            )


def _add(value, name: str, *source) -> str:
    config = _config_of(value, name)
    if not name.isidentifier() or name in {field.name for field in dataclasses.fields(ModelConfig)}:
        raise UserError(f"{name!r}: expected a name such as 'mine' that ModelConfig does not use")
    if name in KINDS and not is_custom(name):
        raise UserError(f"{name!r} is a built-in kind: choose another name")
    if name not in _SOURCES or _SOURCES[name][0] is not value:
        KINDS[name] = config  # replaces an older kind of this name, for example when a notebook's cell runs again
    _SOURCES[name] = value, *source
    return name


def _config_of(value, name: str) -> type[LayerConfig]:
    """The config class of a value's layers."""
    if _is_class(value, LayerConfig):
        return value
    if _is_class(value, nn.Module) and (missing := _without_default(value)):
        raise UserError(f"{name}: its field {missing[0]} has no default: give it one")
    if not _is_part(value):
        shown = f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"
        raise UserError(
            f"{name} is {shown}: expected a subclass of attnlab.nn.Layer or LayerConfig, a module with one input whose "
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
    """Return `module` if it is a layer; otherwise make a `Plain` layer with its fields; UserError for other values."""
    if not isinstance(module, nn.Module):
        name = getattr(module, "__name__", None)
        raise UserError(f"{module!r} is not a module: expected {f'an instance, {name}(…)' if name else 'a layer'}")
    if isinstance(module, Layer):
        return module
    fields = [field.name for field in dataclasses.fields(module) if field.init and field.name not in ("parent", "name")]
    return _layer_of(type(module))(**{name: getattr(module, name) for name in fields})


def _layer_of(module: type[nn.Module]) -> type[Layer]:
    """Return a module's class if it is a layer class; otherwise make a `Plain` subclass of it."""
    if issubclass(module, Layer):
        return module
    content = {"plain": module, "__module__": module.__module__, "__doc__": module.__doc__}
    return type(module.__name__, (Plain, module), content)


def _without_default(module: type[nn.Module]) -> list[str]:
    """The fields of a module that have no default and that a model does not set."""
    fields = (field for field in dataclasses.fields(module) if field.init and field.name != "num_heads")
    return [field.name for field in fields if field.default is field.default_factory is dataclasses.MISSING]


def run(path: Path):
    """Run a file, unless this process has run it, and return its module; UserError if it fails."""
    content = f"{path} {copies.text_of(path)}"  # with the path, because code may read other files next to it
    name = f"{_RUN}{hashlib.sha256(content.encode()).hexdigest()}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # `dataclasses` looks the module up
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:  # a user's file may raise anything
            del sys.modules[name]
            first = next(iter(str(error).splitlines()), "")
            raise UserError(f"{path} failed ({type(error).__name__}: {first})") from error
    return sys.modules[name]


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
