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
    folder: Path,  # created if it is missing, and then removed if an error leaves it empty
    flag: str,  # the option that names the folder, for errors: "--out"
    foreign: Callable[[list[str]], str],  # maps the sorted file names to an error, such as "is not empty", or to ""
    marker: str = "",  # the file to lock, because NFS locks no folders; "" locks the folder itself
) -> Iterator[int]:
    """Context in which only this process, and children that hold the yielded lock open, use an output folder."""
    try:
        is_new = not folder.exists()
        if not is_new and not folder.is_dir():
            raise UserError(f"{flag}={folder} is a file: name a folder")
        if not is_new and (reason := foreign(sorted(os.listdir(folder)))):
            raise UserError(f"{flag}={folder} {reason}: choose a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        held = os.open(folder / marker, os.O_RDWR | os.O_CREAT if marker else os.O_RDONLY, 0o666)
    except OSError as error:
        raise UserError(f"{flag}={folder} cannot be written ({error.strerror}): choose another folder") from error
    try:
        if not lock(held):
            raise UserError(
                f"{flag}={folder}: another command is running there, or runs of a killed command are still saving: "
                "wait for them to end"
            )
        yield held
    except BaseException:
        if is_new:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
    finally:
        os.close(held)


def new_file(flag: str, name: str | Path) -> Path:
    """Return the path of a new file from a flag; raise UserError if it exists or its folder is not writable."""
    path = Path(name)
    if path.exists():
        raise UserError(f"{flag}={name} exists: give a new file")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"{flag}={name}: the folder {path.parent} is missing or not writable: name another file")
    return path


def lock(descriptor: int, *, wait: bool = False) -> bool:
    """Lock an open file; False if another process holds it. File systems without locks lock nothing."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


@contextlib.contextmanager
def named(path: str | os.PathLike) -> Iterator[None]:
    """Context that adds a file's name to OSErrors, because errors of `write`, such as a full disk, have none."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file, whole or not at all."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes, *, sync: bool = False) -> None:
    """Write a file, whole or not at all; `sync` waits until it is on the disk."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with named(path):
            with unfinished.open("wb") as file:
                file.write(content)
                file.flush()
                if sync:
                    os.fsync(file.fileno())
            os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_figure(path: Path, figure) -> None:
    """Write a matplotlib figure as PNG, whole or not at all."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=160)
    write_bytes(path, drawn.getvalue())


def write_csv(path: Path, rows: Sequence[Mapping], names: Sequence[str] = ()) -> None:
    """Write rows as CSV, with a column for each name and each key of any row; None and NaN become empty cells."""
    text, names = io.StringIO(), list(dict.fromkeys([*names, *(name for row in rows for name in row)]))
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: None if _is_nan(value) else value for name, value in row.items()})
    write_text(path, text.getvalue())


def _is_nan(value) -> bool:
    return isinstance(value, numbers.Real) and bool(value != value)
