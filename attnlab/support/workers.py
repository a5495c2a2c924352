"""Python modules that run as processes side by side and end together.

python -m attnlab.support.workers MODULE …    # what `run` starts: a module that is stopped when its parent is gone
"""

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

POLL = 0.1  # seconds
PARENT_POLL = 1.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Ended(NamedTuple):
    """How a process ended; `error` is the last line that it printed if it failed, else ""."""

    name: str
    error: str


class Interrupted(BaseException):
    """A signal to this process; its only argument is the signal's number."""


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Context of a command in whose main thread SIGINT and SIGTERM raise `Interrupted`."""

    def interrupt(number, _):
        raise Interrupted(number)

    try:
        with _handled_by(interrupt):
            yield
    except Interrupted:
        print("stopped: the same command goes on from there", file=sys.stderr)
        raise


@contextlib.contextmanager
def _deferred() -> Iterator[None]:
    """Context after which its signals arrive, because an interrupted start of a process leaves it behind."""
    caught = []
    with _handled_by(lambda number, _: caught.append(number)):
        yield
    for number in caught:
        signal.raise_signal(number)


@contextlib.contextmanager
def _handled_by(handler: Callable) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def run(
    modules: Mapping[str, Sequence[str]],  # by name, the words after `python -m`
    jobs: int,
    logs: Path,  # what a process prints is appended to logs/NAME.txt
    lock: int,  # a file descriptor that each process holds open
    started: Callable[[str], None] = lambda name: None,  # called with the name of each process that is started
) -> Iterator[Ended]:
    """Run modules as processes, so many at a time, and yield how they end; all stop where the caller is interrupted."""
    logs.mkdir(parents=True, exist_ok=True)
    waiting, running = dict(modules), {}
    try:
        while waiting or running:
            for name in list(waiting)[: jobs - len(running)]:
                with _deferred():
                    running[name] = _Process(waiting.pop(name), logs / f"{name}.txt", lock)
                started(name)
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
    """A process in a new session, so that a Ctrl-C reaches it through `_stop` alone."""

    def __init__(self, words: Sequence[str], log: Path, lock: int):
        self._log, self._offset = log, log.stat().st_size if log.exists() else 0
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "attnlab.support.workers", *words],  # -P: imports nothing from "."
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[lock],
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
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
        # JAX ends a traceback with a remark on it.
        lines = [line for line in lines if not line.startswith(("For simplicity, JAX has removed", "-----"))]
        said = lines[-1].strip().removeprefix("error: ") if lines else "it printed nothing"
        return said if code > 0 else f"killed by signal {-code}: {said}"


def _stop_with(parent: int) -> None:
    """Send this process a SIGTERM as soon as `parent` is no longer its parent."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_stop_with, args=(os.getppid(),), name="attnlab-parent", daemon=True).start()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
