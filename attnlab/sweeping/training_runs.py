"""Training runs as concurrent processes in one folder, where the same command resumes them."""

import contextlib
import functools
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence, Set
from importlib import metadata
from pathlib import Path
from typing import Any

from absl import flags

from attnlab.support import paths, workers
from attnlab.support.errors import ArgumentError, UserError
from attnlab.sweeping import together
from attnlab.sweeping.grid import Point

LOGS = "logs"
# The fields in which runs of one program may differ.
SAME = {"seed": 0, "optimizer.learning_rate": 1.0, "optimizer.muon_learning_rate": 1.0}


def define(values) -> None:
    """Define the flags for training runs."""
    meaning = "processes at a time, 0 for this process alone; only with 1 are times comparable"
    flags.DEFINE_integer("jobs", 1, meaning, 0, flag_values=values)
    meaning = "how many runs that differ only in seed and learning rate train as one program; auto: all, on CPUs 1"
    flags.DEFINE_string("together", together.AUTO, meaning, flag_values=values)


def checked(jobs: int, together_: int | str) -> dict[str, Any]:
    """Check and return the arguments `jobs` and `together` of a `Runner`; raise ArgumentError if they are invalid."""
    if not isinstance(jobs, int) or jobs < 0:
        raise ArgumentError("jobs", jobs, "expected a number of processes, or 0 for this one")
    value = str(together_)
    if value != together.AUTO and not (value.isdecimal() and int(value)):
        raise ArgumentError("together", together_, "expected auto, or the number of runs, 1 or more")
    return {"jobs": jobs, "together": value}


def check_texts(points: Sequence[Point], ended: Set[str], folder: Path) -> None:
    """Raise UserError if an ended run, which is not trained again, had another text than its config has now."""
    from attnlab.training import text, workdir  # takes seconds

    sha256 = functools.cache(text.sha256)
    for point in points:
        if point.name in ended:
            saved = workdir.read_config(folder / point.name)["corpus"]["sha256"]
            if saved != (now := sha256(point.config.data)):
                raise UserError(
                    f"{folder / point.name} was trained on another text (sha256 {saved[:12]}…, now {now[:12]}…): "
                    "restore the text, or choose a new --workdir"
                )


def go_together(together_: int | str, jobs: int) -> bool:
    """Whether runs with the same compiled program are trained as one, in `jobs` processes (0: in this process).

    A process that starts others must not occupy the accelerator, so a separate process finds out whether there is one.
    """
    if str(together_) != together.AUTO:
        return int(together_) > 1
    if not jobs:
        return together.by_default()
    if not metadata.entry_points(group="jax_plugins") and importlib.util.find_spec("libtpu") is None:
        return False  # JAX computes on CPUs
    words = [sys.executable, "-P", "-c", f"from {together.__name__} import by_default; print(by_default())"]
    return subprocess.run(words, capture_output=True, text=True).stdout.split()[-1:] == ["True"]


@contextlib.contextmanager
def claimed(folder: Path, marker: str, content: dict) -> Iterator[int]:
    """Reserve a folder for this process and its runs, write `content` to the file `marker`, and yield the lock."""

    def foreign(names: list[str]) -> str:
        return f"holds other files and no {Path(marker).stem}" if names and marker not in names else ""

    with paths.claim(folder, "--workdir", foreign, marker) as lock, workers.interruptible():
        with paths.named(folder / marker):
            os.truncate(lock, 0)
            os.write(lock, (json.dumps(content, indent=1) + "\n").encode())
        yield lock


class Runner:
    """Trains runs, and prints how many have ended.

    Args:
      total: number of runs in all calls of `train`.
      jobs: number of concurrent processes; 0 for this process, as notebook layers or an accelerator in use require.
      together: how many runs with the same compiled program are trained at once, see `together.train_all`.
      lock: a file descriptor that each process holds open.
    """

    def __init__(self, total: int, jobs: int, together: str, lock: int):
        self.jobs, self._together, self.lock = jobs, together, lock
        self._total, self._done, self._timed, self._start = total, 0, 0, time.monotonic()
        self._print = functools.partial(print, file=sys.stdout, flush=True)  # even while runs print to logs

    def expect(self, more: int) -> None:
        """Add runs to the expected total."""
        self._total += more

    def train(self, points: Sequence[Point], finished: set[str], folder: Path) -> dict[str, str]:
        """Train the unfinished runs, and print a line when each ends; return the errors of failed runs, by name."""
        waiting, failed = {point.name: point for point in points if point.name not in finished}, {}
        if finished:
            self._done += len(finished)
            self._print(f"{len(finished)} of {len(points)} runs are already finished")

        def tell(name: str, error: str) -> None:
            failed.update({name: error} if error else {})
            del waiting[name]
            self._done, self._timed = self._done + 1, self._timed + 1
            how = f"failed: {error} (see {folder / LOGS})" if error else "finished"
            self._print(f"{self._done}/{self._total}  {name}  {how}{self._left()}")

        groups = list(_groups(list(waiting.values()), max(1, self.jobs)))
        train = self._train_in_processes if self.jobs else self._train_here
        train(groups, folder, waiting, tell)
        return failed

    def _train_here(self, groups, folder: Path, waiting, tell) -> None:
        (folder / LOGS).mkdir(parents=True, exist_ok=True)
        for group in groups:
            with (folder / LOGS / f"{group[0].name}.txt").open("a") as log, contextlib.redirect_stdout(log):
                configs = {folder / point.name: point.config for point in group}
                code = together.train_all(configs, self._together, tell, own_process=False)
            if code:
                raise workers.Interrupted(code - 128)

    def _train_in_processes(self, groups, folder: Path, waiting, tell) -> None:
        processes = {group[0].name: group for group in groups}
        while processes:
            words = {name: self._words(group, folder) for name, group in processes.items()}
            again = {}
            for ended in workers.run(words, self.jobs, folder / LOGS, self.lock):
                left = [point for point in processes[ended.name] if point.name in waiting]
                if ended.part:
                    tell(ended.part, ended.error)
                elif len(processes[ended.name]) > 1 and left:
                    self._print(f"{ended.name}: its process ended ({ended.error}): {len(left)} runs continue alone")
                    again |= {point.name: [point] for point in left}
                elif left:
                    tell(ended.name, ended.error or "its process ended before this run")
            processes = again

    def _words(self, points: Sequence[Point], folder: Path) -> list[str]:
        """Write the runs to a file, and return the words that start a process for them."""
        (folder / LOGS).mkdir(parents=True, exist_ok=True)
        file = folder / LOGS / f"{points[0].name}.runs.json"
        together.write({point.name: point.config for point in points}, file)
        return [together.__name__, self._together, str(folder), str(file)]

    def _left(self) -> str:
        """The number of runs left and the time that they will take at the speed so far; "" if none is left."""
        if not (left := self._total - self._done):
            return ""
        seconds = (time.monotonic() - self._start) / self._timed * left
        return f", {left} left, about " + (f"{seconds / 60:.0f} min" if seconds >= 100 else f"{seconds:.0f} s")


def _groups(points: Sequence[Point], jobs: int) -> Iterator[list[Point]]:
    """Group runs by program, and split each group into up to `jobs` parts."""
    programs = {}
    for point in points:
        programs.setdefault(point.config.changed(SAME), []).append(point)
    for alike in programs.values():
        yield from filter(None, (alike[part::jobs] for part in range(jobs)))
