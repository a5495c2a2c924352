"""Optional libraries: only parts of attnlab need them, and extras of attnlab install them."""

import functools
import importlib
import importlib.metadata
from types import ModuleType

from attnlab.support.errors import UserError


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """Import a library that an extra of attnlab installs.

    Args:
      module: as in an import statement: "matplotlib.pyplot".
      extra: the name of the extra: "plots".
      purpose: what needs the library, as the subject of the error message: "a figure".

    Raises:
      UserError: the library, or a module that it needs, is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or module).partition(".")[0]
        raise UserError(f"{purpose} needs {missing}: pip install 'attnlab[{extra}]'") from error


@functools.cache  # the version is read from files, and each trace of an operator asks for it
def reason_against_version(package: str, version: str, extra: str) -> str | None:
    """Why a package cannot be used: it is missing or has another version. None if it can be used.

    >>> reason_against_version("no-such-package", "1.0", "none")
    "it needs no-such-package 1.0, and it is not installed: pip install 'attnlab[none]'"
    """
    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        installed = None
    if installed == version:
        return None
    state = f"{installed} is installed" if installed else "it is not installed"
    return f"it needs {package} {version}, and {state}: pip install 'attnlab[{extra}]'"
