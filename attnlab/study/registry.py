"""Load studies: attnlab's by name, user-defined studies by file."""

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
PARTS = ("measure", "judge", "draw")
FORM = "a Python file with a docstring, whose first line is the claim, and measure(options), judge(rows), draw(rows)"


def load(study: str) -> ModuleType:
    """Import a study.

    Args:
      study: its name, or the path of a file that defines `measure`, `judge` and `draw` as in `attnlab.study.report`.

    Raises:
      UserError: an unknown name, or a file that cannot be imported or lacks a part.
    """
    if study.endswith(".py"):
        return _import_file(Path(study))
    if study not in STUDIES:
        close = nearest(study, (*STUDIES, ALL))
        raise UserError(
            f"{study!r} is not a study{close}: expected one of {', '.join(STUDIES)}, the word all for all of them, "
            "or the path of a Python file"
        )
    return _documented(shipped.module("studies", study))


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(f"{path}: no such file; expected a study: {FORM}")
    spec = importlib.util.spec_from_file_location(f"study_{path.stem}", path.resolve())
    study = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look up annotations there
    sys.path.insert(0, str(path.resolve().parent))  # lets it import its neighbours, as `python path` does
    with_errors_named(str(path), lambda: spec.loader.exec_module(study))
    docstring = (_documented(study).__doc__ or "").strip()
    if not docstring or not all(callable(getattr(study, part, None)) for part in PARTS):
        raise UserError(f"{path} is not a study: expected {FORM}")
    return study


def with_errors_named(study: str, call):
    """Return `call()`; if a user-defined study fails, raise a UserError of one line that names the line at fault."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        if isinstance(error, UserError) or not study.endswith(".py"):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == Path(study).resolve()]
        place = f"{study}, line {lines[-1]}" if lines else study
        raise UserError(f"{place}: {type(error).__name__}: {' '.join(str(error).split())}") from error


def _documented(study: ModuleType) -> ModuleType:
    """Return a study with the docstring from its file, because with -OO Python drops docstrings."""
    study.__doc__ = study.__doc__ or ast.get_docstring(ast.parse(Path(study.__file__).read_text(encoding="utf-8")))
    return study


def reads_text(study: ModuleType) -> bool:
    """Whether a study trains on a text and so accepts `--path`."""
    return getattr(study, "READS_TEXT", False)


def claim(study: ModuleType) -> str:
    """Return the claim, the first line of a study's docstring."""
    return study.__doc__.strip().splitlines()[0]
