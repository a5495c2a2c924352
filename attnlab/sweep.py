"""Train with every combination of some values, and compare the runs.

    attnlab sweep --config=quickstart --grid config.optimizer.learning_rate=1e-3,3e-3 --grid config.seed=0,1

Fields in one --grid vary together: two runs, not four, of

    --grid "config.model.width=64,128 config.optimizer.learning_rate=1e-3,5e-4"

A value with a comma is put in double quotes. None is a value where a field may be None, as in
config.model.attention.window=None,16.

Each run has a workdir of its own in --workdir, named by its values. Runs that differ in seed and learning rate alone
share a process and its programs; on GPUs --together trains them as one program. The same command goes on where it was
stopped or killed, and keeps the runs that are finished; with more values it trains the new ones. A run that fails does
not end the others. At the end runs.csv has a line for each run, the lowest final loss first, runs.png shows their
losses, and sweep.html is a page of both. Where seeds vary beside another field, runs that differ in the seed alone are
a group: groups.csv has the mean final loss of each group with its 95 % interval over seeds, and runs.png a colour for
each.
`python -m attnlab.sweep` is the same command.
"""

import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from absl import flags

from attnlab import commands, experiments, runs, train
from attnlab import config as configs
from attnlab.config import RunConfig
from attnlab.nn import custom, versions
from attnlab.results import page
from attnlab.results.charts import Figure
from attnlab.results.statistics import mean_and_margin
from attnlab.results.table import Column, Table
from attnlab.support import paths, provenance, workers
from attnlab.support.errors import UserError
from attnlab.sweeping import grid, training_runs
from attnlab.training.program import shared_programs

MARKER, TABLE, GROUPS, PLOT, PAGE = "sweep.json", "runs.csv", "groups.csv", "runs.png", "sweep.html"
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
    Column("low", "low", None, "end of the 95 % interval over seeds", ".4f", "By Student's t."),
    Column("high", "high", None, "end of the 95 % interval over seeds", ".4f"),
]
_GRID = "config.FIELD=VALUE,VALUE,…, or several fields that vary together"


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code: 0, 1 if a run failed, 2 for a mistake, 128 + the number of a signal."""
    argv = list(sys.argv if argv is None else argv)
    return commands.run(_define, _main, __doc__, argv)


def _define(values, argv) -> None:
    commands.define_import(values, argv)
    commands.define_config(values, argv)
    flags.DEFINE_multi_string("grid", [], _GRID, flag_values=values)
    training_runs.define(values)
    flags.DEFINE_string("workdir", None, "folder of the sweep; by default runs/CONFIG-sweep", flag_values=values)
    flags.DEFINE_bool("dry_run", False, "list the runs, and start none", flag_values=values)


def _main(values) -> int:
    if not values.grid:
        raise UserError("--grid is missing: name a field and its values, e.g. --grid config.seed=0,1")
    config, name = commands.config_of(values)
    runner = training_runs.checked(values.jobs, values.together)
    points = grid.points(values.grid, config)
    custom.check_used(values["import"].value, [layer for point in points for layer in point.config.model.used])
    folder = Path(values.workdir or f"runs/{name}-sweep")
    if runner["jobs"]:
        custom.to_load([point.config.model for point in points])
    if values.dry_run:
        experiment = values["config"].experiment
        words = ["attnlab", "train", f"--config={experiment}", *(f"--import={file}" for file in values["import"].value)]
        base = experiments.load(experiment)
        for point in points:
            print(shlex.join([*words, *configs.words(point.config, base), f"--workdir={folder / point.name}"]))
        return 0
    try:
        _, failed = _trained(points, folder, {"grid": values.grid}, **runner)
    except workers.Interrupted as stopped:
        return 128 + stopped.args[0]
    return 1 if failed else 0


def sweep(
    configs: Sequence[RunConfig], workdir: str | Path, *, jobs: int = 0, together: int | str = "auto"
) -> list[dict]:
    """Train some runs side by side, each in a folder of its own in `workdir`, which is named by what it differs in.

    The same call goes on where it was stopped, and keeps the runs that are finished.

    Args:
      configs: of all runs.
      workdir: gets the runs, the table `runs.csv`, with seeds beside other fields `groups.csv`, and plots.
      jobs: processes at a time; 0 trains in this one, which values that live in it alone need.
      together: how many runs of one program are trained as one; "auto": all on a GPU, one on CPUs.

    Returns:
      a record for each run, the lowest final loss first, and those that failed last, with their "error".

    Raises:
      UserError: an unusable config or folder, before any run.
      KeyboardInterrupt: after a signal; the state of the runs is saved.

    >>> import tempfile
    >>> from attnlab.masks import SlidingWindow
    >>> small = {"steps": 2, "model.num_layers": 1, "model.width": 16, "eval.windows": 4, "parallel.mesh.data": 1}
    >>> base = RunConfig.of(small | {"data.tokenizer": "byte", "sample.length": 0, "log.tensorboard": False})
    >>> masks = SlidingWindow(left=4), SlidingWindow(left=8)
    >>> configs = [base.changed({"model.layers": mask}) for mask in masks]
    >>> rows = sweep(configs, tempfile.mkdtemp())  # doctest: +ELLIPSIS
    1/2 ...
    >>> [row["steps"] for row in rows]
    [2, 2]
    """
    runner, points = training_runs.checked(jobs, together), grid.of_configs(configs)
    try:
        return _trained(points, Path(workdir), {"runs": [point.name for point in points]}, **runner)[0]
    except workers.Interrupted as stopped:
        raise KeyboardInterrupt(*stopped.args) from None


@versions.taken_once()
@shared_programs()
def _trained(points: list[grid.Point], folder: Path, about: dict, **runner) -> tuple[list[dict], dict[str, str]]:
    """Train runs, and print and write their tables; the table, and the errors of those that failed, by name."""
    finished = {point.name for point in points if train.is_finished(point.config, folder / point.name)}
    with training_runs.claimed(folder, MARKER, about) as lock:
        failed = training_runs.Runner(len(points), lock=lock, **runner).train(points, finished, folder)
    groups, of_runs = group_of(points), table(points, folder, failed)
    of_groups = group_table(groups, points, of_runs.rows)
    for printed in filter(None, (of_runs, of_groups)):
        print(printed._replace(columns=[each for each in printed.columns if each.key not in ("run", "group", "error")]))
    _write(of_runs, of_groups, groups, folder)
    return of_runs.rows, failed


def table(points: list[grid.Point], folder: Path, failed: dict[str, str]) -> Table:
    """A row for each run, by its final loss; failed runs come last."""
    rows = [
        {"run": point.name}
        | point.values
        | dict.fromkeys(column.key for column in SCORES)
        | ({} if point.name in failed else _scores(folder / point.name))
        | {"error": failed.get(point.name, "")}
        for point in points
    ]
    columns = [Column("run", "run"), *_fields(points[0].values), *SCORES, Column("error", "error", usual="")]
    return Table(columns, sorted(rows, key=lambda row: (bool(row["error"]), row["loss"] or 0.0)))


def _fields(names: Iterable[str]) -> list[Column]:
    """A column for each field, under the last part of its name."""
    titles = {name: name.rpartition(".")[2].replace("_", " ") for name in names}
    return [
        Column(name, title, format=lambda row, name=name: str(row[name]), empty="None")
        for name, title in titles.items()
    ]


def _scores(workdir: Path) -> dict:
    columns = runs.metrics(workdir)
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
    """The group of each run by name; empty where no two runs differ in the seed alone, or all do."""
    groups = {point.name: grid.name_of(_variant(point)) for point in points}
    return groups if all(groups.values()) and len(set(groups.values())) < len(groups) else {}


def _variant(point: grid.Point) -> dict:
    return {field: value for field, value in point.values.items() if field != "seed"}


def group_table(groups: dict[str, str], points: list[grid.Point], rows: Sequence[Mapping]) -> Table | None:
    """A row for each group, by its mean final loss; without a finished run it comes last. None without groups."""
    found, loss_of = [], {row["run"]: row["loss"] for row in rows}
    for group in dict.fromkeys(groups.values()):
        members = [point for point in points if groups[point.name] == group]
        losses = [loss_of[point.name] for point in members if loss_of[point.name] is not None]
        mean, margin = mean_and_margin(losses)
        row = {"group": group} | _variant(members[0]) | {"seeds": len(losses), "failed": len(members) - len(losses)}
        found.append(row | {"mean_loss": mean, "low": mean - margin, "high": mean + margin})
    columns = [Column("group", "group"), *_fields(_variant(points[0])), *MEANS]
    return Table(columns, sorted(found, key=lambda row: (not row["seeds"], row["mean_loss"]))) if groups else None


def _write(of_runs: Table, of_groups: Table | None, groups: dict[str, str], folder: Path) -> None:
    """Write the tables, the page, and where matplotlib is installed the plot: of groups over the runs that finished."""
    (folder / GROUPS).unlink(missing_ok=True)  # of an earlier grid
    written = {TABLE: of_runs} | ({GROUPS: of_groups} if of_groups else {})
    for name, found in written.items():
        paths.write_csv(folder / name, found.rows)
    shown = [folder / row["run"] for row in of_runs.rows if not (of_groups and row["error"])]
    shown = [workdir for workdir in shown if (workdir / "metrics.jsonl").exists()]
    title = "Validation loss: mean over seeds, and each seed" if of_groups else "Loss of each run"

    def draw(title: str):
        from attnlab import plots  # needs matplotlib

        return plots.runs(shown, title, groups=groups)

    if shown:
        try:
            paths.write_figure(folder / PLOT, draw(title))
            written[PLOT] = of_runs
        except UserError as error:  # without matplotlib
            print(error)
    ends = ", ".join(f"{row['run']} {row['loss']:.4g}" for row in of_runs.rows if row["loss"] is not None)
    figures = [Figure(title, f"Loss over steps. At the end: {ends}.", lambda _: draw(""))] if PLOT in written else []
    folded = {"All runs": of_runs.shown()} if of_groups else {}
    section = page.Section("Runs", table=(of_groups or of_runs).shown(), figures=figures, folded=folded)
    about = {"machine": provenance.machine()}
    page.write(folder / PAGE, f"Sweep of {len(of_runs.rows)} runs", about, [section])
    print(f"{', '.join([*written, PAGE])} are in {folder}")


if __name__ == "__main__":
    sys.exit(main())
