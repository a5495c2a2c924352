"""All studies as processes, and one HTML report of their verdicts and figures.

python -m attnlab.study all --fast --out runs/all
python -m attnlab.study all --only=markov,induction,path/to/mine.py --out runs/some

A study that fails does not end the others. The report is written anew after each study; results that are there already
are kept, so that the same command goes on where it was killed.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from absl import flags

from attnlab.study import page, registry, running
from attnlab.study.page import Outcome
from attnlab.support import paths, workers
from attnlab.support.errors import UserError

REPORT, LOGS = "report.html", "logs"


def define(values, argv) -> None:
    """Define the flags."""
    running.define(values, argv)
    values["out"].help = "a folder for the results and report.html (default: runs/study-all)"
    flags.DEFINE_list("only", None, "names and files of the studies to run, all of them by default", values)
    flags.DEFINE_integer("jobs", 1, "studies at a time; each uses all cores", lower_bound=1, flag_values=values)


def run(values) -> int:
    """Run the studies and write `report.html`; returns 1 if one failed, whatever the verdicts."""
    folder = Path(values.out or "runs/study-all")
    studies = list(dict.fromkeys(values.only or registry.STUDIES))
    names = [registry.name_of(study) for study in studies]
    for study in studies:
        registry.check(study)
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(f"--only names {min(twice)} twice: two studies of one name cannot share a folder")

    def foreign(found: list[str]) -> str:
        strange = [name for name in found if name not in (REPORT, LOGS) and not _is_study(folder / name)]
        return f"holds {strange[0]!r}, which is not a study's result" if strange else ""

    try:
        with paths.claim(folder, "--out", foreign) as lock, workers.interruptible():
            outcomes = _run_all(dict(zip(names, studies)), folder, values, lock)
    except workers.Interrupted as stopped:
        return 128 + stopped.args[0]
    failed = [name for name, outcome in outcomes.items() if outcome.result is None]
    if failed:
        print(f"error: {', '.join(failed)} failed: see {folder / LOGS}", file=sys.stderr)
    print(f"the report is {folder / REPORT}")
    return 1 if failed else 0


def _run_all(studies: dict[str, str], folder: Path, values, lock: int) -> dict[str, Outcome]:
    """Run the studies that have no result yet, and write the report after each; the outcomes by name."""
    outcomes = _kept(studies, folder, values)
    modules = {name: _module(name, studies[name], folder, values) for name in studies if name not in outcomes}
    if outcomes:
        print(f"{len(outcomes)} of {len(studies)} have run before, and are kept", flush=True)
    for ended in workers.run(modules, values.jobs, folder / LOGS, lock, started=_print_start):
        result = None if ended.error else running.Result.read(folder / ended.name)
        error = "" if result else ended.error or "it wrote no result"
        outcomes[ended.name] = Outcome(ended.name, result, error)
        print(line(outcomes[ended.name]), flush=True)
        _write(outcomes, studies, folder)
    if not modules:
        _write(outcomes, studies, folder)
    return outcomes


def _kept(studies: dict[str, str], folder: Path, values) -> dict[str, Outcome]:
    """The outcomes of an earlier run, by name; UserError if it had other flags."""
    kept = {}
    for name, study in studies.items():
        if result := running.Result.read(folder / name):
            if (result.fast, result.path) != (values.fast, _path_for(study, values)):
                before = f"{'with' if result.fast else 'without'} --fast"
                before += f" and --path={result.path}" if result.path else ""
                message = f"holds {name} run {before}: choose a new folder, or give the same flags"
                raise UserError(f"--out={folder} {message}")
            kept[name] = Outcome(name, result)
    return kept


def _is_study(path: Path) -> bool:
    """Whether a path holds a result, is hidden, or is left by a study that was killed: empty but for hidden files."""
    if path.name.startswith("."):
        return True
    return path.is_dir() and (running.Result.read(path) is not None or running.is_empty(os.listdir(path)))


def _path_for(study: str, values) -> str:
    """The text for a study to train on; "" for the default one, and for studies that train on none."""
    with contextlib.suppress(UserError):  # a file that cannot be imported fails in its process
        return values.path if values.path and registry.reads_text(registry.load(study)) else ""
    return ""


def _module(name: str, study: str, folder: Path, values) -> list[str]:
    path = _path_for(study, values)
    options = ["--fast"] * values.fast + [f"--path={path}"] * bool(path)
    return ["attnlab.study", study, f"--out={folder / name}", *options]


def _print_start(name: str) -> None:
    print(f"{name:<14} started at {time.strftime('%H:%M:%S')}", flush=True)


def line(outcome: Outcome) -> str:
    """An outcome in one line."""
    if outcome.result is None:
        return f"{outcome.name:<14} failed: {outcome.error}"
    held = "holds" if outcome.result.held else "does not hold"
    return f"{outcome.name:<14} {held:<14} {outcome.result.seconds:5.0f} s   {outcome.result.claim}"


def _write(outcomes: dict[str, Outcome], names: Iterable[str], folder: Path) -> None:
    shown = [outcomes.get(name, Outcome(name)) for name in names]
    paths.write_text(folder / REPORT, page.render(shown, folder))
