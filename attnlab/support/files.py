"""Reading files that may come from elsewhere: none of them makes a command wait, or fill the memory."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

LARGEST = 1 << 30  # bytes of a file that is read whole
DEEPEST = 100  # levels of JSON, as functions of Python and of its libraries recurse over them


def opened(path: str | Path) -> BinaryIO:
    """Open a regular file for reading.

    Raises:
      OSError: it cannot be read, or is a device or a pipe, which may never end.

    >>> opened(os.devnull)
    Traceback (most recent call last):
    OSError: [Errno 22] not a regular file: '/dev/null'
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait for its writer
    except ValueError as error:  # a NUL in its name
        raise OSError(errno.EINVAL, str(error), str(path)) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(descriptor, "rb")


def read(path: str | Path) -> bytes:
    """The content of a file; raises as `opened` does, also for one of more than `LARGEST` bytes."""
    with opened(path) as file:
        if os.fstat(file.fileno()).st_size > LARGEST:
            raise OSError(errno.EFBIG, f"larger than {LARGEST:,} bytes", str(path))
        return file.read()


def read_text(path: str | Path) -> str:
    """The UTF-8 text of a file, with any line end as a new line; raises as `read` does, and UnicodeDecodeError."""
    return read(path).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: str | Path) -> Any:
    """The content of a JSON file; raises as `read` does, and ValueError."""
    return parsed(read(path))


def parsed(content: str | bytes) -> Any:
    """The value of a JSON text; ValueError for any other text, and for one of more than `DEEPEST` levels.

    >>> parsed("[" * 200 + "]" * 200)
    Traceback (most recent call last):
    ValueError: its values are nested too deeply
    """
    try:
        value = json.loads(content)
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error
    level = [value]
    for _ in range(DEEPEST):
        groups = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [each for group in groups for each in group]
    if level:
        raise ValueError("its values are nested too deeply")
    return value
