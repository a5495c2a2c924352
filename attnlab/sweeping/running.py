"""Runs as processes side by side in one folder, which end together, and of which the same command goes on."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from attnlab.support import hugepages
from attnlab.support.errors import UserError
from attnlab.sweeping.grid import Point
from attnlab.training.metrics import ProgressReporter

LOGS = "logs"
POLL = 0.1  # seconds
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Ended(NamedTuple):
    """How a process ended.

    Attributes:
      name: of its run.
      error: the last line that it printed, if it failed, else "".
    """

    name: str
    error: str


class Interrupted(BaseException):
    """A signal to this process; its only argument is the signal's number."""


def check_folder(folder: Path, mark: str) -> None:
    """Raise UserError for a folder that holds something else than what the file `mark` marks."""
    try:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"--workdir={folder} is a file: name a folder")
        if folder.exists() and not (folder / mark).exists() and any(folder.iterdir()):
            raise UserError(f"--workdir={folder} holds other files and no {Path(mark).stem}: choose a new folder")
    except OSError as error:
        raise UserError(f"--workdir={folder} cannot be read ({error.strerror}): choose another folder") from error


@contextlib.contextmanager
def claimed(folder: Path, mark: str, content: dict) -> Iterator[int]:
    """Context in which this process and its runs alone use a folder; a signal interrupts it.

    Args:
      folder: made where it is missing.
      mark: name of the file that marks it.
      content: of that file.

    Yields:
      the open file that holds the lock, for `run_all`.
    """
    lock = _lock(folder, mark)
    try:
        os.truncate(lock, 0)
        os.write(lock, (json.dumps(content, indent=1) + "\n").encode())
        with interruptible():
            yield lock
    except Interrupted:
        print("stopped: the same command goes on from there", file=sys.stderr)
        raise
    finally:
        os.close(lock)


def _lock(folder: Path, mark: str) -> int:
    try:
        (folder / LOGS).mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / mark, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UserError(f"--workdir={folder} cannot be written ({error.strerror}): choose another folder") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise UserError(
            f"--workdir={folder}: another command runs there, or runs of a killed one still save their state: wait "
            "for it"
        ) from error
    except OSError:  # a file system without locks
        pass
    return lock


def train_all(
    points: Sequence[Point], finished: set[str], folder: Path, jobs: int, lock: int, clock: "Clock | None" = None
) -> dict[str, str]:
    """Train what is not finished, and print each end; the errors of the runs that failed, by name."""
    clock = clock or Clock(len(points))
    reporter, failed = ProgressReporter(len(points)), {}
    if finished:
        clock.skip(len(finished))
        reporter.print(f"{len(finished)} of {len(points)} runs are finished, and are kept")
    words = {
        point.name: ["attnlab.sweeping.worker", *point.options, f"--workdir={folder / point.name}"]
        for point in points
        if point.name not in finished
    }
    for ended in run_all(words, jobs, folder / LOGS, lock):
        if ended.error:
            failed[ended.name] = ended.error
        how = f"failed: {ended.error} (see {folder / LOGS})" if ended.error else "finished"
        reporter.print(f"{clock.count()}  {ended.name}  {how}{clock.left()}")
    return failed


class Clock:
    """Counts runs that end, and estimates how long the others take.

    >>> clock = Clock(3)
    >>> clock.skip(1)
    >>> clock.count(), clock.left()
    ('2/3', ', 1 to go in 0 s')
    """

    def __init__(self, total: int):
        self._total, self._done, self._timed, self._start = total, 0, 0, time.monotonic()

    def skip(self, count: int) -> None:
        """Count runs that took no time."""
        self._done += count

    def count(self) -> str:
        """Count a run, as "2/3"."""
        self._done, self._timed = self._done + 1, self._timed + 1
        return f"{self._done}/{self._total}"

    def left(self) -> str:
        """How many runs are left, and for how long at the speed so far; "" where none is."""
        left = self._total - self._done
        seconds = (time.monotonic() - self._start) / self._timed * left
        told = f"{seconds / 60:.0f} min" if seconds >= 100 else f"{seconds:.0f} s"
        return f", {left} to go in {told}" if left else ""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Context in which SIGINT and SIGTERM raise `Interrupted` in the main thread."""

    def interrupt(number, _):
        raise Interrupted(number)

    before = {number: signal.signal(number, interrupt) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_all(modules: Mapping[str, Sequence[str]], jobs: int, logs: Path, keep_open: int) -> Iterator[Ended]:
    """Run `python -m` processes, so many at a time, and yield how they end; all stop where the caller is interrupted.

    Args:
      modules: the words after `python -m`, by name.
      jobs: at most so many run at a time.
      logs: an existing folder; what a process prints is appended to NAME.txt there.
      keep_open: a file descriptor that the processes hold open as well, as long as one of them lives.
    """
    waiting, running = dict(modules), {}
    try:
        while waiting or running:
            for name in list(waiting)[: jobs - len(running)]:
                running[name] = _Process(waiting.pop(name), logs / f"{name}.txt", keep_open)
            for name in [name for name, process in running.items() if process.ended()]:
                yield Ended(name, running.pop(name).error())
            time.sleep(POLL)
    except BaseException as error:  # a signal, and whatever else ends the caller
        _stop(list(running.values()), error.args[0] if isinstance(error, Interrupted) else signal.SIGTERM)
        raise


def _stop(running: list["_Process"], number: int) -> None:
    """Pass on a signal, and wait until all have saved their state; a second signal is passed on as well."""
    while any(not process.ended() for process in running):
        with contextlib.suppress(Interrupted):
            for process in running:
                process.send(number)
            while any(not process.ended() for process in running):
                time.sleep(POLL)


class _Process:
    """A process in a session of its own, so that a Ctrl-C reaches it through `_stop` alone."""

    def __init__(self, words: Sequence[str], log: Path, keep_open: int):
        self._log, self._offset = log, log.stat().st_size if log.exists() else 0
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", *words],  # -P: what lies in the current folder is not imported
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[keep_open],
                env=hugepages.environment(dict(os.environ)) | {"PYTHONUNBUFFERED": "1"},
            )

    def ended(self) -> bool:
        return self._process.poll() is not None

    def send(self, number: int) -> None:
        if not self.ended():
            self._process.send_signal(number)

    def error(self) -> str:
        code = self._process.returncode
        if code == 0:
            return ""
        with self._log.open("rb") as file:
            file.seek(self._offset)
            lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        said = lines[-1].strip().removeprefix("error: ") if lines else "it printed nothing"
        return said if code > 0 else f"killed by signal {-code}: {said}"
