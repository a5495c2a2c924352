"""Optional libraries, which only parts of attnlab need and its extras install."""

import importlib
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
