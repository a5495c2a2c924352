"""A published table beside ours: the differences from the first variant, and whether they are found again."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from attnlab.comparing import page, table
from attnlab.comparing.protocol import Protocol, result
from attnlab.comparing.variants import Variant, fields_of_file
from attnlab.study.report import mean_and_margin
from attnlab.support import paths
from attnlab.support.errors import UserError
from attnlab.support.names import nearest

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
      differs: what our protocol and scale do otherwise, in sentences.
      length: over the training's, of the sequences whose accuracy is published.
    """

    source: str
    results: Mapping[str, float]
    margin: float
    differs: str
    length: int = 1


def published(file: str, variants: Sequence[Variant]) -> dict[str, Published]:
    """The dictionary PUBLISHED of a Python file or an experiment, by part; {} where it has none."""
    found, names = {}, [variant.name for variant in variants]
    for part, fields in fields_of_file(file, "PUBLISHED").items():
        where = f"{file}: PUBLISHED[{part!r}]"
        try:
            found[part] = Published(**fields)
        except TypeError as error:
            raise UserError(f"{where}: {error}: expected a dictionary of {', '.join(Published._fields)}") from error
        if unknown := [name for name in found[part].results if name not in names]:
            raise UserError(
                f"{where} has results of {unknown[0]!r}{nearest(unknown[0], names)}, which is not a variant"
            )
        if names[0] not in found[part].results:
            raise UserError(f"{where} has no result of {names[0]!r}, the first variant: differences are from it")
    return found


def outcome(difference: float, ours: Sequence[float] | np.ndarray, margin: float) -> str:
    """Whether a published difference is found again by paired differences of some seeds.

    With their 95 % interval: "reproduced" where it is on the side of 0 that the published difference is, or inside
    ± margin where that is a difference up to the margin; "not reproduced" where the interval excludes that the
    published difference is true, "underpowered" where it excludes neither that nor its absence.
    """
    mean, half = mean_and_margin(ours)
    if np.isnan(half):
        return "underpowered"
    low, high = mean - half, mean + half
    if abs(difference) <= margin:
        inside = -margin <= low and high <= margin
        return "reproduced" if inside else "not reproduced" if low > margin or high < -margin else "underpowered"
    if low > 0 or high < 0:
        return "reproduced" if (low > 0) == (difference > 0) else "not reproduced"
    return "underpowered" if low <= difference <= high else "not reproduced"


def rows(found: Published, results: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """The records of a replication, on our results of each variant, by seed, NaN where a run failed.

    The first of `results` is the variant that the others are compared with.
    """
    first, *_ = results
    rows = []
    for name in (name for name in results if name in found.results):
        mean, half = mean_and_margin(_known(results[name]))
        row = {"variant": name, "published": found.results[name], "ours": mean, "ours_interval": half}
        row |= dict.fromkeys(("published_difference", "difference", "difference_interval", "outcome"))
        if name != first:
            paired = _known(np.subtract(results[name], results[first]))
            row["published_difference"] = found.results[name] - found.results[first]
            row["difference"], row["difference_interval"] = mean_and_margin(paired)
            row["outcome"] = outcome(row["published_difference"], paired, found.margin)
        rows.append(row)
    return rows


def results(found: Published, protocol: Protocol, folder: Path, final: Mapping, measured: Mapping) -> dict:
    """Our results by variant and seed, at the length of the published ones; NaN where a run failed."""
    by_variant = {}
    for name, points in final.items():
        if found.length == 1:
            by_variant[name] = [result(folder / point.name, protocol.measure) for point in points]
        else:
            length = str(found.length * points[0].config.model.context)
            values = measured.get(name, {}).get("accuracies_by_length", {}).get(length, [])
            by_variant[name] = values if len(values) == len(points) else [np.nan] * len(points)
    return by_variant


def cells(rows: Sequence[Mapping]) -> list[list[str]]:
    """The rows as texts, the names of their columns first."""
    return [list(COLUMNS.values()), *([_cell(name, row) for name in COLUMNS] for row in rows)]


def _cell(name: str, row: Mapping) -> str:
    value, half = row[name], row.get(f"{name}_interval")
    if value is None or isinstance(value, str):
        return value or ""
    sign = "+" if name.endswith("difference") else ""
    return f"{value:{sign}.3f}" + ("" if half is None else f" ± {half:.3f}")


def notes(found: Published) -> list[str]:
    """Sentences below the table."""
    return [
        f"Published: {found.source}.",
        f"Otherwise here: {found.differs}",
        f"Outcomes are of our differences' 95 % intervals; published ones up to {found.margin:g} count as none.",
    ]


def write(rows: Sequence[Mapping], found: Published, folder: Path) -> None:
    """Write `replication.csv`, and `replication.md` with notes below the table."""
    paths.write_csv(folder / TABLE, rows)
    paths.write_text(folder / TEXT, table.markdown(cells(rows), notes(found)))


def section(title: str, rows: Sequence[Mapping], found: Published) -> page.Section:
    """The section of a comparison's page."""
    sort_keys = [[row[key] for key in COLUMNS] for row in rows]
    return page.Section(f"{title}: published and ours", cells(rows), sort_keys, notes(found), [], [])


def _known(values) -> np.ndarray:
    values = np.asarray(values, np.float64)
    return values[~np.isnan(values)]
