"""Reading the files of a folder that may come from elsewhere."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any


def read(path: str | Path) -> bytes:
    """The content of a regular file.

    Raises:
      OSError: it cannot be read, or is a device or a pipe, which may never end.

    >>> read(os.devnull)
    Traceback (most recent call last):
    OSError: [Errno 22] not a regular file: '/dev/null'
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait for its writer
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file.read()


def read_text(path: str | Path) -> str:
    """The UTF-8 text of a regular file; raises as `read` does, and UnicodeDecodeError."""
    return read(path).decode("utf-8")


def read_json(path: str | Path) -> Any:
    """The content of a JSON file; raises as `read` does, and ValueError."""
    try:
        return json.loads(read(path))
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error
