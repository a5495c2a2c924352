"""Options and output files shared by all studies.

A study is a module whose docstring begins with its claim, and which defines
  measure(options) → rows    the measurements, one dict per row of the table
  judge(rows) → Verdict      whether the claim held, with numbers
  draw(rows) → Figure        the figure
A study that trains on a text sets READS_TEXT = True.
"""

import csv
import importlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from absl import flags

from attnlab.errors import UserError
from attnlab.study.progress import Advance, StudyProgress, silent


class Options(NamedTuple):
    """Settings of a measurement.

    Attributes:
      fast: fewer seeds, points and steps: a minute on two cores.
      path: a text for the studies that train on one; "" for the Python language reference, which needs no download.
      progress: called once as `progress(total)` with the units of work ahead; returns `advance(amount=1)`, to be called
        as units are completed.
    """

    fast: bool = False
    path: str = ""
    progress: Callable[[float], Advance] = silent


class Verdict(NamedTuple):
    """Whether a claim held.

    Attributes:
      held: whether every part held.
      parts: for each part of the claim, whether it held, and the measurement in words.
    """

    held: bool
    parts: tuple[tuple[bool, str], ...]

    @classmethod
    def of(cls, *parts: tuple[bool | np.bool_, str]) -> "Verdict":
        """Build a verdict from its parts.

        >>> print(Verdict.of((True, "rises by 2"), (False, "never falls: it fell by 1")))
        the claim does not hold
          held    rises by 2
          failed  never falls: it fell by 1
        """
        parts = tuple((bool(held), text) for held, text in parts)
        return cls(all(held for held, _ in parts), parts)

    def title(self, finding: str) -> str:
        """A figure title: the finding if the claim held, else the first part that failed."""
        failed = next((text for held, text in self.parts if not held), None)
        return finding if failed is None else f"Not as claimed: {failed}"

    def __str__(self):
        lines = [f"  {'held' if held else 'failed':<8}{text}" for held, text in self.parts]
        return "\n".join([f"the claim {'holds' if self.held else 'does not hold'}", *lines])


def load(name: str) -> ModuleType:
    """Import a study by name."""
    return importlib.import_module(f"attnlab.study.{name}")


def claim(study: ModuleType) -> str:
    """The claim: the first line of a study's docstring."""
    return study.__doc__.strip().splitlines()[0]


def define(values, argv) -> None:
    """Define the flags."""
    flags.DEFINE_bool("fast", False, "fewer seeds, points and steps: a minute on two cores", flag_values=values)
    flags.DEFINE_string("out", None, "a new folder for the results (default: runs/study-NAME)", flag_values=values)
    flags.DEFINE_string(
        "path",
        "",
        "text file for the studies that train on one; empty for the Python language reference",
        flag_values=values,
    )


def run(name: str, study: ModuleType, values) -> int:
    """Run a study and write NAME.csv, NAME.png and verdict.txt. Returns 0 whether or not the claim held.

    Raises:
      UserError: the output folder is not empty or cannot be written, or `--path` is given to a study without a text.
    """
    folder = Path(values.out or f"runs/study-{name}")
    if values.path and not getattr(study, "READS_TEXT", False):
        raise UserError(f"--path={values.path}: {name} does not train on a text: remove this flag")
    try:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"--out={folder} is a file: name a folder")
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"--out={folder} is not empty: choose a new folder")
        folder.mkdir(parents=True, exist_ok=True)  # fail now rather than after an hour of measuring
    except OSError as error:
        raise UserError(f"--out={folder} cannot be written ({error.strerror}): choose another folder") from error

    print(claim(study), flush=True)
    start = time.perf_counter()
    with StudyProgress() as progress:
        rows = study.measure(Options(values.fast, values.path, progress.expect))
    verdict = study.judge(rows)
    write_csv(folder / f"{name}.csv", rows)
    with mpl.rc_context({"backend": "agg"}):
        figure = study.draw(rows)
        figure.savefig(folder / f"{name}.png", dpi=160)
        plt.close(figure)
    text = f"{claim(study)}\n{verdict}"
    (folder / "verdict.txt").write_text(text + "\n", encoding="utf-8")
    print(f"{verdict}\n{len(rows)} rows and the figure are in {folder} ({time.perf_counter() - start:.0f} s)")
    return 0


def write_csv(path: Path, rows: Sequence[dict]) -> None:
    """Write rows as CSV, with a column for each key of any row, in order of first appearance."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def table(rows: Sequence[dict], by: str, value: str) -> dict:
    """Group rows by `by`, sorted: the list of `value`s of each group.

    >>> table([{"d": 1, "norm": 2.0}, {"d": 1, "norm": 4.0}, {"d": 3, "norm": 5.0}], "d", "norm")
    {1: [2.0, 4.0], 3: [5.0]}
    """
    grouped = {}
    for row in rows:
        grouped.setdefault(row[by], []).append(row[value])
    return dict(sorted(grouped.items()))
