"""All studies, each in a process of its own, and one HTML report of their verdicts and figures.

python -m attnlab.study all --fast --out runs/all
python -m attnlab.study all --only=markov,induction,path/to/mine.py --out runs/some

A study that fails does not end the others. The report is written anew after each study; results that are there already
are kept, so that the same command goes on where it was killed.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import NamedTuple

from absl import flags

from attnlab.study import page, registry, running
from attnlab.support.errors import UserError

REPORT, LOGS = "report.html", "logs"


class Outcome(NamedTuple):
    """How the run of a study ended.

    Attributes:
      name: of the study.
      result: None if it failed or has not run.
      error: the last line that it printed to standard error, if it failed.
    """

    name: str
    result: running.Result | None = None
    error: str = ""


def define(values, argv) -> None:
    """Define the flags."""
    running.define(values, argv)
    values["out"].help = "a folder for the results and report.html (default: runs/study-all)"
    flags.DEFINE_list("only", None, "names and files of the studies to run, all of them if not given", values)
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
    outcomes = _kept(folder, studies, values)
    ahead = [study for study in studies if registry.name_of(study) not in outcomes]
    if outcomes:
        print(f"{len(outcomes)} of {len(studies)} have run before, and are kept", flush=True)
    (folder / LOGS).mkdir(parents=True, exist_ok=True)
    for outcome in _run_all(ahead, folder, values):
        outcomes[outcome.name] = outcome
        print(line(outcome), flush=True)
        _write(folder / REPORT, [outcomes.get(name, Outcome(name)) for name in names], folder)
    if not ahead:
        _write(folder / REPORT, [outcomes[name] for name in names], folder)
    failed = [name for name, outcome in outcomes.items() if outcome.result is None]
    if failed:
        print(f"error: {', '.join(failed)} failed: see {folder / LOGS}", file=sys.stderr)
    print(f"the report is {folder / REPORT}")
    return 1 if failed else 0


def line(outcome: Outcome) -> str:
    """An outcome in one line.

    >>> line(Outcome("mine", None, "mine.py, line 3: ValueError: no"))
    'mine           failed: mine.py, line 3: ValueError: no'
    """
    if outcome.result is None:
        return f"{outcome.name:<14} failed: {outcome.error}"
    held = "holds" if outcome.result.held else "does not hold"
    return f"{outcome.name:<14} {held:<14} {outcome.result.seconds:5.0f} s   {outcome.result.claim}"


def _kept(folder: Path, studies: list[str], values) -> dict[str, Outcome]:
    """The outcomes of an earlier run with the same flags, by name.

    Raises:
      UserError: the folder holds something else.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out={folder} is a file: name a folder")
    there = [path.name for path in folder.iterdir() if not path.name.startswith(".")] if folder.exists() else []
    results = {name: running.Result.read(folder / name) for name in there if (folder / name).is_dir()}
    for name in there:
        if name not in (REPORT, LOGS) and not results.get(name) and not _is_empty(folder / name):
            raise UserError(f"--out={folder} holds {name!r}, which is no study's result: choose a new folder")
    kept = {}
    for study in studies:
        name = registry.name_of(study)
        if result := results.get(name):
            if (result.fast, result.path) != (values.fast, _path_for(study, values)):
                given = f"{'with' if result.fast else 'without'} --fast"
                given += f" and --path={result.path}" if result.path else ""
                raise UserError(f"--out={folder} holds {name} run {given}: choose a new folder, or give the same flags")
            kept[name] = Outcome(name, result)
    return kept


def _is_empty(path: Path) -> bool:
    """Whether this is the folder of a study that was killed, which may have left hidden files."""
    return path.is_dir() and all(inside.name.startswith(".") for inside in path.iterdir())


def _path_for(study: str, values) -> str:
    """The text for a study to train on; "" for the default one, and for studies that train on none."""
    with contextlib.suppress(UserError):  # a file that cannot be imported fails in its own process
        return values.path if values.path and registry.reads_text(registry.load(study)) else ""
    return ""


def _run_all(studies: list[str], folder: Path, values) -> Iterator[Outcome]:
    """Run the studies in processes, and yield the outcomes as they end."""
    running_now = set()
    with futures.ThreadPoolExecutor(values.jobs) as pool:
        jobs = [pool.submit(_run, study, folder, values, running_now) for study in studies]
        try:
            for job in futures.as_completed(jobs):
                yield job.result()
        except BaseException:  # interrupted
            for job in jobs:
                job.cancel()
            for process in list(running_now):
                process.terminate()
            raise


def _run(study: str, folder: Path, values, running_now: set) -> Outcome:
    name = registry.name_of(study)
    command = [sys.executable, "-m", "attnlab.study", study, f"--out={folder / name}"]
    command += ["--fast"] * values.fast
    if path := _path_for(study, values):
        command.append(f"--path={path}")
    print(f"{name:<14} started at {time.strftime('%H:%M:%S')}", flush=True)
    log = folder / LOGS / f"{name}.txt"
    with log.open("w", encoding="utf-8") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        running_now.add(process)
        code = process.wait()
        running_now.discard(process)
    result = running.Result.read(folder / name)
    if code == 0 and result is not None:
        return Outcome(name, result)
    lines = [text for text in log.read_text(encoding="utf-8", errors="replace").splitlines() if text.strip()]
    said = lines[-1].removeprefix("error: ") if lines else "it printed nothing"
    return Outcome(name, None, said if code > 0 else f"killed by signal {-code}: {said}")


def _write(path: Path, outcomes: list[Outcome], folder: Path) -> None:
    """Write the report, whole or not at all."""
    sections = []
    for outcome in outcomes:
        figure = folder / outcome.name / f"{outcome.name}.png"
        sections.append(page.Section(outcome.name, outcome.result, outcome.error, figure))
    handle, partial = tempfile.mkstemp(prefix=".report-", suffix=".html", dir=path.parent)
    with open(handle, "w", encoding="utf-8") as file:
        file.write(page.render(sections))
    Path(partial).chmod(0o644)
    os.replace(partial, path)
