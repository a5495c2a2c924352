"""Parts of a model that a user wrote, named FILE.py:NAME where a config names a kind of layer.

Code runs only where the user names its file, on a command line or in a call: `register` runs it. The names in a saved
`config.json` run nothing. `admit` finds them among what is registered, or among the files that were offered for them
(`--mixer=FILE`), by the sha256 of the file.
"""

import dataclasses
import hashlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from attnlab.ops.mask_algebra import Mask
from attnlab.ops.score_mods import ScoreMod
from attnlab.support import files as contents
from attnlab.support.errors import UserError

WORD = re.compile(r"\S+\.py:\w+")


class Part(NamedTuple):
    """A registered part.

    Attributes:
      value: a class of layers, a score mod, or a mask.
      path: of its file, whose sha256 follows.
    """

    value: Any
    path: Path
    sha256: str


_PARTS: dict[str, Part] = {}
_OFFERED: dict[str, Path] = {}  # by sha256


def words_of(model) -> list[str]:
    """The names of the user's parts in a model's `mixer` and `pattern`."""
    return [word for word in dict.fromkeys([model.mixer, *model.pattern.split()]) if WORD.fullmatch(word)]


def register(part) -> str:
    """Make a part known, and return its name for `mixer` and `pattern`, "/path/to/FILE.py:NAME".

    Args:
      part: "FILE.py:NAME", whose file is run, or a class that a file defines. The value is a subclass of
        `attnlab.nn.CausalMixer` or of `attnlab.nn.MultiHeadAttention`; in a file it may also be a score mod or a mask,
        with which softmax attention is then computed.

    Raises:
      UserError: no such file or name, a file that fails, or a value of another type.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "mine.py"
    >>> _ = file.write_text("from attnlab.score_mods import SoftCap\\ncapped = SoftCap(5.0)")
    >>> GPT(10, 1, 2, 8, 6, mixer=register(f"{file}:capped")).num_layers
    1
    """
    if isinstance(part, str):
        if not WORD.fullmatch(part):
            raise UserError(f"{part!r} is not a part: expected FILE.py:NAME, without spaces")
        file, _, name = part.rpartition(":")
        path = Path(file).expanduser().absolute()
        value, digest = _loaded(path, name)
    elif not isinstance(part, type):
        raise UserError(f"{type(part).__name__}(…) is passed: pass a class, or the name of a value, 'FILE.py:NAME'")
    else:
        path, name, value = _file_of(part), part.__name__, part
        digest = _sha256(path)
    word = f"{path}:{name}"
    if " " in word:
        raise UserError(f"{word} has a space, which separates the words of a pattern: move or link the file")
    _check(value, word)
    if word in _PARTS and _PARTS[word].sha256 != digest:  # compiled programs know a part by its name
        raise UserError(f"{path} has changed since it was registered: restart Python")
    _PARTS[word] = Part(value, path, digest)
    return word


def part_of(word: str) -> Part | None:
    """The registered part of a name; None for one that is not."""
    return _PARTS.get(word)


def files() -> list[Path]:
    """The files of all registered parts."""
    return list(dict.fromkeys(part.path for part in _PARTS.values()))


def sources(model) -> dict[str, str]:
    """The sha256 of the file of each of the user's parts in a model, by name."""
    return {word: _PARTS[word].sha256 for word in words_of(model)}


def offer(file: str) -> None:
    """Let `admit` run a file, if a saved run names its content."""
    path = Path(file.partition(":")[0] if WORD.fullmatch(file) else file).expanduser().absolute()
    _OFFERED[_sha256(path)] = path


def admit(code: Mapping[str, str], where) -> None:
    """Make known the parts that a saved run names.

    Args:
      code: `sources`, as the run saved them.
      where: the run's folder.

    Raises:
      UserError: a part whose file the user has not named, or has changed.
    """
    for word, digest in code.items():
        path, _, name = word.rpartition(":")
        known = _PARTS.get(word)
        if known is None and digest in _OFFERED:
            known = Part(_loaded(_OFFERED[digest], name)[0], _OFFERED[digest], digest)
        if known is None:  # the same content in another place
            same = (p for w, p in _PARTS.items() if p.sha256 == digest and w.rpartition(":")[2] == name)
            known = next(same, None)
        if known is None:
            found = "; ".join(f"{file} has {other[:12]}" for other, file in _OFFERED.items())
            raise UserError(
                f"{where} names code, which runs only if you name its file: --mixer={path}, of sha256 {digest[:12]}"
                + (found and f" ({found})")
            )
        if known.sha256 != digest:
            raise UserError(
                f"{path} has changed since {where} began (sha256 {known.sha256[:12]}, there it was {digest[:12]}): "
                "restore it, or choose a new --workdir"
            )
        _PARTS[word] = known


def check_offered_used() -> None:
    """Raise UserError for an offered file that no run named."""
    used = {part.sha256 for part in _PARTS.values()}
    for digest, path in _OFFERED.items():
        if digest not in used:
            raise UserError(
                f"--mixer={path}: the run names no code of this content: leave it out; a new run takes "
                f"--config.model.mixer={path}:NAME"
            )


def _loaded(path: Path, name: str):
    """(The value of a name in a file that is run, the file's sha256)."""
    digest = _sha256(path)
    module = f"attnlab_own_{digest}"
    if module not in sys.modules:
        spec = importlib.util.spec_from_file_location(module, path)
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[module] = loaded  # dataclasses look their module up
        try:
            spec.loader.exec_module(loaded)
        except (Exception, SystemExit) as error:  # whatever a user's file raises
            del sys.modules[module]
            first = next(iter(str(error).splitlines()), "")
            raise UserError(f"{path} failed ({type(error).__name__}: {first})") from error
    found = vars(sys.modules[module])
    if name not in found:
        parts = ((each, value) for each, value in found.items() if _is_part(value) and not each.startswith("_"))
        names = [each for each, value in parts if not isinstance(value, type) or value.__module__ == module]
        raise UserError(f"{path} has no {name!r}: it has {', '.join(names) or 'no mixer, score mod or mask'}")
    return found[name], digest


def _file_of(part) -> Path:
    """The file that defines a class."""
    try:
        return Path(inspect.getsourcefile(part)).absolute()
    except TypeError as error:
        raise UserError(f"{part!r} is not a class of a file: write it into one, so that a run can find it") from error


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(contents.read(path)).hexdigest()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}: expected a Python file") from error


def _is_part(value) -> bool:
    from attnlab.nn.mixers.interface import CausalMixer
    from attnlab.nn.multihead import MultiHeadAttention

    is_layer = isinstance(value, type) and issubclass(value, CausalMixer | MultiHeadAttention)
    return is_layer or isinstance(value, ScoreMod | Mask)


def _check(value, word: str) -> None:
    """Raise UserError for a value that is no part, or a class that no config can make a layer of."""
    from attnlab.nn.groups import Recurrence
    from attnlab.nn.mixers.interface import CausalMixer

    if not _is_part(value):
        kind = f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"
        raise UserError(
            f"{word} is {kind}: expected a subclass of attnlab.nn.CausalMixer or attnlab.nn.MultiHeadAttention, a "
            "score mod or a mask"
        )
    if not isinstance(value, type) or not issubclass(value, CausalMixer):
        return
    for field in dataclasses.fields(value):
        if field.init and field.default is field.default_factory is dataclasses.MISSING:
            raise UserError(f"{word}: its field {field.name} has no default: give it one")
    known = {field.name for field in dataclasses.fields(Recurrence)}
    reads = value.reads
    if isinstance(reads, str) or not known.issuperset(reads):
        raise UserError(f"{word}: reads = {reads!r}: expected a set of the names {', '.join(sorted(known))}")
