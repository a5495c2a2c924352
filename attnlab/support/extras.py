"""Libraries that only parts of attnlab need, and that its extras install."""

import importlib
from types import ModuleType

from attnlab.support.errors import UserError


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """Import a library that an extra of attnlab installs.

    Args:
      module: as in an import statement: "matplotlib.pyplot".
      extra: its name: "plots".
      purpose: what needs the library, the subject of the error's sentence: "a figure".

    Raises:
      UserError: it is not installed, or a module that it needs.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or module).partition(".")[0]
        raise UserError(f"{purpose} needs {missing}: pip install 'attnlab[{extra}]'") from error
