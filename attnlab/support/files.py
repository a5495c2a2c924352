"""Read files that may come from elsewhere; devices and pipes are refused because they may never end."""

import errno
import json
import os
from pathlib import Path
from typing import Any, BinaryIO


def opened(path: str | Path) -> BinaryIO:
    """Open a file for reading; raise OSError if it cannot be read or is not a regular file."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(path, "rb")


def read(path: str | Path) -> bytes:
    """Return the content of a file; raise OSError as `opened` does."""
    with opened(path) as file:
        return file.read()


def read_text(path: str | Path) -> str:
    """Return a file's UTF-8 text, without byte order mark and with Unix line endings, or raise UnicodeDecodeError."""
    return read(path).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: str | Path) -> Any:
    """Return the content of a JSON file; raise OSError as `opened` does, or ValueError as `parsed` does."""
    return parsed(read(path))


def parsed(content: str | bytes) -> Any:
    """Parse a JSON text; raise ValueError if it is invalid or nested too deeply for Python's stack."""
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error
