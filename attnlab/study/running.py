"""One study, run into a folder."""

import contextlib
import dataclasses
import datetime
import inspect
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import jax
import matplotlib as mpl
import matplotlib.pyplot as plt
from absl import flags
from matplotlib.figure import Figure

from attnlab.study import registry
from attnlab.study.report import Options, Verdict
from attnlab.study.study_progress import StudyProgress
from attnlab.support import files, paths
from attnlab.support.errors import UserError
from attnlab.support.paths import write_csv

RESULT = "result.json"


@dataclasses.dataclass(frozen=True)
class Result:
    """The verdict of a study, beside its rows and its figure; kept as `result.json`."""

    name: str
    claim: str  # the first line of the docstring
    setup: str  # the rest of it
    fast: bool
    path: str  # the text that the study ran on, "" for the default text
    held: bool
    parts: list  # of the claim: whether each held, and the measurement
    seeds: int  # 0 where the rows name none
    rows: int
    seconds: float
    date: str
    machine: str  # the processor or accelerator, and the number of devices
    versions: dict  # of packages
    caption: str = ""  # the docstring of `draw`

    @classmethod
    def read(cls, folder: Path, file: str = RESULT) -> "Result | None":
        """Read the result in a folder; None where there is none, UserError where the file holds something else."""
        try:
            fields = files.read_json(folder / file)
            fields.pop("quoted", None)  # of results of earlier versions
            return cls(**fields)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{folder / file} is not a result of a study: remove it or choose a new folder") from error


def define(values, argv) -> None:
    """Define the flags."""
    flags.DEFINE_bool("fast", False, "fewer seeds, points and steps: a minute on two cores", flag_values=values)
    flags.DEFINE_string("out", None, "a new folder for the results (default: runs/study-NAME)", flag_values=values)
    meaning = "text file for the studies that train on one; empty for the Python language reference"
    flags.DEFINE_string("path", "", meaning, flag_values=values)


def run(name_or_file: str, values) -> int:
    """Run a study and write NAME.csv, NAME.png, verdict.txt and result.json, all at once; 0 whatever the verdict."""
    study, name = registry.load(name_or_file), registry.name_of(name_or_file)
    if values.path and not registry.reads_text(study):
        raise UserError(f"--path={values.path}: {name} does not train on a text: remove this flag")
    folder = Path(values.out or f"runs/study-{name}")
    with paths.claim(folder, "--out", lambda names: "" if is_empty(names) else "is not empty"):
        print(registry.claim(study), flush=True)
        one_device_per_core()
        with _blaming(name_or_file):
            measured = _measure(study, name, values)
        text = "\n".join([registry.claim(study), str(measured.verdict)])
        result = dataclasses.asdict(_result(study, name, values, measured))
        with _written_at_once(folder) as partial:
            write_csv(partial / f"{name}.csv", measured.rows)
            paths.write_figure(partial / f"{name}.png", measured.figure)
            paths.write_text(partial / "verdict.txt", text + "\n")
            paths.write_text(partial / RESULT, json.dumps(result, ensure_ascii=False, indent=1) + "\n")
        plt.close(measured.figure)
    where = f"{len(measured.rows)} rows and the figure are in {folder} ({measured.seconds:.0f} s)"
    print(*text.splitlines()[1:], where, sep="\n")
    return 0


class _Measured(NamedTuple):
    """Results of the functions of a study, and the seconds that they took."""

    rows: list[dict]
    verdict: Verdict
    figure: Figure
    seconds: float


def _measure(study: ModuleType, name: str, values) -> _Measured:
    start = time.perf_counter()
    with StudyProgress() as progress:
        rows = study.measure(Options(values.fast, values.path, progress.expect))
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{name}: measure returned {str(rows)[:60]}: expected a list of rows, one dict each")
    verdict = study.judge(rows)
    if not isinstance(verdict, Verdict):
        raise UserError(f"{name}: judge returned {str(verdict)[:60]}: expected a Verdict, as Verdict.of makes it")
    with mpl.rc_context({"backend": "agg"}):
        figure = study.draw(rows)
    if not isinstance(figure, Figure):
        raise UserError(f"{name}: draw returned {str(figure)[:60]}: expected a figure of matplotlib")
    return _Measured(rows, verdict, figure, time.perf_counter() - start)


def is_empty(names: Iterable[str]) -> bool:
    """Whether a folder holds nothing but hidden files, which a study that was killed may have left."""
    return all(name.startswith(".") for name in names)


@contextlib.contextmanager
def _written_at_once(folder: Path) -> Iterator[Path]:
    """A hidden folder to write into, whose files move up into `folder` when all are written, the result last."""
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder, ignore_cleanup_errors=True) as partial:
        yield Path(partial)
        for path in sorted(Path(partial).iterdir(), key=lambda path: path.name == RESULT):
            os.replace(path, folder / path.name)


@contextlib.contextmanager
def _blaming(study: str) -> Iterator[None]:
    """Errors of a user's study in one line; errors of attnlab's studies are bugs, and keep their traceback."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not registry.is_file(study):
            raise
        raise UserError(registry.blame(error, Path(study))) from error


def one_device_per_core() -> None:
    """Let JAX make a device of each core, so that `fitting.fit_seeds` uses them all; too late once JAX has started."""
    chosen = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    with contextlib.suppress(RuntimeError):
        if jax.config.jax_num_cpu_devices == -1 and not chosen:
            jax.config.update("jax_num_cpu_devices", _cores())


def _result(study: ModuleType, name: str, values, measured: _Measured) -> Result:
    devices = jax.devices()
    on_cpu = devices[0].platform == "cpu"
    return Result(
        name=name,
        claim=registry.claim(study),
        setup="\n".join(study.__doc__.strip().splitlines()[1:]).strip(),
        fast=values.fast,
        path=values.path,
        held=measured.verdict.held,
        parts=list(measured.verdict.parts),
        seeds=len({row["seed"] for row in measured.rows if "seed" in row}),
        rows=len(measured.rows),
        seconds=round(measured.seconds, 1),
        date=datetime.date.today().isoformat(),
        machine=_processor() if on_cpu else f"{len(devices)} × {devices[0].device_kind}",
        versions={package: metadata.version(package) for package in ("attnlab", "jax", "flax", "optax", "numpy")}
        | {"python": platform.python_version()},
        caption=inspect.getdoc(study.draw) or "",
    )


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    """The CPU's name and its number of cores."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return f"{_cores()} cores of {name}"
