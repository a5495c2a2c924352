"""Names in messages: the nearest valid name, and a command as the user would type it."""

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
    """Return an attnlab command as one would type it in this folder, for the running Python."""
    script = Path(sys.executable).with_name("attnlab")
    if not script.exists():
        return f"{sys.executable} -m attnlab {command}"
    if shutil.which("attnlab") == str(script):
        return f"attnlab {command}"
    return f"{min(str(script), os.path.relpath(script), key=len)} {command}"
