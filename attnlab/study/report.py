"""The form of a study: its options, its rows, and its verdict.

A study is a module whose docstring begins with its claim, and which defines
  measure(options) → rows    the measurements, one dict per row of the table
  judge(rows) → Verdict      whether the claim held, with numbers
  draw(rows) → Figure        the figure; the docstring of `draw` is its caption
A study that trains on a text sets READS_TEXT = True.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

Advance = Callable[..., None]


def ignore(amount: int | float = 1) -> None:
    """An `advance` that reports nothing."""


class Options(NamedTuple):
    """Settings of a measurement.

    Attributes:
      fast: use fewer seeds, points and steps, for about a minute on two cores.
      path: a text for the studies that train on one; "" for the Python language reference, which needs no download.
      progress: called once as `progress(total)` with the units of work ahead; returns `advance(amount=1)`, to be called
        as units are completed.
    """

    fast: bool = False
    path: str = ""
    progress: Callable[[float], Advance] = lambda total: ignore


class Verdict(NamedTuple):
    """Whether a claim held.

    Attributes:
      held: whether every part held.
      parts: for each part of the claim, whether it held, and the measurement in words.
    """

    held: bool
    parts: tuple[tuple[bool, str], ...]

    @classmethod
    def of(cls, *parts: tuple[bool | np.bool_, str]) -> "Verdict":
        """Build a verdict from its parts."""
        parts = tuple((bool(held), text) for held, text in parts)
        return cls(all(held for held, _ in parts), parts)

    def title(self, finding: str) -> str:
        """A figure title: the finding if the claim held, else the first part that failed."""
        failed = next((text for held, text in self.parts if not held), None)
        return finding if failed is None else f"Not as claimed: {failed}"

    def __str__(self):
        lines = [f"  {'held' if held else 'failed':<8}{text}" for held, text in self.parts]
        return "\n".join([f"the claim {'holds' if self.held else 'does not hold'}", *lines])


def table(rows: Sequence[dict], by: str, value: str) -> dict:
    """Group rows by `by`, sorted, and return the list of `value`s of each group."""
    grouped = {}
    for row in rows:
        grouped.setdefault(row[by], []).append(row[value])
    return dict(sorted(grouped.items()))
