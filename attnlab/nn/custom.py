"""Kinds of layers that a user wrote: a command runs the files that its user names, and their names resolve.

`--import=FILE` runs a file, and its layers, score mods and masks become kinds by their names. The names in a saved
`config.json` run nothing: `check_imported` finds them among the imported kinds, by the sha256 of their file.
"""

import dataclasses
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from attnlab.nn.config import KINDS
from attnlab.nn.layer import Layer, LayerConfig
from attnlab.nn.mixers.interface import RecurrentConfig, RecurrentMixer
from attnlab.nn.multihead import AttentionConfig, MultiHeadAttention
from attnlab.ops.mask_algebra import Mask
from attnlab.ops.score_mods import ScoreMod
from attnlab.support import files as contents
from attnlab.support.errors import UserError


class Source(NamedTuple):
    """The file of a kind, and its sha256."""

    path: Path
    sha256: str


_BUILT_IN = frozenset(KINDS.values())
_SOURCES: dict[str, Source] = {}  # by kind


def register(value: type[Layer] | type[LayerConfig] | ScoreMod | Mask, name: str | None = None) -> str:
    """Make a layer a kind, and return its name for `layers`.

    Args:
      value: a class of layers, such as a subclass of `CausalMixer` or `MultiHeadAttention`, whose options are the
        fields that it declares by `option`; a subclass of `LayerConfig`, which says more; a score mod or a mask, with
        which softmax attention is then computed.
      name: of the kind; the class's name for None.

    Raises:
      UserError: a value of another type, a class that no file defines, a field without a default, a name in use.

    >>> from attnlab.score_mods import SoftCap
    >>> GPT.of(layers=register(SoftCap(5.0), "capped"), width=8, num_heads=2).config.layers[0].kind
    'capped'
    """
    if isinstance(value, type):
        path = _file_of(value)
        return _add(value, name or getattr(value, "kind", None) or value.__name__, Source(path, _sha256(path)))
    if name is None:
        raise UserError(f"{type(value).__name__}(…) needs a name: register(value, name)")
    return _add(value, name, None)


def import_file(file: str | Path) -> list[str]:
    """Run a file, and return the kinds that it defines; UserError for a file that fails or has none."""
    path = Path(file).expanduser().absolute()
    digest = _sha256(path)
    found = {name: value for name, value in vars(_run(path, digest)).items() if not name.startswith("_")}
    module = f"attnlab_custom_{digest}"
    defined = {n: v for n, v in found.items() if not isinstance(v, type) or v.__module__ == module}
    parts = {name: value for name, value in defined.items() if _is_part(value)}
    if not parts:
        raise UserError(f"--import={file}: it defines no layer, score mod or mask")
    described = {value.module for value in parts.values() if _is_class(value, LayerConfig)}
    return [
        _add(value, getattr(value, "kind", "") or name if _is_class(value, LayerConfig) else name, Source(path, digest))
        for name, value in parts.items()
        if value not in described
    ]


def is_custom(kind: str) -> bool:
    """Whether a user has added a kind."""
    return KINDS[kind] not in _BUILT_IN


def check_used(files: Sequence[str], layers: Sequence[LayerConfig]) -> None:
    """Raise UserError for an imported file of which no layer is."""
    used = {str(_SOURCES[layer.kind].path) for layer in layers if layer.kind in _SOURCES}
    for file in files:
        if str(Path(file).expanduser().absolute()) not in used:
            kinds = ", ".join(dict.fromkeys(layer.kind for layer in layers))
            raise UserError(f"--import={file}: no layer is from it, as they are {kinds}: set config.model.layers")


def files() -> list[Path]:
    """The files of all custom kinds."""
    return list(dict.fromkeys(source.path for source in _SOURCES.values()))


def sources(layers: tuple[LayerConfig, ...]) -> dict[str, dict[str, str]]:
    """The file and its sha256 of each custom kind among layers, as a run saves them."""
    used = {layer.kind: _SOURCES[layer.kind] for layer in layers if layer.kind in _SOURCES}
    return {kind: {"file": str(source.path), "sha256": source.sha256} for kind, source in used.items()}


def check_imported(code: Mapping[str, Mapping[str, str]], where) -> None:
    """Raise UserError unless the kinds that a saved run uses are imported, and unchanged.

    Args:
      code: `sources`, as the run saved them.
      where: the run's folder.
    """
    for kind, saved in code.items():
        known = _SOURCES.get(kind)
        if known is None:
            raise UserError(
                f"{where} uses custom code: pass --import={saved['file']} to run it (its {kind!r}, sha256 "
                f"{saved['sha256'][:12]})"
            )
        if known.sha256 != saved["sha256"]:
            raise UserError(
                f"{known.path} has changed since {where} began (sha256 {known.sha256[:12]}, there it was "
                f"{saved['sha256'][:12]}): restore it, or choose a new --workdir"
            )


def _add(value, name: str, source: Source | None) -> str:
    config = _config_of(value, name)
    known = _SOURCES.get(name)
    if name in KINDS and (known is None or known != source):  # compiled programs know a kind by its name
        why = "is a kind of attnlab: choose another name" if known is None else "has changed: restart Python"
        raise UserError(f"{name!r} {why}")
    KINDS[name] = config
    if source is not None:
        _SOURCES[name] = source
    return name


def _config_of(value, name: str) -> type[LayerConfig]:
    """The config of the layers of a value."""
    if _is_class(value, LayerConfig):
        return value
    if not _is_part(value):
        shown = f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"
        raise UserError(
            f"{name} is {shown}: expected a subclass of attnlab.nn.Layer or LayerConfig, a score mod or a mask"
        )
    if not isinstance(value, type):
        field = "score_mod" if isinstance(value, ScoreMod) else "mask"
        content = {"kind": name, field: value, "__annotations__": {field: ClassVar[Any]}}
        return type(name, (AttentionConfig,), content | {"__doc__": f"Attention with {name}."})
    for field in dataclasses.fields(value):
        if field.init and field.default is field.default_factory is dataclasses.MISSING and field.name != "num_heads":
            raise UserError(f"{name}: its field {field.name} has no default: give it one")
    bases = {MultiHeadAttention: AttentionConfig, RecurrentMixer: RecurrentConfig, Layer: LayerConfig}
    base = next(config for layer, config in bases.items() if issubclass(value, layer))
    return type(f"{name}Config", (base,), {"kind": name, "__doc__": value.__doc__}, of=value)


def _run(path: Path, digest: str):
    """The module of a file that is run, once."""
    name = f"attnlab_custom_{digest}"
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


def _file_of(value: type) -> Path:
    """The file that defines a class."""
    try:
        return Path(inspect.getsourcefile(value)).absolute()
    except TypeError as error:
        raise UserError(f"{value!r} is not a class of a file: write it into one, so that a run can find it") from error


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(contents.read(path)).hexdigest()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: expected a Python file") from error


def _is_class(value, base) -> bool:
    return isinstance(value, type) and issubclass(value, base)


def _is_part(value) -> bool:
    return _is_class(value, Layer | LayerConfig) or isinstance(value, ScoreMod | Mask)
