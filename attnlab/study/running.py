"""Run one study into a folder."""

import contextlib
import datetime
import inspect
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import jax
from absl import flags
from rich.progress import BarColumn, TaskProgressColumn, TextColumn

from attnlab import compilation
from attnlab.study import registry
from attnlab.study.report import Options, Verdict
from attnlab.support import files, paths, provenance
from attnlab.support.errors import UserError
from attnlab.support.progress import Progress

RESULT, VERDICT = "result.json", "verdict.txt"


class Result(NamedTuple):
    """The content of result.json.

    Attributes:
      claim, setup: the first line of the study's docstring, and the other lines.
      path: the text file that the study ran on; "" for the default text.
      held: whether all parts of the claim held.
      parts: whether each part of the claim held, and the measurement in words.
      seeds: number of seeds; 0 if the rows name none.
      rows: number of rows.
    """

    name: str
    claim: str
    setup: str
    fast: bool
    path: str
    held: bool
    parts: Sequence[tuple[bool, str]]
    seeds: int
    rows: int
    seconds: float
    date: str
    machine: str
    versions: dict[str, str]
    caption: str = ""


def read_result(file: Path) -> Result | None:
    """Read the result in a file; return None if there is no such file, and raise UserError if it is damaged."""
    try:
        return Result(**files.read_json(file)) if file.exists() else None
    except (ValueError, TypeError) as error:
        raise UserError(f"{file} is not a study's result ({error}): delete it, and run the study again") from error


class StudyProgress(Progress):
    """Show the progress of the work on standard error, so that standard output holds only the results."""

    def __init__(self, file=None, clock=None):
        columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"))
        super().__init__(*columns, file=file or sys.stderr, transient=True, clock=clock)

    def label(self, elapsed: int | float) -> str:
        seconds = elapsed * (self.total - self.done) / self.done
        return f"about {seconds:.0f} s left" if seconds < 100 else f"about {seconds / 60:.0f} min left"

    def line(self, elapsed: int | float) -> str:
        return f"{100 * self.done / self.total:.0f} % done, {self.label(elapsed)}" if self.done < self.total else ""


def define(values, argv) -> None:
    """Define the flags."""
    flags.DEFINE_bool("fast", False, "fewer seeds, points and steps: a minute on two cores", flag_values=values)
    flags.DEFINE_string("out", None, "a new folder for the results (default: runs/study-NAME)", flag_values=values)
    meaning = "text file for the studies that train on one; empty for the Python language reference"
    flags.DEFINE_string("path", "", meaning, flag_values=values)


def run(name_or_file: str, values) -> int:
    """Run a study and write NAME.csv, NAME.png, verdict.txt and, last, result.json; return 0 whatever the verdict."""
    study, name = registry.load(name_or_file), Path(name_or_file).stem
    if values.path and not registry.reads_text(study):
        raise UserError(f"--path={values.path}: {name} does not train on a text: remove this flag")
    folder = Path(values.out or f"runs/study-{name}")
    unfinished = (f"{name}.csv", f"{name}.png", VERDICT)  # left by a study that was killed while it wrote them

    def foreign(names: list[str]) -> str:
        return "is not empty" if any(each[0] != "." and each not in unfinished for each in names) else ""

    with paths.claim(folder, "--out", foreign):
        print(registry.claim(study), flush=True)
        compilation.fuse_no_sums()
        one_device_per_core()
        start = time.perf_counter()
        rows, verdict, figure = registry.with_errors_named(name_or_file, lambda: _measured(study, values))
        if not rows or not isinstance(verdict, Verdict) or not hasattr(figure, "savefig"):
            got = f"{str(rows)[:60]}, {str(verdict)[:60]}, {str(figure)[:60]}"
            raise UserError(f"{name} returned {got}: expected rows, a Verdict and a matplotlib figure")
        result = _result(study, name, values, rows, verdict, time.perf_counter() - start)
        paths.write_csv(folder / f"{name}.csv", rows)
        paths.write_figure(folder / f"{name}.png", figure)
        paths.write_text(folder / VERDICT, f"{result.claim}\n{verdict}\n")
        paths.write_text(folder / RESULT, json.dumps(result._asdict(), ensure_ascii=False, indent=1) + "\n")
    print(verdict)
    print(f"{len(rows)} rows and the figure are in {folder} ({result.seconds:.0f} s)")
    return 0


def _measured(study: ModuleType, values):
    with StudyProgress() as progress:
        rows = study.measure(Options(values.fast, values.path, progress.expect))
    return rows, study.judge(rows), study.draw(rows)


def one_device_per_core() -> None:
    """Make each core a JAX device, so that `fitting.fit_seeds` uses them all; without effect once JAX has started."""
    chosen = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    with contextlib.suppress(RuntimeError):
        if jax.config.jax_num_cpu_devices == -1 and not chosen:
            jax.config.update("jax_num_cpu_devices", provenance.cores())


def _result(study: ModuleType, name: str, values, rows, verdict: Verdict, seconds: float) -> Result:
    return Result(
        name=name,
        claim=registry.claim(study),
        setup="\n".join(study.__doc__.strip().splitlines()[1:]).strip(),
        fast=values.fast,
        path=values.path,
        held=verdict.held,
        parts=verdict.parts,
        seeds=len({row["seed"] for row in rows if "seed" in row}),
        rows=len(rows),
        seconds=round(seconds, 1),
        date=datetime.date.today().isoformat(),
        machine=provenance.machine(),
        versions=provenance.versions(),
        caption=inspect.getdoc(study.draw) or "",
    )
