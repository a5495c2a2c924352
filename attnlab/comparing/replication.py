"""Compare a published table with ours: differences from the first variant, and whether they are reproduced."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attnlab import config as configs
from attnlab import experiments
from attnlab.comparing.protocol import Protocol, diverged, resolution, result
from attnlab.config import RunConfig
from attnlab.results import page
from attnlab.results.statistics import LEVEL, known, mean_and_margin
from attnlab.results.table import Column, Table, with_interval
from attnlab.support import paths
from attnlab.support.errors import UserError

TABLE, TEXT = "replication.csv", "replication.md"


class Published(NamedTuple):
    """Published results on one text or task.

    Attributes:
      source: paper, table, or commit.
      results: by variant; the comparison's first variant must have one, others may be missing.
      margin: published differences up to this size count as 0; for example two of their standard errors.
      differs: sentences on how our runs differ from the published runs, beyond the config fields in `protocol`.
      length: length of the sequences whose accuracy is published, in multiples of the training length.
      protocol: published values of config fields, and the numbers of "seeds" and "learning_rates".
    """

    source: str
    results: Mapping[str, float]
    margin: float
    differs: str
    length: int = 1
    protocol: Mapping[str, Any] = {}


def published(file: str, names: Sequence[str]) -> dict[str, Published]:
    """Read PUBLISHED, a dictionary by part, from a Python file or an experiment; {} if it has none."""
    by_part, fields_known = {}, {*configs.declared(), "seeds", "learning_rates"}
    for part, fields in experiments.dictionary(file, "PUBLISHED").items():
        where = f"{file}: PUBLISHED[{part!r}]"
        try:
            by_part[part] = Published(**fields)
        except TypeError as error:
            raise UserError(f"{where}: {error}: expected a dictionary of {', '.join(Published._fields)}") from error
        if not isinstance(by_part[part].results, Mapping) or not isinstance(by_part[part].protocol, Mapping):
            raise UserError(f"{where}: expected dictionaries for results and protocol")
        if unknown := {*by_part[part].results} - {*names} or {*by_part[part].protocol} - {*fields_known}:
            raise UserError(
                f"{where} has {min(unknown)!r}: expected variants; in protocol: config fields, seeds, learning_rates"
            )
        if names[0] not in by_part[part].results:
            raise UserError(f"{where} has no result of {names[0]!r}, the first variant: add it")
    return by_part


def outcome(difference: float, mean: float, half: float, margin: float) -> str:
    """Judge whether the mean of our paired differences, ± half its interval, reproduces a published difference.

    A published difference up to the margin counts as 0. "reproduced": the interval is within the margin of the
    published difference, or contains it and excludes 0. "same sign only": it excludes that difference but lies
    on its side of 0. "underpowered": it contains that and 0, or `half` is NaN. Otherwise "not reproduced".
    """
    if np.isnan(half):
        return "underpowered"
    low, high = mean - half, mean + half
    target, slack = (0.0, margin) if abs(difference) <= margin else (difference, 0.0)
    if target - margin <= low and high <= target + margin:
        return "reproduced"
    contains = low <= target + slack and high >= target - slack
    if target == 0 or low <= 0 <= high:
        return "underpowered" if contains else "not reproduced"
    return "reproduced" if contains else "same sign only" if (low > 0) == (difference > 0) else "not reproduced"


def is_trained(
    reported: Published, results: Mapping[str, Sequence[float]], chance: float, resolution: float = 0.0
) -> bool:
    """Whether our runs learned enough to be compared with the published ones; arguments as for `subjects`.

    The tolerance is the larger of the margin and half of our interval. The first variant must be within the tolerance
    of its published result; the variant published farthest from chance must be farther than that from chance.
    """
    (first, *_), best = results, max(reported.results, key=lambda name: abs(reported.results[name] - chance))

    def distance(name: str, value: float) -> float:
        # Distance from `value` beyond the tolerance; NaN without a run.
        mean, half = mean_and_margin(known(results[name]), resolution=resolution)
        return abs(mean - value) - np.fmax(reported.margin, half)

    return not (distance(first, reported.results[first]) > 0 or distance(best, chance) <= 0)


class ReplicatedResults(NamedTuple):
    """A variant's published result and our results, from which its table row is built.

    Attributes:
      ours: the mean of our results, and half its interval.
      expected: the published difference from the first variant; None, like all below, for the first variant itself.
      difference: our difference from the first variant, paired by seed, and half its simultaneous interval.
      outcome: see the function `outcome`, or "not trained far enough".
    """

    variant: str
    published: float
    ours: tuple[float, float]
    expected: float | None = None
    difference: tuple[float, float] | None = None
    outcome: str | None = None


def subjects(
    reported: Published, results: Mapping[str, Sequence[float]], chance: float, resolution: float = 0.0
) -> list[ReplicatedResults]:
    """Compute the rows of a replication from our `results` by variant and seed, NaN where a run failed.

    The first variant is the baseline. `chance` is the result without learning, and `resolution` the smallest step
    between two results.
    """
    (first, *others), rows, trained = results, [], is_trained(reported, results, chance, resolution)
    for name in (name for name in results if name in reported.results):
        row = ReplicatedResults(
            name, reported.results[name], mean_and_margin(known(results[name]), resolution=resolution)
        )
        if name != first:
            expected = reported.results[name] - reported.results[first]
            paired = known(np.subtract(results[name], results[first]))
            mean, half = mean_and_margin(paired, LEVEL / len(others), 2**0.5 * resolution)
            ended = outcome(expected, mean, half, reported.margin) if trained else "not trained far enough"
            row = row._replace(expected=expected, difference=(mean, half), outcome=ended)
        rows.append(row)
    return rows


def columns(seeds: int, variants: int) -> list[Column]:
    """Define the columns of a replication, for the numbers of seeds and of variants in the comparison."""
    over = f"± 95 % over {seeds} seeds"
    joint = over if variants == 2 else f"± 95 % for all {variants - 1}, over {seeds} seeds"
    return [
        Column("variant", "variant", lambda row: row.variant),
        Column("outcome", "outcome", lambda row: row.outcome, help="By the interval of our difference: see the guide."),
        Column("published", "published", lambda row: row.published, format=".3f"),
        *with_interval("ours", "ours", lambda row: row.ours, over),
        Column("published_difference", "published difference", lambda row: row.expected, format="+.3f"),
        *with_interval("difference", "our difference", lambda row: row.difference, joint, "+", "Paired by seed."),
    ]


def results(reported: Published, protocol: Protocol, folder: Path, final: Mapping, measured: Mapping) -> tuple:
    """Return results at the published length by variant and seed (NaN for failed runs), and their smallest step."""
    by_variant, step = {}, 0.0
    for name, points in final.items():
        workdirs = [folder / point.name for point in points]
        by_variant[name] = [result(workdir, protocol.measure) for workdir in workdirs]
        if reported.length == 1:
            step = step or resolution(points[0].config, protocol.measure)
        else:  # not every model accepts the published length, and only finished runs were measured
            length = str(reported.length * points[0].config.model.context)
            values = measured.get(name, {}).get("accuracies_by_length", {}).get(length, [])
            accuracies = iter(values)
            for at, workdir in enumerate(workdirs):
                if not (diverged(workdir) or np.isnan(by_variant[name][at])):
                    by_variant[name][at] = next(accuracies, np.nan)
            step = 1 / measured[name]["answers_by_length"][length] if values else step
    return by_variant, step


def section(comparison, rows: Sequence[ReplicatedResults], config: RunConfig) -> page.Section:
    """Write `replication.csv` and `replication.md`, and return the page section; `config` is the first variant's."""
    reported, protocol = comparison.published, comparison.protocol
    ours = config.fields | {"seeds": len(protocol.seeds), "learning_rates": len(protocol.rates)}
    fields = {name: (ours.get(name, "no field of ours"), value) for name, value in reported.protocol.items()}
    otherwise = [f"{name} {our}, not {value}" for name, (our, value) in fields.items() if our != value]
    notes = [
        f"Published: {reported.source}.",
        f"Our runs differ: {'; '.join([*otherwise, reported.differs])}",
        f"Outcomes come from the intervals of our differences; published ones up to {reported.margin:g} count as 0.",
        "Not trained far enough: the first variant differs from its published result, or the best is at chance.",
    ]
    whole = Table.of(columns(len(protocol.seeds), len(comparison.variants)), rows)
    paths.write_csv(comparison.folder / TABLE, whole.rows)
    paths.write_text(comparison.folder / TEXT, whole.shown().markdown(after=notes))
    return page.Section(f"{comparison.name}: published and ours", table=whole.shown(), notes=notes)
