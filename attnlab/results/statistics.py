"""Means over seeds, their intervals, and differences: is one variant better than another, and can these seeds show it?

Differences between two variants are taken seed by seed, because runs of one seed share their initial key and the order
of the data. They are tested with a two-sided Student's t. The intervals of a table's differences are simultaneous
(Bonferroni): with probability 95 %, each contains its true difference. A verdict needs an interval that excludes 0.
"""

import bisect
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import optimize, stats

from attnlab.types import Array

LEVEL = 0.05  # the highest probability of a false verdict in a table
POWER = 0.8  # the probability with which a detectable difference is detected
MOST_SEEDS = 1000
OPEN = "not told apart"  # the verdict in files; `in_words` has the words to show


class Interval(NamedTuple):
    """A mean over seeds, with its 95 % confidence interval (Student's t).

    Over many repetitions with other seeds, 95 % of such intervals contain the mean over all seeds.

    Attributes:
      mean: the mean.
      low, high: ends of the interval; the mean if there is only one seed.
      count: number of seeds.

    >>> f"{Interval.of([1.0, 2.0, 3.0]):.1f}"
    '2.0 [−0.5, 4.5]'
    """

    mean: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float] | Array) -> "Interval":
        """Compute the interval of values, one per seed.

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
        return f"{self.mean:{spec}}{ends}".replace("-", "−")

    def __str__(self) -> str:
        return format(self, "")


def mean_and_margin(
    values: Sequence[float] | np.ndarray, level: float = LEVEL, resolution: float = 0.0
) -> tuple[float, float]:
    """Mean, and half the width of its Student's t interval, which misses the true mean with probability `level`.

    Half the width is NaN for fewer than two values. The standard deviation counts as at least `resolution` / √12, which
    rounding to multiples of `resolution` causes.
    """
    values, count = np.asarray(values, np.float64), len(values)
    if count < 2:
        return float(values.mean()) if count else math.nan, math.nan
    deviation = max(values.std(ddof=1), resolution / 12**0.5)
    return float(values.mean()), float(quantile(count, level) * deviation / count**0.5)


def quantile(seeds: int, level: float = LEVEL) -> float:
    """Half the width of a Student's t interval, in standard errors of its mean."""
    return float(stats.t.ppf(1 - level / 2, seeds - 1))


class Difference(NamedTuple):
    """Statistics of a variant's losses minus the first variant's, paired by seed.

    Attributes:
      mean: below 0 where the variant is better.
      interval: half the width of the simultaneous 95 % interval of the mean; NaN for one seed.
      p: two-sided p-value of the mean, times the number of differences (Bonferroni), at most 1.
      verdict: "better", "worse", "not told apart", or "failed" if no seed has both results.
      detectable: the smallest difference that would be detected with probability 80 %.
      seeds_needed: seeds that would detect the observed mean with that probability, at most 1000: for the spread of
        these seeds, and for the lower and upper end of its 95 % interval; None if the mean was detected or is 0.
    """

    mean: float
    interval: float
    p: float
    verdict: str
    detectable: float
    seeds_needed: tuple[int, int, int] | None


def differences(
    losses: Sequence[Sequence[float]] | np.ndarray, resolution: float = 0.0, of: int | None = None
) -> list[Difference]:
    """Compute each variant's difference from the first one.

    Args:
      losses: losses by variant and seed, the same seeds for all: `[variants][seeds]`; NaN where a run failed.
      resolution: the smallest step between two losses, such as 1/N for accuracies over N answers.
      of: number of differences in the table; None if these are all.

    Returns:
      A `Difference` for each variant but the first.

    >>> first, *_ = differences([[1.0, 1.1, 0.9], [2.0, 2.1, 1.9001]])
    >>> first.verdict, round(first.mean, 3)
    ('worse', 1.0)
    """
    losses = np.asarray(losses, np.float64)
    paired = list(map(known, losses[1:] - losses[0]))
    return [_difference(row, of or len(paired), resolution) for row in paired]


def in_words(verdict: str) -> str:
    """A verdict in the words that tables and pages show."""
    return "no significant difference" if verdict == OPEN else verdict


def known(values) -> np.ndarray:
    """Return the values that are not NaN; failed runs have NaN."""
    values = np.asarray(values, np.float64)
    return values[~np.isnan(values)]


def _difference(paired: np.ndarray, variants: int, resolution: float) -> Difference:
    count, level = len(paired), LEVEL / variants
    mean, half = mean_and_margin(paired, level, 2**0.5 * resolution)
    if count < 2:
        return Difference(mean, half, math.nan, OPEN if count else "failed", math.nan, None)
    error = half / quantile(count, level)
    p = min(1.0, 2 * variants * stats.t.sf(abs(mean) / error, count - 1)) if error else float(mean == 0)
    seen, spread = abs(mean) > half, error * count**0.5
    low, high = spread * ((count - 1) / stats.chi2.ppf([0.975, 0.025], count - 1)) ** 0.5
    needed = None if seen or mean == 0 else tuple(seeds_needed(abs(mean) / s, level) for s in (spread, low, high))
    verdict = OPEN if not seen else "better" if mean < 0 else "worse"
    return Difference(mean, half, p, verdict, detectable_effect(count, level) * spread, needed)


def power(effect: float, seeds: int, level: float = LEVEL) -> float:
    """Probability of a verdict by the paired t-test, if the true mean is `effect` standard deviations."""
    critical, shift = quantile(seeds, level), effect * seeds**0.5
    if seeds > 100:  # here the noncentral t is nearly normal, and scipy's may be NaN
        return float(stats.norm.sf(critical - shift) + stats.norm.cdf(-critical - shift))
    return float(stats.nct.sf(critical, seeds - 1, shift) + stats.nct.sf(critical, seeds - 1, -shift))


@functools.cache
def detectable_effect(seeds: int, level: float = LEVEL) -> float:
    """The effect, in standard deviations of the differences, that is detected with probability `POWER`."""
    highest = 1.0
    while power(highest, seeds, level) < POWER:
        highest *= 2
    return optimize.brentq(lambda effect: power(effect, seeds, level) - POWER, 0, highest, xtol=1e-6)


def seeds_needed(effect: float, level: float = LEVEL) -> int:
    """Number of seeds that detect an effect with probability `POWER`, at most `MOST_SEEDS`."""
    return bisect.bisect_left(range(MOST_SEEDS), POWER, lo=2, key=lambda seeds: power(effect, seeds, level))
