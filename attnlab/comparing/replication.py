"""A published table beside ours: the differences from the first variant, and whether they are found again."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attnlab import config as configs
from attnlab import experiments
from attnlab.comparing import page, table
from attnlab.comparing.protocol import Protocol, diverged, resolution, result
from attnlab.config import RunConfig
from attnlab.study.report import mean_and_margin
from attnlab.support import paths
from attnlab.support.errors import UserError

TABLE, TEXT = "replication.csv", "replication.md"
# The shown columns by key.
COLUMNS = {
    "variant": "variant",
    "published": "published",
    "ours": "ours",
    "published_difference": "published difference",
    "difference": "our difference",
    "outcome": "outcome",
}


class Published(NamedTuple):
    """A part's published results.

    Attributes:
      source: paper, table, or commit.
      results: by variant, in the order of the comparison.
      margin: differences up to this one count as none, such as two standard errors of the published ones.
      differs: what our runs do otherwise whatever their config, in sentences.
      length: over the training's, of the sequences whose accuracy is published.
      protocol: published values of fields of the config, and of "seeds" and "learning_rates", their numbers.
    """

    source: str
    results: Mapping[str, float]
    margin: float
    differs: str
    length: int = 1
    protocol: Mapping[str, Any] = {}


def published(file: str, names: Sequence[str]) -> dict[str, Published]:
    """The dictionary PUBLISHED of a Python file or an experiment, by part; {} where it has none."""
    found, fields_known = {}, {*configs.declared(), "seeds", "learning_rates"}
    for part, fields in experiments.dictionary(file, "PUBLISHED").items():
        where = f"{file}: PUBLISHED[{part!r}]"
        try:
            found[part] = Published(**fields)
        except TypeError as error:
            raise UserError(f"{where}: {error}: expected a dictionary of {', '.join(Published._fields)}") from error
        if not isinstance(found[part].results, Mapping) or not isinstance(found[part].protocol, Mapping):
            raise UserError(f"{where}: expected dictionaries of results and protocol")
        if unknown := {*found[part].results} - {*names} or {*found[part].protocol} - {*fields_known}:
            raise UserError(
                f"{where} has {min(unknown)!r}: expected variants, and fields of a config, seeds, learning_rates"
            )
        if names[0] not in found[part].results:
            raise UserError(f"{where} has no result of {names[0]!r}, the first variant: differences are from it")
    return found


def outcome(difference: float, ours: Sequence[float] | np.ndarray, margin: float, resolution: float = 0.0) -> str:
    """Whether a published difference is found again by paired differences of some seeds, by their 95 % interval.

    A published difference up to the margin counts as 0. "reproduced": the interval is within the margin of the
    published difference, or contains it and excludes 0; "same sign only": it lies on the same side of 0, at another
    size; "underpowered": it excludes neither the published difference nor its absence; otherwise "not reproduced".
    """
    mean, half = mean_and_margin(ours, resolution=2**0.5 * resolution)
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
    found: Published, results: Mapping[str, Sequence[float]], chance: float, resolution: float = 0.0
) -> bool:
    """Whether our runs learnt enough to be compared with the published ones; arguments as for `rows`.

    The first variant is at its published result, to within the margin or half of our interval, and the variant whose
    published result is farthest from chance has left chance by more than both.
    """
    (first, *_), best = results, max(found.results, key=lambda name: abs(found.results[name] - chance))

    def distance(name: str, value: float) -> float:
        # Beyond the margin and half of our interval; NaN without a run.
        mean, half = mean_and_margin(_known(results[name]), resolution=resolution)
        return abs(mean - value) - np.fmax(found.margin, half)

    return not (distance(first, found.results[first]) > 0 or distance(best, chance) <= 0)


def rows(
    found: Published, results: Mapping[str, Sequence[float]], chance: float, resolution: float = 0.0
) -> list[dict[str, Any]]:
    """The records of a replication, on our results of each variant, by seed, NaN where a run failed.

    The first of `results` is the variant that the others are compared with; `chance` is the result without learning,
    and `resolution` the step between two results.
    """
    (first, *_), rows, trained = results, [], is_trained(found, results, chance, resolution)
    for name in (name for name in results if name in found.results):
        mean, half = mean_and_margin(_known(results[name]), resolution=resolution)
        row = {"variant": name, "published": found.results[name], "ours": mean, "ours_interval": half}
        row |= dict.fromkeys(("published_difference", "difference", "difference_interval", "outcome"))
        if name != first:
            paired = _known(np.subtract(results[name], results[first]))
            row["published_difference"] = found.results[name] - found.results[first]
            row["difference"], row["difference_interval"] = mean_and_margin(paired, resolution=2**0.5 * resolution)
            difference = outcome(row["published_difference"], paired, found.margin, resolution)
            row["outcome"] = difference if trained else "not trained far enough"
        rows.append(row)
    return rows


def results(found: Published, protocol: Protocol, folder: Path, final: Mapping, measured: Mapping) -> tuple:
    """(Results by variant and seed, the step between two), at the published length; NaN where a run failed."""
    by_variant, step = {}, 0.0
    for name, points in final.items():
        workdirs = [folder / point.name for point in points]
        by_variant[name] = [result(workdir, protocol.measure) for workdir in workdirs]
        if found.length == 1:
            step = step or resolution(points[0].config, protocol.measure)
        else:  # at the published length, which not every model takes, of the runs that finished
            length = str(found.length * points[0].config.model.context)
            values = measured.get(name, {}).get("accuracies_by_length", {}).get(length, [])
            accuracies = iter(values)
            for at, workdir in enumerate(workdirs):
                if not (diverged(workdir) or np.isnan(by_variant[name][at])):
                    by_variant[name][at] = next(accuracies, np.nan)
            step = 1 / measured[name]["answers_by_length"][length] if values else step
    return by_variant, step


def cells(rows: Sequence[Mapping]) -> list[list[str]]:
    """The rows as texts, the names of their columns first."""
    return [list(COLUMNS.values()), *([_cell(name, row) for name in COLUMNS] for row in rows)]


def _cell(name: str, row: Mapping) -> str:
    value, half = row[name], row.get(f"{name}_interval")
    if value is None or isinstance(value, str) or np.isnan(value):
        return value if isinstance(value, str) else ""
    sign = "+" if name.endswith("difference") else ""
    return f"{value:{sign}.3f}" + ("" if half is None else f" ± {half:.3f}")


def section(part, rows: Sequence[Mapping], config: RunConfig) -> page.Section:
    """The section of a part's page, on a config of the first variant; writes `replication.csv` and `replication.md`."""
    found, protocol = part.published, part.protocol
    ours = config.fields | {"seeds": len(protocol.seeds), "learning_rates": len(protocol.rates)}
    otherwise = [f"{name} {ours[name]}, not {value}" for name, value in found.protocol.items() if ours[name] != value]
    notes = [
        f"Published: {found.source}.",
        f"Otherwise here: {'; '.join([*otherwise, found.differs])}",
        f"Outcomes are of our differences' 95 % intervals; published ones up to {found.margin:g} count as none.",
        "Not trained far enough: the first variant is not at its published result, or the best one still at chance.",
    ]
    paths.write_csv(part.folder / TABLE, rows)
    paths.write_text(part.folder / TEXT, table.markdown(cells(rows), after=notes))
    shown = page.Table(cells(rows), [[row[key] for key in COLUMNS] for row in rows])
    return page.Section(f"{part.name}: published and ours", [], shown, notes)


def _known(values) -> np.ndarray:
    values = np.asarray(values, np.float64)
    return values[~np.isnan(values)]
