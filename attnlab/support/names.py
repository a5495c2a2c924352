"""Names in messages: the nearest of some, and a command as it is typed here."""

import difflib
import os
import shutil
import sys
from pathlib import Path


def nearest(name: str, names) -> str:
    """' (did you mean X?)' when one of `names` is close, else ''."""
    close = difflib.get_close_matches(str(name), list(names), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def typed(command: str) -> str:
    """A command of attnlab as it is typed in this folder, with the Python that runs now."""
    script = Path(sys.executable).with_name("attnlab")
    if not script.exists():
        return f"{sys.executable} -m attnlab {command}"
    if shutil.which("attnlab") == str(script):
        return f"attnlab {command}"
    return f"{min(str(script), os.path.relpath(script), key=len)} {command}"
