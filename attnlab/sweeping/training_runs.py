"""Training runs as processes side by side in one folder, in which the same command goes on."""

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from attnlab.support import paths, workers
from attnlab.support.progress import Progress
from attnlab.sweeping.grid import Point

LOGS = "logs"


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


def train_all(
    points: Sequence[Point], finished: set[str], folder: Path, jobs: int, lock: int, clock: "Clock | None" = None
) -> dict[str, str]:
    """Train what is not finished, and print each end; the errors of the runs that failed, by name."""
    clock = clock or Clock(len(points))
    progress, failed = Progress(), {}
    if finished:
        clock.skip(len(finished))
        progress.print(f"{len(finished)} of {len(points)} runs are finished, and are kept")
    modules = {
        point.name: ["attnlab.train", *point.options, f"--workdir={folder / point.name}"]
        for point in points
        if point.name not in finished
    }
    for ended in workers.run(modules, jobs, folder / LOGS, lock):
        if ended.error:
            failed[ended.name] = ended.error
        how = f"failed: {ended.error} (see {folder / LOGS})" if ended.error else "finished"
        progress.print(f"{clock.count()}  {ended.name}  {how}{clock.left()}")
    return failed


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
