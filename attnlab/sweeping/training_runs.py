"""Training runs as processes side by side in one folder, in which the same command goes on."""

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from absl import flags

from attnlab.support import paths, workers
from attnlab.support.errors import UserError
from attnlab.support.progress import Progress
from attnlab.sweeping import together
from attnlab.sweeping.grid import Point

LOGS = "logs"
# The fields in which runs of one program may differ.
SAME = {"seed": 0, "optimizer.learning_rate": 1.0, "optimizer.muon_learning_rate": 1.0}


def define(values) -> None:
    """Define the flags of how runs are trained."""
    flags.DEFINE_integer("jobs", 1, "processes at a time; times are comparable with 1 alone", 1, flag_values=values)
    meaning = (
        "runs that differ in seed and learning rate alone are trained so many together, as one program; auto: as many "
        "as the device holds where that is faster, which is measured, and on CPUs 1"
    )
    flags.DEFINE_string("together", together.AUTO, meaning, flag_values=values)


def checked(values) -> str:
    """The value of --together; UserError for one that is neither auto nor a number from 1."""
    if values.together == together.AUTO or (values.together.isdecimal() and int(values.together)):
        return values.together
    raise UserError(f"--together={values.together}: expected auto, or the number of runs, 1 or more")


@contextlib.contextmanager
def claimed(folder: Path, marker: str, content: dict) -> Iterator[int]:
    """Context in which this process and its runs alone use a folder, whose marker has `content`; yields the lock."""

    def foreign(names: list[str]) -> str:
        return f"holds other files and no {Path(marker).stem}" if names and marker not in names else ""

    with paths.claim(folder, "--workdir", foreign, marker) as lock, workers.interruptible():
        with paths.named(folder / marker):
            os.truncate(lock, 0)
            os.write(lock, (json.dumps(content, indent=1) + "\n").encode())
        yield lock


class Runner(NamedTuple):
    """Trains runs in processes.

    Attributes:
      jobs: processes at a time.
      together: how many runs of one program are trained as one, see `together.train_all`.
      lock: a file descriptor that each process holds open.
      clock: counts the runs.
    """

    jobs: int
    together: str
    lock: int
    clock: "Clock"

    def train(self, points: Sequence[Point], finished: set[str], folder: Path) -> dict[str, str]:
        """Train what is not finished, and print each end; the errors of the runs that failed, by name."""
        progress, failed = Progress(), {}
        if finished:
            self.clock.skip(len(finished))
            progress.print(f"{len(finished)} of {len(points)} runs are finished, and are kept")
        waiting = {point.name: point for point in points if point.name not in finished}
        processes = {group[0].name: group for group in _groups(list(waiting.values()), self.jobs)}
        while processes:
            words = {name: self._words(group, folder) for name, group in processes.items()}
            again = {}
            for ended in workers.run(words, self.jobs, folder / LOGS, self.lock):
                group = processes[ended.name]
                left = [point for point in group if point.name in waiting]
                if not ended.part and len(group) > 1 and left:
                    print(f"{ended.name}: its process ended ({ended.error}): {len(left)} runs go on alone", flush=True)
                    again |= {point.name: [point] for point in left}
                elif ended.part or left:
                    name, error = ended.part or ended.name, ended.error
                    error = error if ended.part else error or "its process ended before it"
                    failed |= {name: error} if error else {}
                    del waiting[name]
                    how = f"failed: {error} (see {folder / LOGS / ended.name}.txt)" if error else "finished"
                    progress.print(f"{self.clock.count()}  {name}  {how}{self.clock.left()}")
            processes = again
        return failed

    def _words(self, points: Sequence[Point], folder: Path) -> list[str]:
        described = json.dumps({point.name: point.options for point in points})
        return [together.__name__, self.together, str(folder), described]


def _groups(points: Sequence[Point], jobs: int) -> Iterator[list[Point]]:
    """Runs of one program, in up to `jobs` parts."""
    programs = {}
    for point in points:
        programs.setdefault(repr(point.config.changed(SAME)), []).append(point)
    for alike in programs.values():
        yield from filter(None, (alike[part::jobs] for part in range(jobs)))


class Clock:
    """Counts runs that end, and estimates how long the others take."""

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
