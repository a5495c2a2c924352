"""Processes that run side by side, and end together."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from attnlab import hugepages

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
