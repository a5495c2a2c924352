"""Groups of runs that differ in the seed alone, and the mean of their final losses."""

from collections.abc import Mapping, Sequence

from attnlab.study.report import Interval
from attnlab.sweeping.grid import Point, name_of

SEED = "seed"


def of(points: Sequence[Point]) -> dict[str, str]:
    """The group of each run by name; empty where no two runs differ in the seed alone, or all do."""
    if not any(SEED in point.values and len(point.values) > 1 for point in points):
        return {}
    groups = {point.name: name_of(_variant(point)) for point in points}
    return groups if len(set(groups.values())) < len(groups) else {}


def _variant(point: Point) -> dict:
    return {field: value for field, value in point.values.items() if field != SEED}


def table(points: Sequence[Point], rows: Sequence[Mapping]) -> list[dict]:
    """A row for each group, by its mean final loss, from the rows of its runs; without a finished run it comes last."""
    groups, by_name = of(points), {row["run"]: row for row in rows}
    variants = {groups[point.name]: _variant(point) for point in points if groups}
    found = []
    for group, values in variants.items():
        members = [by_name[name] for name, its in groups.items() if its == group]
        losses = [row["loss"] for row in members if not row["error"]]
        counts = {"seeds": len(losses), "failed": len(members) - len(losses)}
        found.append({"group": group} | values | counts | _mean(losses))
    return sorted(found, key=lambda row: (not row["seeds"], row["mean_loss"] or 0.0))


def _mean(losses: Sequence[float]) -> dict:
    if not losses:
        return dict.fromkeys(("mean_loss", "low", "high"))
    interval = Interval.of(losses)
    low, high = (interval.low, interval.high) if len(losses) > 1 else (None, None)
    return {"mean_loss": interval.mean, "low": low, "high": high}
