"""Progress of a study, with the time it still needs."""

import sys
from collections.abc import Callable

from rich.progress import BarColumn, TaskProgressColumn, TextColumn

from attnlab.support.progress import Progress

Advance = Callable[..., None]


def ignore(amount: int | float = 1) -> None:
    """An `advance` that reports nothing."""


class StudyProgress(Progress):
    """The share of the work that is done, on standard error, so that standard output holds the results alone."""

    def __init__(self, file=None, clock: Callable[[], float] | None = None):
        columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
        super().__init__(*columns, file=sys.stderr if file is None else file, transient=True, clock=clock)

    def label(self, elapsed: int | float) -> str:
        return f"{in_words(elapsed * (self.total - self.done) / self.done)} left"

    def line(self, elapsed: int | float) -> str:
        return f"{100 * self.done / self.total:.0f} % done, {self.label(elapsed)}" if self.done < self.total else ""


def in_words(seconds: int | float) -> str:
    """A duration in plain words, rounded as an estimate should be."""
    if seconds < 15:
        return "a few seconds"
    if seconds < 90:
        return f"about {round(seconds, -1):.0f} seconds"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"about {minutes} minutes"
    hours, minutes = divmod(round(minutes, -1), 60)
    return f"about {hours} hour{'s' * (hours > 1)}" + (f" {minutes} minutes" if minutes else "")
