"""Run all studies as processes, and write one HTML report of their verdicts and figures.

python -m attnlab.study all --fast --out runs/all
python -m attnlab.study all --only=markov,induction,path/to/mine.py --out runs/some

A study that fails does not end the others. The report is rewritten after each study. Studies with results are not run
again, so repeating a killed command resumes it.
"""

import collections
import sys
from collections.abc import Mapping
from pathlib import Path

from absl import flags

from attnlab.results import page
from attnlab.results.charts import Figure
from attnlab.results.table import Column, Table
from attnlab.study import registry, running
from attnlab.study.running import Result
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
    """Run the studies and write `report.html`; return 1 if one failed, whatever the verdicts."""
    folder, ended, modules = Path(values.out or "runs/study-all"), {}, {}
    for study in dict.fromkeys(values.only or registry.STUDIES):
        name, path = Path(study).stem, values.path if registry.reads_text(registry.load(study)) else ""
        if name in ended:
            raise UserError(f"--only names {name} twice: two studies of one name cannot share a folder: rename one")
        ended[name] = result = running.read_result(folder / name / running.RESULT)
        if result is None:
            options = [f"--out={folder / name}", *["--fast"] * values.fast, *[f"--path={path}"] * bool(path)]
            modules[name] = ["attnlab.study", study, *options]
        elif (result.fast, result.path) != (values.fast, path):
            before = f"{'with' if result.fast else 'without'} --fast and with --path={result.path}"
            raise UserError(f"--out={folder} holds {name}, run {before}: choose a new folder, or give the same flags")

    def foreign(names: list[str]) -> str:
        return f"holds other files and no {REPORT}" if names and REPORT not in names else ""

    try:
        with paths.claim(folder, "--out", foreign) as lock, workers.interruptible():
            _write(ended, folder)
            if len(modules) < len(ended):
                print(f"{len(ended) - len(modules)} of {len(ended)} studies have already run", flush=True)
            for end in workers.run(modules, values.jobs, folder / LOGS, lock):
                result = running.read_result(folder / end.name / running.RESULT)
                ended[end.name] = result or end.error or "it wrote no result"
                print(_line(end.name, ended[end.name]), flush=True)
                _write(ended, folder)
    except workers.Interrupted as stopped:
        return 128 + stopped.args[0]
    if failed := [name for name, result in ended.items() if isinstance(result, str)]:
        print(f"error: {', '.join(failed)} failed: see {folder / LOGS}", file=sys.stderr)
    print(f"the report is {folder / REPORT}")
    return 1 if failed else 0


def _outcome(result: Result | str | None) -> str:
    """Say how a study ended: `result` is its result or its error, or None before it has run."""
    if not result or isinstance(result, str):
        return "failed" if result else "not run yet"
    return "holds" if result.held else "does not hold"


def _line(name: str, result: Result | str | None) -> str:
    if not isinstance(result, Result):
        return f"{name:<14} {_outcome(result)}{f': {result}' if result else ''}"
    return f"{name:<14} {_outcome(result):<14} {result.seconds:5.0f} s   {result.claim}"


COLUMNS = [
    Column("study", "study", lambda of: of[0]),
    Column("outcome", "outcome", lambda of: _outcome(of[1]), help="Whether every part of the claim holds."),
    Column("seconds", "time", lambda of: getattr(of[1], "seconds", None), "s", ".0f"),
    Column("claim", "claim", lambda of: of[1] if isinstance(of[1], str) else getattr(of[1], "claim", None)),
]


def _write(ended: Mapping[str, Result | str | None], folder: Path) -> None:
    """Write the report: how each study ended, and a section with a figure for each that ran."""
    ran, table = [result for result in ended.values() if isinstance(result, Result)], Table.of(COLUMNS, ended.items())
    outcomes = collections.Counter(row["outcome"] for row in table.rows)
    summary = f"{outcomes['holds']} of {len(ran)} claims hold"
    others = {"failed to run": outcomes["failed"], "not run yet": outcomes["not run yet"]}
    summary += "".join(f"; {count} {state}" for state, count in others.items() if count)
    sections = [page.Section("Claims", [summary], table=table.shown()), *(_section(each, folder) for each in ran)]
    page.write(folder / REPORT, f"Studies of attention: {summary}", {}, sections)


def _section(result: Result, folder: Path) -> page.Section:
    name, options = result.name, "--fast, " * result.fast + f"--path={result.path}, " * bool(result.path)
    versions = ", ".join(f"{package} {version}" for package, version in result.versions.items())
    ran = f"{options}{result.seeds} seeds, {result.rows} rows, {result.date}, {result.machine}, {versions}"
    return page.Section(
        name,
        [result.claim, *(f"{'Held' if held else 'Failed'}: {text}" for held, text in result.parts)],
        figures=[Figure(result.caption, result.caption, png=(folder / name / f"{name}.png").read_bytes())],
        folded={"How it was measured": f"{result.setup}\n\n{ran}"},
    )
