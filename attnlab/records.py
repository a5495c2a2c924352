"""The records of runs side by side: as columns, and as CSV."""

import glob
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from attnlab.support import paths
from attnlab.support.errors import UserError
from attnlab.training import metrics as metrics_lib

_TEXT = ("run", "split", "params_sha256")


def metrics(workdirs: str | Path | Iterable[str | Path], split: str = "") -> dict[str, np.ndarray]:
    """The records of runs as columns, one row for each line of their `metrics.jsonl`.

    Args:
      workdirs: the folder of a run, a glob such as "runs/sweep/*", or several of either; if a glob also matches other
        folders, these are ignored.
      split: "train", "val", "final" or "diverged" to select such records; "" for all.

    Returns:
      Arrays of equal length by name: "run" (the name of its folder, or the path if two folders have the same name),
      "step", "split", "loss" (nats per token) and all other fields of the records. Numbers are float64 and steps int64.
      A field that a record lacks is NaN, or "" in a column of text.

    Raises:
      UserError: a folder without a `metrics.jsonl`, a glob that matches no run, or a damaged file.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp()) / "sancho"
    >>> folder.mkdir()
    >>> _ = (folder / "metrics.jsonl").write_text('{"step": 10, "split": "val", "loss": 2.5}')
    >>> metrics(folder)["loss"]
    array([2.5])
    """
    rows = []
    for name, folder in named(workdirs).items():
        rows += [{"run": name} | record for record in metrics_lib.read(folder / "metrics.jsonl")]
    rows = [row for row in rows if not split or row["split"] == split]
    names = dict.fromkeys(("run", "step", "split", "loss"))
    for row in rows:
        names |= dict.fromkeys(row)
    return {name: _column(name, rows) for name in names}


def _column(name: str, rows: list[dict]) -> np.ndarray:
    values = [row.get(name) for row in rows]
    if name == "step":
        return np.array(values, np.int64)
    if name in _TEXT or any(isinstance(value, str) for value in values):
        return np.array(["" if value is None else str(value) for value in values], str)
    return np.array([np.nan if value is None else value for value in values], np.float64)


def named(workdirs: str | Path | Iterable[str | Path]) -> dict[str, Path]:
    """The folders of runs by their names; arguments and errors as for `metrics`."""
    patterns = [workdirs] if isinstance(workdirs, str | os.PathLike) else list(workdirs)
    folders = dict.fromkeys(folder for pattern in patterns for folder in _matches(str(pattern)))
    names = [folder.resolve().name for folder in folders]
    return {name if names.count(name) == 1 else str(folder): folder for name, folder in zip(names, folders)}


def _matches(pattern: str) -> list[Path]:
    folder = Path(pattern).expanduser()
    if _has_records(folder):  # before globbing, because its name may hold brackets
        return [folder]
    if not glob.has_magic(pattern):
        raise UserError(f"{pattern} holds no metrics.jsonl: name the folder of a run, or a glob such as {pattern}/*")
    if folders := [Path(path) for path in sorted(glob.glob(str(folder))) if _has_records(Path(path))]:
        return folders
    raise UserError(f"{pattern} matches no folder with a metrics.jsonl: name the folder of a run, or another glob")


def _has_records(folder: Path) -> bool:
    return (folder / "metrics.jsonl").is_file()


def write_csv(path: str | Path, columns: Mapping[str, Iterable]) -> Path:
    """Write columns, such as the result of `metrics`, as CSV with a header line, and return the path.

    NaN and None become empty cells. An existing file is replaced.

    >>> import tempfile
    >>> path = write_csv(Path(tempfile.mkdtemp()) / "losses.csv", {"step": [1, 2], "loss": [2.5, float("nan")]})
    >>> path.read_text().splitlines()
    ['step,loss', '1,2.5', '2,']
    """
    paths.write_csv(Path(path), [dict(zip(columns, row)) for row in zip(*columns.values())], list(columns))
    return Path(path)
