"""Reading files that may come from elsewhere: a device or a pipe, which may never end, is refused."""

import errno
import json
import os
from pathlib import Path
from typing import Any, BinaryIO


def opened(path: str | Path) -> BinaryIO:
    """Open a file for reading; OSError where it cannot be read, or is no regular file."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(path, "rb")


def read(path: str | Path) -> bytes:
    """The content of a file; raises as `opened` does."""
    with opened(path) as file:
        return file.read()


def read_text(path: str | Path) -> str:
    """The UTF-8 text of a file without its byte order mark, any line end as a new line; or UnicodeDecodeError."""
    return read(path).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: str | Path) -> Any:
    """The content of a JSON file; raises as `opened` does, and ValueError."""
    return parsed(read(path))


def parsed(content: str | bytes) -> Any:
    """The value of a JSON text; ValueError for any other text, and for one of more levels than Python's stack."""
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error
