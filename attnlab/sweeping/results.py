"""The results of a sweep: a table of runs, a table of groups over seeds, and a page."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from attnlab import records
from attnlab.results import page
from attnlab.results.charts import Figure
from attnlab.results.statistics import mean_and_margin
from attnlab.results.table import Column, Table
from attnlab.support import paths, provenance
from attnlab.support.errors import UserError
from attnlab.sweeping import grid

TABLE, GROUPS, PLOT, PAGE = "runs.csv", "groups.csv", "runs.png", "sweep.html"
SCORES = [
    Column("loss", "loss", None, "nats", ".4f", "After the last step.", empty="failed"),
    Column("best_loss", "best loss", None, "nats", ".4f", "The lowest of all validations."),
    Column("best_step", "best step", format=","),
    Column("steps", "steps", format=","),
    Column("tokens_per_second", "tokens/s", help="The median of the records."),
]
MEANS = [
    Column("seeds", "seeds", help="Runs that finished."),
    Column("failed", "failed"),
    Column("mean_loss", "mean loss", None, "nats", ".4f", "Of the final losses."),
    Column("low", "low", None, "end of 95 % interval", ".4f", "Over seeds, by Student's t."),
    Column("high", "high", None, "end of 95 % interval", ".4f"),
]


def report(points: list[grid.Point], folder: Path, failed: Mapping[str, str]) -> list[dict]:
    """Print and write the tables, write the page, and return the rows of the runs."""
    groups, by_run = group_of(points), table(points, folder, failed)
    by_group = group_table(groups, points, by_run.rows)
    printed = [
        str(each._replace(columns=[column for column in each.columns if column.key not in ("run", "group", "error")]))
        for each in (by_run, by_group)
        if each
    ]
    print("\n\n".join(printed))
    _write(by_run, by_group, groups, folder)
    return by_run.rows


def table(points: list[grid.Point], folder: Path, failed: Mapping[str, str]) -> Table:
    """Build a table with a row for each run, sorted by final loss; failed runs come last."""
    rows = [
        {"run": point.name}
        | dict.fromkeys(column.key for column in SCORES)
        | point.values
        | ({} if point.name in failed else _scores(folder / point.name))
        | {"error": failed.get(point.name, "")}
        for point in points
    ]
    names = points[0].values
    scores = [column for column in SCORES if column.key not in names]  # such as "steps"
    columns = [Column("run", "run"), *_fields(names), *scores, Column("error", "error", usual="")]
    return Table(columns, sorted(rows, key=lambda row: (bool(row["error"]), row["loss"] or 0.0)))


def _fields(names: Iterable[str]) -> list[Column]:
    """A column for each field, titled with the last part of its name."""
    titles = {name: name.rpartition(".")[2].replace("_", " ") for name in names}
    return [
        Column(name, title, format=lambda row, name=name: str(row[name]), empty="None")
        for name, title in titles.items()
    ]


def _scores(workdir: Path) -> dict:
    columns = records.metrics(workdir)
    step, split, loss = (columns[name] for name in ("step", "split", "loss"))
    validation = np.flatnonzero(split == "val")
    best = validation[loss[validation].argmin()]
    speeds = columns["tokens_per_second"][split == "train"]
    return {
        "loss": float(loss[split == "final"][-1]),
        "best_loss": float(loss[best]),
        "best_step": int(step[best]),
        "steps": int(step[-1]),
        "tokens_per_second": round(float(np.median(speeds))) if len(speeds) else None,
    }


def group_of(points: list[grid.Point]) -> dict[str, str]:
    """Return each run's group, by the run's name; {} if no two runs differ only in the seed, or if only seeds vary."""
    groups = {point.name: grid.name_of(_variant(point)) for point in points}
    return groups if all(groups.values()) and len(set(groups.values())) < len(groups) else {}


def _variant(point: grid.Point) -> dict:
    return {field: value for field, value in point.values.items() if field != "seed"}


def group_table(groups: dict[str, str], points: list[grid.Point], rows: Sequence[Mapping]) -> Table | None:
    """Build a table of groups by mean final loss; groups without a finished run come last. None without groups."""
    group_rows, loss_of = [], {row["run"]: row["loss"] for row in rows}
    for group in dict.fromkeys(groups.values()):
        members = [point for point in points if groups[point.name] == group]
        losses = [loss_of[point.name] for point in members if loss_of[point.name] is not None]
        mean, margin = mean_and_margin(losses)
        row = {"group": group} | _variant(members[0]) | {"seeds": len(losses), "failed": len(members) - len(losses)}
        group_rows.append(row | {"mean_loss": mean, "low": mean - margin, "high": mean + margin})
    columns = [Column("group", "group"), *_fields(_variant(points[0])), *MEANS]
    return Table(columns, sorted(group_rows, key=lambda row: (not row["seeds"], row["mean_loss"]))) if groups else None


def _write(by_run: Table, by_group: Table | None, groups: dict[str, str], folder: Path) -> None:
    """Write the tables, the page and, with matplotlib, the plot; a plot of groups shows only runs that finished."""
    (folder / GROUPS).unlink(missing_ok=True)  # from an earlier grid
    written = {TABLE: by_run} | ({GROUPS: by_group} if by_group else {})
    for name, result_table in written.items():
        paths.write_csv(folder / name, result_table.rows)
    shown = [folder / row["run"] for row in by_run.rows if not (by_group and row["error"])]
    shown = [workdir for workdir in shown if (workdir / "metrics.jsonl").exists()]
    title = "Validation loss: mean over seeds, and each seed" if by_group else "Loss of each run"

    def draw(title: str, colors: Mapping[str, str]):
        from attnlab import plots  # needs matplotlib

        return plots.runs(shown, title, groups=groups, colors=colors)

    if shown:
        try:
            paths.write_figure(folder / PLOT, draw(title, {}))
            written[PLOT] = by_run
        except UserError as error:  # without matplotlib
            print(error)
    ends = ", ".join(f"{row['run']} {row['loss']:.4g}" for row in by_run.rows if row["loss"] is not None)
    figures = (
        [Figure(title, f"Loss over steps. At the end: {ends}.", lambda colors: draw("", colors))]
        if PLOT in written
        else []
    )
    folded = {"All runs": by_run.shown()} if by_group else {}
    section = page.Section("Runs", table=(by_group or by_run).shown(), figures=figures, folded=folded)
    about = {"machine": provenance.machine()}
    page.write(folder / PAGE, f"Sweep of {len(by_run.rows)} runs", about, [section])
    print(f"{', '.join([*written, PAGE])} are in {folder}")
