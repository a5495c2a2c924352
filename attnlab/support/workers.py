"""Run Python modules as parallel processes that end together.

python -m attnlab.support.workers MODULE …    # started by `run`: stops the module when its parent is gone
"""

import contextlib
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from attnlab.support import hugepages

POLL = 0.1  # seconds
PARENT_POLL = 1.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)
TOLD = "attnlab has ended: "  # begins a line in which a module reports that part of its work has ended
WARNING = re.compile(r"^jaxlib |(Runtime|User)Warning: ")  # log lines about wrong or doubtful numbers


class Ended(NamedTuple):
    """How a process ended; `error` is the last line that it printed if it failed, else "".

    If `part` is not "", only that part of its work, reported by `tell`, has ended, and the process itself may go on.
    """

    name: str
    error: str
    part: str = ""


def tell(part: str, error: str = "") -> None:
    """Report, from a module that `run` runs, that part of the work has ended, with an error if it failed."""
    print(f"{TOLD}{json.dumps([part, error])}", flush=True)


class Interrupted(BaseException):
    """Raised for a signal to this process; the only argument is the signal's number."""


@contextlib.contextmanager
def lost_signals_sent_again() -> Iterator[None]:
    """Context that sends a signal again if its exception was lost.

    Python ignores an exception that a signal handler raises inside a garbage collection callback (JAX installs one) or
    inside `__del__`: it prints the exception and continues.
    """
    previous, entered = sys.unraisablehook, True

    def hook(lost) -> None:
        if entered and isinstance(lost.exc_value, Interrupted | KeyboardInterrupt):
            number = lost.exc_value.args[0] if isinstance(lost.exc_value, Interrupted) else signal.SIGINT
            threading.Timer(POLL, os.kill, (os.getpid(), number)).start()  # after the callback has returned
        else:
            previous(lost)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        entered = False
        if sys.unraisablehook is hook:  # otherwise a hook that was set later stays, and calls this one
            sys.unraisablehook = previous


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Context of a command in which SIGINT and SIGTERM raise `Interrupted` in the main thread."""

    def interrupt(number, _):
        raise Interrupted(number)

    is_main = threading.current_thread() is threading.main_thread()  # only the main thread may handle signals
    before = {number: signal.signal(number, interrupt) for number in SIGNALS} if is_main else {}
    try:
        with lost_signals_sent_again():
            yield
    except Interrupted:
        print("stopped: the same command resumes from there", file=sys.stderr)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(
    modules: Mapping[str, Sequence[str]],  # by name, the words after `python -m`
    jobs: int,
    logs: Path,  # the output of a process is appended to logs/NAME.txt
    lock: int,  # a file descriptor that each process holds open
    started: Callable[[str], None] = lambda name: None,  # called with the name of each started process
) -> Iterator[Ended]:
    """Run modules as processes, `jobs` at a time, and yield how they end, and the parts that they report by `tell`.

    All processes stop if the caller is interrupted. Each warning in their logs is printed once.
    """
    logs.mkdir(parents=True, exist_ok=True)
    waiting, running, warned, read = dict(modules), {}, set(), {}
    try:
        while waiting or running:
            for name in list(waiting)[: jobs - len(running)]:
                log = logs / f"{name}.txt"
                size = log.stat().st_size if log.exists() else 0
                running[name] = _start(waiting.pop(name), log, lock), log, size
                started(name)
            done = [name for name, (process, *_) in running.items() if process.poll() is not None]
            for name, (_, log, size) in running.items():
                parts, read[name] = _parts(log, read.get(name, size))
                yield from (Ended(name, error, part) for part, error in parts)
            for name in done:
                process, log, size = running.pop(name)
                lines = _printed(log, size)
                warnings = [line for line in dict.fromkeys(lines) if WARNING.search(line) and line not in warned]
                warned.update(warnings)
                print(end="".join(f"{line}\n" for line in warnings), file=sys.stderr)
                yield Ended(name, _error(process.returncode, lines))
            time.sleep(POLL)
    except BaseException as error:  # a signal, or anything else that ends the caller
        number = error.args[0] if isinstance(error, Interrupted) else signal.SIGTERM
        _stop([process for process, *_ in running.values()], number)
        raise


def _start(words: Sequence[str], log: Path, lock: int) -> subprocess.Popen:
    """Start a module in a new session, so that Ctrl-C reaches it only through `_stop`."""
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "attnlab.support.workers", *words],  # -P: imports nothing from "."
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=[lock],
            env=hugepages.environment(dict(os.environ)) | {"PYTHONUNBUFFERED": "1"},
        )


def _stop(running: list[subprocess.Popen], number: int) -> None:
    """Pass on a signal and wait until all processes have saved their state; pass on a second signal as well."""
    while any(process.poll() is None for process in running):
        with contextlib.suppress(Interrupted):
            for process in running:
                process.send_signal(number)  # does nothing if the process has ended
            while any(process.poll() is None for process in running):
                time.sleep(POLL)


def _parts(log: Path, position: int) -> tuple[list[list[str]], int]:
    """The parts and errors that a module reported after a position in its log, and the position after them."""
    with log.open("rb") as file:
        file.seek(position)
        whole = file.read().rpartition(b"\n")[0]  # without a line that is still being written
    reports = []
    for line in whole.decode(errors="replace").split("\n"):
        if line.startswith(TOLD):
            with contextlib.suppress(ValueError):  # not printed by `tell`
                reports.append(json.loads(line.removeprefix(TOLD)))
    return reports, position + len(whole) + bool(whole)


def _printed(log: Path, size: int) -> list[str]:
    """The lines that a process has added to a log since it had this size."""
    with log.open("rb") as file:
        file.seek(size)
        return [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]


def _error(code: int, lines: Sequence[str]) -> str:
    """The last line that a failed process printed; "" if it did not fail."""
    if code == 0:
        return ""
    # JAX ends a traceback with a remark about removed frames.
    lines = [line for line in lines if not line.startswith(("For simplicity, JAX has removed", "-----", TOLD))]
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
