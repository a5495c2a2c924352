"""What every study shares: its options, and what it leaves behind.

A study is a module whose docstring begins with its claim, and which has
  measure(options) → rows    what was measured, a dict for each row of the table
  judge(rows) → Verdict      whether the claim held, in numbers
  draw(rows) → Figure        the picture of it
One that trains on a text says READS_TEXT = True.
"""

import csv
import importlib
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
from absl import flags

from attnlab.errors import UserError


class Options(NamedTuple):
    """How to measure.

    Attributes:
      fast: fewer seeds, points and steps: a minute on two cores.
      path: a text for the studies that train on one; "" for the Python language reference, which is always there.
    """

    fast: bool = False
    path: str = ""


class Verdict(NamedTuple):
    """Whether a claim held.

    Attributes:
      held: it did, in every part.
      parts: what was measured for each part of the claim, and whether that part held.
    """

    held: bool
    parts: tuple[tuple[bool, str], ...]

    @classmethod
    def of(cls, *parts: tuple[bool | np.bool_, str]) -> "Verdict":
        """The verdict over parts.

        >>> print(Verdict.of((True, "rises by 2"), (False, "never falls: it fell by 1")))
        the claim does not hold
          held    rises by 2
          failed  never falls: it fell by 1
        """
        parts = tuple((bool(held), text) for held, text in parts)
        return cls(all(held for held, _ in parts), parts)

    def title(self, finding: str) -> str:
        """A figure's title: the finding where the claim held, else the first part of it that did not."""
        failed = next((text for held, text in self.parts if not held), None)
        return finding if failed is None else f"Not as claimed: {failed}"

    def __str__(self):
        lines = [f"  {'held' if held else 'failed':<8}{text}" for held, text in self.parts]
        return "\n".join([f"the claim {'holds' if self.held else 'does not hold'}", *lines])


def load(name: str) -> ModuleType:
    """The module of a study."""
    return importlib.import_module(f"attnlab.study.{name}")


def claim(study: ModuleType) -> str:
    """The first line of its docstring."""
    return study.__doc__.strip().splitlines()[0]


def define(values, argv) -> None:
    """The flags."""
    flags.DEFINE_bool("fast", False, "fewer seeds, points and steps: a minute on two cores", flag_values=values)
    flags.DEFINE_string("out", None, "a new folder for the results; runs/study-NAME when absent", flag_values=values)
    flags.DEFINE_string(
        "path", "", "text for the studies that train on one; the Python language reference if empty", flag_values=values
    )


def run(name: str, study: ModuleType, values) -> int:
    """Measures, and writes NAME.csv, NAME.png and verdict.txt. Returns 0 whether the claim held or not.

    Raises:
      UserError: the folder holds something already, or cannot be written.
    """
    folder = Path(values.out or f"runs/study-{name}")
    if values.path and not getattr(study, "READS_TEXT", False):
        raise UserError(f"--path={values.path}: {name} reads no text, leave it out")
    try:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"--out={folder} is a file: name a folder")
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"--out={folder} holds files already, which stay as they are: choose a new folder")
        folder.mkdir(parents=True, exist_ok=True)  # one that cannot be written is known before an hour of measuring
    except OSError as error:
        raise UserError(f"--out={folder} cannot be written ({error.strerror}): choose another folder") from error

    print(claim(study), flush=True)
    start = time.perf_counter()
    rows = study.measure(Options(values.fast, values.path))
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
    """A column for each name in any row, in the order in which they come up."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def table(rows: Sequence[dict], by: str, value: str) -> dict:
    """For each value of `by`, in order: the list of `value`s of its rows.

    >>> table([{"d": 1, "norm": 2.0}, {"d": 1, "norm": 4.0}, {"d": 3, "norm": 5.0}], "d", "norm")
    {1: [2.0, 4.0], 3: [5.0]}
    """
    grouped = {}
    for row in rows:
        grouped.setdefault(row[by], []).append(row[value])
    return dict(sorted(grouped.items()))
