"""Groups of runs that differ in the seed alone, and the mean of their final losses."""

from collections.abc import Mapping, Sequence

from attnlab.study.report import Interval
from attnlab.sweeping.grid import Point, name_of

SEED = "seed"


def of(points: Sequence[Point]) -> dict[str, str]:
    """The group of each run, by the run's name; empty where no two runs differ in the seed alone, or all do.

    A group is named by its values, as a run is.

    >>> from attnlab.sweeping import grid
    >>> runs = grid.points(["config.steps=10,20", "config.seed=0,1"], ["--config=quickstart"])
    >>> of(runs)["steps=20,seed=0"]
    'steps=20'
    """
    if not any(SEED in point.values and len(point.values) > 1 for point in points):
        return {}
    groups = {point.name: name_of(_variant(point)) for point in points}
    return groups if len(set(groups.values())) < len(groups) else {}


def _variant(point: Point) -> dict:
    return {field: value for field, value in point.values.items() if field != SEED}


def table(points: Sequence[Point], rows: Sequence[Mapping]) -> list[dict]:
    """A row for each group of `of`, by its mean final loss; groups without a finished run come last.

    Its fields: group, the fields of the grid without the seed, seeds (whose runs finished), failed (runs), mean_loss,
    low and high (the ends of the mean's 95 % interval, Student's t; None for one seed).

    Args:
      points: the runs of a grid.
      rows: their rows in the table of `attnlab sweep`, in any order.

    >>> from attnlab.sweeping import grid
    >>> runs = grid.points(["config.steps=10,20", "config.seed=0,1"], ["--config=quickstart"])
    >>> rows = [{"run": run.name, "loss": 2.0 + run.config.seed, "error": ""} for run in runs]
    >>> row = table(runs, rows)[0]
    >>> row["group"], row["seeds"], row["mean_loss"], round(row["low"], 2)
    ('steps=10', 2, 2.5, -3.85)
    """
    groups, by_name = of(points), {row["run"]: row for row in rows}
    variants = {groups[point.name]: _variant(point) for point in points if groups}
    found = []
    for group, values in variants.items():
        own = [by_name[name] for name, its in groups.items() if its == group]
        losses = [row["loss"] for row in own if not row["error"]]
        counts = {"seeds": len(losses), "failed": len(own) - len(losses)}
        found.append({"group": group} | values | counts | _mean(losses))
    return sorted(found, key=lambda row: (not row["seeds"], row["mean_loss"] or 0.0))


def _mean(losses: Sequence[float]) -> dict:
    if not losses:
        return dict.fromkeys(("mean_loss", "low", "high"))
    interval = Interval.of(losses)
    low, high = (interval.low, interval.high) if len(losses) > 1 else (None, None)
    return {"mean_loss": interval.mean, "low": low, "high": high}
