"""Train with every combination of some values, and compare the runs.

    attnlab sweep --config=quickstart --grid config.optimizer.learning_rate=1e-3,3e-3 --grid config.seed=0,1

Fields in one --grid vary together, so this gives two runs, not four:

    --grid "config.model.width=64,128 config.optimizer.learning_rate=1e-3,5e-4"

Put a value with a comma in double quotes. Fields that may be None also take None, as in
config.model.attention.window=None,16.

Each run has its own folder in --workdir, named after its values. Runs that differ only in seed and learning rate share
a process and its compiled programs; on GPUs --together trains them as one program. The same command resumes a stopped
or killed sweep, and keeps finished runs; with more values it trains the new ones. A failed run does not end the others.
At the end runs.csv has a line for each run, the lowest final loss first, runs.png shows their losses, and sweep.html is
a page with both. If seeds vary beside another field, runs that differ only in the seed form a group: groups.csv has the
mean final loss of each group with its 95 % interval over seeds, and runs.png has a colour for each group.
`python -m attnlab.sweep` is the same command.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from attnlab import commands, experiments, train
from attnlab import config as configs
from attnlab.config import RunConfig
from attnlab.nn import custom, versions
from attnlab.support import workers
from attnlab.support.errors import UserError
from attnlab.sweeping import grid, results, training_runs
from attnlab.training.program import shared_programs

MARKER = "sweep.json"
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
    """Train runs side by side, each in its own folder in `workdir`, named after the values in which it differs.

    The same call continues where it was stopped, and keeps finished runs.

    Args:
      configs: the config of each run.
      workdir: receives the runs, the table `runs.csv`, `groups.csv` if seeds vary beside other fields, and plots.
      jobs: processes at a time; 0 trains in this process, which is necessary if a layer or mask is defined only here.
      together: how many runs with the same compiled program train at once; "auto": all on a GPU, one on CPUs.

    Returns:
      A record for each run, the lowest final loss first; failed runs come last, with their "error".

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
    """Train runs, then print and write their tables; return the records, and the errors of failed runs by name."""
    finished = {point.name for point in points if train.is_finished(point.config, folder / point.name)}
    training_runs.check_texts(points, finished, folder)
    with training_runs.claimed(folder, MARKER, about) as lock:
        failed = training_runs.Runner(len(points), lock=lock, **runner).train(points, finished, folder)
    return results.report(points, folder, failed), failed


if __name__ == "__main__":
    sys.exit(main())
