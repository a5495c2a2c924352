"""Progress of a study, with the time it still needs."""

import contextlib
import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

LINE_INTERVAL = 10.0  # seconds between plain lines, at least

Advance = Callable[..., None]


def ignore(amount: int | float = 1) -> None:
    """An `advance` that reports nothing."""


def silent(total: int | float) -> Advance:
    """Stands in for `StudyProgress.expect` where no progress is wanted."""
    return ignore


class StudyProgress:
    """A progress bar on a terminal; elsewhere plain lines, at most every ten seconds and rarer as time goes by.

    Args:
      file: where to print, standard error when None, so that standard output holds the results alone.
      clock: gives the time in seconds.

    >>> seconds = iter([0, 5, 30])
    >>> with StudyProgress(sys.stdout, clock=lambda: next(seconds)) as progress:
    ...     advance = progress.expect(total=4)
    ...     advance()  # at 5 seconds
    ...     advance()
    50 % done, about 30 seconds left
    """

    def __init__(self, file=None, clock: Callable[[], float] = time.monotonic):
        self._file = sys.stderr if file is None else file
        self._clock = clock
        console = Console(file=self._file)
        columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
        self._bar = Progress(*columns, console=console, transient=True) if console.is_terminal else None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._bar:
            self._bar.stop()

    def expect(self, total: int | float) -> Advance:
        """Announces the work ahead, in units of about the same time each.

        Args:
          total: all units.

        Returns:
          `advance(amount=1)`, to be called whenever so many units are done.
        """
        self._total, self._done = total, 0.0
        self._start = self._last_line = self._clock()
        if self._bar:
            self._task = self._bar.add_task("starting", total=total)
            self._bar.start()
        return self._advance

    def _advance(self, amount: int | float = 1) -> None:
        self._done += amount
        now = self._clock()
        elapsed = now - self._start
        left = f"{in_words(elapsed * (self._total - self._done) / self._done)} left"
        if self._bar:
            self._bar.update(self._task, completed=self._done, description=left)
        elif now - self._last_line >= max(LINE_INTERVAL, elapsed / 10) and self._done < self._total:
            self._last_line = now
            with contextlib.suppress(OSError):  # closing the output pipe does not stop a study
                print(f"{100 * self._done / self._total:.0f} % done, {left}", file=self._file, flush=True)


def in_words(seconds: int | float) -> str:
    """A duration in plain words, rounded as an estimate should be.

    >>> [in_words(seconds) for seconds in (4, 44, 130, 7700)]
    ['a few seconds', 'about 40 seconds', 'about 2 minutes', 'about 2 hours 10 minutes']
    """
    if seconds < 15:
        return "a few seconds"
    if seconds < 90:
        return f"about {round(seconds, -1):.0f} seconds"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"about {minutes} minutes"
    hours, minutes = divmod(round(minutes, -1), 60)
    return f"about {hours} hour{'s' * (hours > 1)}" + (f" {minutes} minutes" if minutes else "")
