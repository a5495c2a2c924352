"""The progress of reading and tokenising: a bar on a terminal, lines elsewhere, nothing for work of a second."""

import sys
import time

from rich import progress

FIRST, EVERY = 1, 10  # seconds before the bar appears, and between two lines


class Progress:
    """Counts the bytes of a task.

    Args:
      task: what is done, such as "tokenising".
      total: bytes of all, or None if it is not known.
      quiet: print nothing.

    >>> with Progress("reading", 3_000_000) as reading:
    ...     reading.advance(3_000_000)
    """

    def __init__(self, task: str, total: int | None = None, quiet: bool = False):
        self._task, self._total, self._done, self._quiet = task, total, 0, quiet
        self._start = self._printed = time.monotonic()
        self._bar = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._bar:
            self._bar.stop()
        elif self._printed > self._start:
            self._print()

    def advance(self, count: int) -> None:
        """Count bytes that are done."""
        self._done += count
        now = time.monotonic()
        if self._quiet or now < self._start + FIRST:
            return
        if sys.stdout.isatty():
            self._bar = self._bar or self._started()
            self._bar.update(self._bar.task_ids[0], completed=self._done)
        elif now >= self._printed + EVERY:
            self._printed = now
            self._print()

    def _started(self) -> progress.Progress:
        columns = (
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
        )
        bar = progress.Progress(*columns)
        bar.add_task(self._task, total=self._total)
        bar.start()
        return bar

    def _print(self) -> None:
        of = f" of {self._total / 1e6:,.0f}" if self._total else ""
        rate = self._done / 1e6 / max(time.monotonic() - self._start, 1e-3)
        print(f"{self._task}: {self._done / 1e6:,.0f}{of} MB, {rate:.1f} MB/s", flush=True)
