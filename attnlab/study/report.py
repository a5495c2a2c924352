"""The form of a study: its options, its rows, and its verdict.

A study is a module whose docstring begins with its claim, and which defines
  measure(options) → rows    the measurements, one dict per row of the table
  judge(rows) → Verdict      whether the claim held, with numbers
  draw(rows) → Figure        the figure; the docstring of `draw` is its caption
A study that trains on a text sets READS_TEXT = True.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from attnlab.types import Array

Advance = Callable[..., None]


def ignore(amount: int | float = 1) -> None:
    """An `advance` that reports nothing."""


class Options(NamedTuple):
    """Settings of a measurement.

    Attributes:
      fast: fewer seeds, points and steps: a minute on two cores.
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


class Interval(NamedTuple):
    """A mean over seeds, with its 95 % confidence interval (Student's t).

    Of many such intervals, from other seeds, 95 % contain the mean over all seeds.

    Attributes:
      mean: the mean.
      low, high: ends of the interval; the mean where there is one seed.
      count: number of seeds.
    """

    mean: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float] | Array) -> "Interval":
        """Compute the interval of some values, one per seed.

        Raises:
          ValueError: no values, or an array of more than one axis.
        """
        values = np.asarray(values, np.float64)
        if values.ndim != 1 or not len(values):
            raise ValueError(f"values have shape {list(values.shape)}: expected a number for each seed, at least one")
        mean, margin = mean_and_margin(values)
        margin = margin if len(values) > 1 else 0.0
        return cls(mean, mean - margin, mean + margin, len(values))

    def __format__(self, spec: str) -> str:
        spec = spec or ".3f"
        ends = f" [{self.low:{spec}}, {self.high:{spec}}]" if self.count > 1 else " (one seed)"
        return f"{self.mean:{spec}}{ends}"

    def __str__(self) -> str:
        return format(self, "")


def mean_and_margin(
    values: Sequence[float] | np.ndarray, level: float = 0.05, resolution: float = 0.0
) -> tuple[float, float]:
    """Mean, and half the width of its interval, which misses it with probability `level`, by Student's t.

    NaN for fewer than two values. Their deviation counts as at least the rounding's to multiples of `resolution`.
    """
    values, count = np.asarray(values, np.float64), len(values)
    if count < 2:
        return float(values.mean()) if count else math.nan, math.nan
    deviation = max(values.std(ddof=1), resolution / 12**0.5)
    return float(values.mean()), float(stats.t.ppf(1 - level / 2, count - 1) * deviation / count**0.5)


def table(rows: Sequence[dict], by: str, value: str) -> dict:
    """Group rows by `by`, sorted: the list of `value`s of each group."""
    grouped = {}
    for row in rows:
        grouped.setdefault(row[by], []).append(row[value])
    return dict(sorted(grouped.items()))
