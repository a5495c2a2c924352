"""Is a variant better than another, by losses of the same seeds? Intervals, paired tests, and what they can see.

Differences between two variants are taken seed by seed, which share their initial key and the order of the data, and
compared with Student's t, in both directions. The p-values of a table's variants are corrected by Holm's method (1979),
so that with probability 95 % it has no verdict at all where there is no difference.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import optimize, stats

from attnlab.study.report import mean_and_margin

LEVEL = 0.05  # the probability of a false verdict in a table, at most
POWER = 0.8  # with which a difference counts as one that could be seen
MOST_SEEDS = 1000


class Difference(NamedTuple):
    """A variant's losses minus another's, by seed.

    Attributes:
      mean: below 0 where the variant is better.
      interval: half the width of the 95 % interval of the mean; NaN for one seed.
      p: of the mean under no difference, corrected for the number of variants.
      verdict: "better", "worse", "not told apart", or "failed" where no seed has both results.
      detectable: the smallest difference that would be seen with probability 80 %.
      seeds_needed: seeds with which the mean found would be seen with that probability, at most 1000; None where it
        was seen, or is 0.
    """

    mean: float
    interval: float
    p: float
    verdict: str
    detectable: float
    seeds_needed: int | None


def differences(losses: Sequence[Sequence[float]] | np.ndarray) -> list[Difference]:
    """Each variant's differences from the first one.

    Args:
      losses: of each variant, by seed, the same seeds for all: `[variants][seeds]`; NaN where a run failed.

    Returns:
      One for each variant but the first.

    >>> first, *_ = differences([[1.0, 1.1, 0.9], [2.0, 2.1, 1.9001]])
    >>> first.verdict, round(first.mean, 3)
    ('worse', 1.0)
    """
    losses = np.asarray(losses, np.float64)
    paired = [row[~np.isnan(row)] for row in losses[1:] - losses[0]]
    p = [_p_value(row) for row in paired]
    return [_difference(row, level, corrected) for row, (level, corrected) in zip(paired, holm(p))]


def _p_value(paired: np.ndarray) -> float:
    if len(paired) < 2:
        return 1.0
    spread = paired.std(ddof=1)
    if spread == 0:
        return 1.0 if paired[0] == 0 else 0.0
    return float(2 * stats.t.sf(abs(paired.mean()) * len(paired) ** 0.5 / spread, len(paired) - 1))


def _difference(paired: np.ndarray, level: float, p: float) -> Difference:
    mean, half = mean_and_margin(paired)
    seen = p <= LEVEL
    verdict = ("better" if mean < 0 else "worse") if seen else "not told apart" if len(paired) else "failed"
    spread = float(paired.std(ddof=1)) if len(paired) > 1 else math.nan
    return Difference(
        mean,
        half,
        p,
        verdict,
        detectable_effect(len(paired), level) * spread if len(paired) > 1 else math.nan,
        None if seen or not spread > 0 or mean == 0 else seeds_needed(abs(mean) / spread, level),
    )


def holm(p: Sequence[float]) -> list[tuple[float, float]]:
    """For each p-value the level that Holm's method compares it with, and the corrected value (Holm 1979).

    >>> holm([0.04, 0.01])
    [(0.05, 0.04), (0.025, 0.02)]
    """
    results, last = [(0.0, 1.0)] * len(p), 0.0
    for rank, index in enumerate(np.argsort(p, kind="stable")):
        count = len(p) - rank
        last = min(1.0, max(last, count * p[index]))
        results[index] = (LEVEL / count, last)
    return results


def power(effect: float, seeds: int, level: float = LEVEL) -> float:
    """The probability of a verdict, by the paired t-test, where the true mean is `effect` standard deviations.

    >>> round(power(2.0, seeds=5), 2)
    0.91
    """
    critical, shift = stats.t.ppf(1 - level / 2, seeds - 1), effect * seeds**0.5
    if seeds > 100:  # where the noncentral t is nearly normal, and scipy's may be NaN
        return float(stats.norm.sf(critical - shift) + stats.norm.cdf(-critical - shift))
    return float(stats.nct.sf(critical, seeds - 1, shift) + stats.nct.sf(critical, seeds - 1, -shift))


@functools.cache
def detectable_effect(seeds: int, level: float = LEVEL) -> float:
    """The effect, in standard deviations of the differences, that is seen with probability `POWER`.

    >>> round(detectable_effect(5), 2)
    1.68
    """
    highest = 1.0
    while power(highest, seeds, level) < POWER:
        highest *= 2
    return optimize.brentq(lambda effect: power(effect, seeds, level) - POWER, 0, highest, xtol=1e-6)


def seeds_needed(effect: float, level: float = LEVEL) -> int:
    """The number of seeds with which an effect is seen with probability `POWER`, at most `MOST_SEEDS`.

    >>> seeds_needed(1.0)
    10
    """
    low, high = 1, MOST_SEEDS
    if power(effect, high, level) < POWER:
        return MOST_SEEDS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(effect, middle, level) >= POWER else (middle, high)
    return high
