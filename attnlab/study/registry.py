"""The studies: attnlab's by name, users' by file."""

import ast
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from attnlab.support import shipped
from attnlab.support.errors import UserError
from attnlab.support.names import nearest

STUDIES = tuple(shipped.files("studies"))
ALL = "all"  # in place of a name: all studies
PARTS = {"measure": "options", "judge": "rows", "draw": "rows"}


def name_of(study: str) -> str:
    """The name of a study, which its output files have: the stem of its file."""
    return Path(study).stem if is_file(study) else study


def is_file(study: str) -> bool:
    """Whether a study is named by its file."""
    return study.endswith(".py")


def check(study: str) -> None:
    """Raise UserError unless there is a study of this name, or such a file."""
    if is_file(study):
        if not Path(study).is_file():
            raise UserError(f"{study}: no such file; expected a study: a Python file with {_expected()}")
        if name_of(study) in (*STUDIES, ALL):
            raise UserError(f"{study}: {name_of(study)} is the name of one of attnlab's studies: rename the file")
    elif study not in STUDIES:
        close = nearest(study, (*STUDIES, ALL))
        raise UserError(
            f"{study!r} is not a study{close}: expected one of {', '.join(STUDIES)}, all of them by the word all, or "
            "the path of a Python file"
        )


def load(study: str) -> ModuleType:
    """Import a study.

    Args:
      study: its name, or the path of a file that defines `measure`, `judge` and `draw` as `attnlab.study.report` says.

    Raises:
      UserError: an unknown name, or a file that cannot be imported or lacks a part.
    """
    check(study)
    return _import_file(Path(study)) if is_file(study) else _documented(shipped.module("studies", study))


def _documented(study: ModuleType) -> ModuleType:
    """A study with the docstring of its file, which Python drops with -OO."""
    study.__doc__ = study.__doc__ or ast.get_docstring(ast.parse(Path(study.__file__).read_text(encoding="utf-8")))
    return study


def _import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"study_{path.stem}", path.resolve())
    study = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = study  # where dataclasses, Flax modules among them, look up annotations
    sys.path.insert(0, str(path.resolve().parent))  # its neighbours can be imported, as by `python path`
    try:
        spec.loader.exec_module(study)
    except Exception as error:
        raise UserError(blame(error, path)) from error
    if not (_documented(study).__doc__ or "").strip():
        raise UserError(f"{path} has no docstring: expected one whose first line is the claim")
    for part in PARTS:
        if not callable(getattr(study, part, None)):
            raise UserError(f"{path} has no function {part}: expected {_expected()}")
    return study


def _expected() -> str:
    return "the functions " + ", ".join(f"{part}({argument})" for part, argument in PARTS.items())


def blame(error: Exception, path: Path) -> str:
    """An error that a user's study raised, in one line, with the line of the study."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
    line = error.lineno if isinstance(error, SyntaxError) and error.lineno else lines[-1] if lines else None
    message = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    return f"{path}{f', line {line}' if line else ''}: {type(error).__name__}: {message}"


def reads_text(study: ModuleType) -> bool:
    """Whether a study trains on a text, and so takes `--path`."""
    return getattr(study, "READS_TEXT", False)


def claim(study: ModuleType) -> str:
    """The claim: the first line of a study's docstring."""
    return study.__doc__.strip().splitlines()[0]
