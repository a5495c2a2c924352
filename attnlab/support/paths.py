"""Output folders, and files that are written whole or not at all."""

import contextlib
import csv
import errno
import fcntl
import io
import numbers
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from attnlab.support.errors import UserError


@contextlib.contextmanager
def claim(
    folder: Path,  # made where it is missing, and then removed if an error leaves it empty
    flag: str,  # the option that names the folder, for errors: "--out"
    foreign: Callable[[list[str]], str],  # why the sorted names of its files are another's: "is not empty"; else ""
    marker: str = "",  # a file that holds the lock, because NFS locks no folders; the folder itself when ""
) -> Iterator[int]:
    """Context in which this process, and children that hold the yielded lock open, alone use an output folder."""
    try:
        is_new = not folder.exists()
        if not is_new and not folder.is_dir():
            raise UserError(f"{flag}={folder} is a file: name a folder")
        if not is_new and (found := foreign(sorted(os.listdir(folder)))):
            raise UserError(f"{flag}={folder} {found}: choose a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        lock = os.open(folder / marker, os.O_RDWR | os.O_CREAT if marker else os.O_RDONLY, 0o666)
    except OSError as error:
        raise UserError(f"{flag}={folder} cannot be written ({error.strerror}): choose another folder") from error
    try:
        _lock(lock, f"{flag}={folder}")
        yield lock
    except BaseException:
        if is_new:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
    finally:
        os.close(lock)


def _lock(descriptor: int, where: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(
            f"{where}: another command runs there, or runs of a killed one still save their state: wait for it"
        ) from error
    except OSError:  # a file system without locks
        pass


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file, whole or not at all."""
    unfinished = path.with_name(f".{path.name}.new")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        error.filename = error.filename or str(path)  # errors of write do not have it
        raise


def write_csv(path: Path, rows: Sequence[Mapping]) -> None:
    """Write rows as CSV, with a column for each key of any row; None and NaN become empty cells."""
    text, names = io.StringIO(), list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: None if _is_nan(value) else value for name, value in row.items()})
    write_text(path, text.getvalue())


def _is_nan(value) -> bool:
    return isinstance(value, numbers.Real) and bool(value != value)
