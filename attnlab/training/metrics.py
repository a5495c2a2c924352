"""The records of a run: `metrics.jsonl`, its trackers, and a progress bar or lines on the terminal."""

import contextlib
import hashlib
import json
import math
import os
import resource
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from attnlab.support import files, status
from attnlab.support.errors import UserError
from attnlab.support.paths import named
from attnlab.support.progress import Progress
from attnlab.training.trackers import TensorBoard, Tracker


class MetricsLog:
    """`metrics.jsonl`: one flat JSON record per line, in the order of steps, without duplicates.

    Args:
      path: the file; created with the first record.
      offset: the value of `offset()` when the checkpoint from which the run resumes was saved; None for a new run.
        Records after this offset are removed, because they will be written again. Only a "final" record of `last_step`
        stays, because the run is extended from there.
      last_step: the step of that checkpoint.
      trackers: receive each record when it is written.

    Attributes:
      records: all records, including the records of earlier starts.
      lost: whether the file is missing although it had records when that checkpoint was saved.

    Raises:
      UserError: the file has changed before the offset.
    """

    def __init__(self, path: Path, offset: dict | None = None, last_step: int = 0, trackers: Sequence[Tracker] = ()):
        self.path, self.trackers = path, list(trackers)
        size = offset["bytes"] if offset else 0
        self.lost = bool(size) and not path.exists()
        kept, removed = b"", []
        if path.exists():
            with path.open("rb") as file:
                kept, removed = file.read(size), file.readlines()
            if offset and hashlib.sha256(kept).hexdigest() != offset["sha256"]:
                raise UserError(
                    f"{path} has changed since step {last_step} was saved: restore it, or move it away to "
                    "continue without its records"
                )
            if offset and removed and _is_final(removed[0], last_step):
                kept += removed.pop(0)
        if removed:
            os.truncate(path, len(kept))
        self._size, self._sha256 = len(kept), hashlib.sha256(kept)
        self.records = [json.loads(line) for line in kept.splitlines()]

    def offset(self) -> dict:
        """The end of the file, as checkpoints store it: `{"bytes": …, "sha256": …}`."""
        return {"bytes": self._size, "sha256": self._sha256.hexdigest()}

    def validation(self, step: int) -> dict | None:
        """The validation record of a step, or None."""
        return next((record for record in self.records if (record["split"], record["step"]) == ("val", step)), None)

    def write(self, **record) -> None:
        """Append a record to the file, and pass its numbers to the trackers."""
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        with named(self.path), self.path.open("ab") as file:
            file.write(line)
        self._size += len(line)
        self._sha256.update(line)
        self.records.append(record)
        numbers = {name: x for name, x in record.items() if name != "step" and isinstance(x, int | float)}
        for tracker in self.trackers:
            tracker.log(record["step"], {f"{record['split']}/{name}": x for name, x in numbers.items()})

    def write_text(self, step: int, text: str) -> None:
        """Write a sample to TensorBoard only."""
        for tracker in self.trackers:
            if isinstance(tracker, TensorBoard):
                tracker.log(step, {"sample": f"```\n{text}\n```"})

    def close(self) -> None:
        """Close the trackers."""
        for tracker in self.trackers:
            tracker.close()


def _is_final(line: bytes, step: int) -> bool:
    try:
        record = json.loads(line)
        return (record["step"], record["split"]) == (step, "final") and line.endswith(b"\n")
    except (ValueError, TypeError, KeyError):  # truncated
        return False


def read(path: Path) -> list[dict]:
    """Read the records of a `metrics.jsonl`, skipping a truncated last line; [] if there is no file.

    Raises:
      UserError: a line is not a record.
    """
    if not path.exists():
        return []
    try:
        lines = files.read_text(path).splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}): repair it or move it away") from error
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = files.parsed(line)
            if not isinstance(record["step"], int) or not isinstance(record["split"], str):
                raise TypeError("step or split has a wrong type")
            if record["split"] == "val" and not isinstance(record["loss"], int | float):
                raise TypeError("loss has a wrong type")
            records.append(record)
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines) and not line.endswith("\n"):
                break
            raise UserError(
                f"{path} line {number} is not a record ({line[:40]!r}): repair it or move it away"
            ) from error
    return records


def best_step(records: list[dict], steps: list[int]) -> int | None:
    """The step with the lowest recorded validation loss among `steps`; None if none was validated.

    >>> best_step([{"step": 2, "split": "val", "loss": 3.0}, {"step": 4, "split": "val", "loss": 2.5}], [2, 3])
    2
    """
    scored = {r["step"]: r["loss"] for r in records if r["split"] == "val" and r["step"] in steps}
    return min(scored, key=scored.get) if scored else None


def stalled(records: list[dict], patience: int) -> bool:
    """Whether none of the last `patience` evaluations improved on the lowest earlier validation loss; False for 0.

    >>> losses = [3.0, 2.5, 2.6, 2.5]
    >>> records = [{"step": step, "split": "val", "loss": loss} for step, loss in enumerate(losses)]
    >>> stalled(records, 2), stalled(records[:3], 2)
    (True, False)
    """
    losses = [record["loss"] for record in records if record["split"] == "val"]
    return 0 < patience < len(losses) and min(losses[-patience:]) >= min(losses[:-patience])


def finished(path: Path, steps: int, patience: int) -> int | None:
    """The last step of a run that ended, at `steps` or earlier by `config.eval.patience`; None if it has not ended."""
    records = read(path)
    finals = [record["step"] for record in records if record["split"] == "final"]
    if steps in finals:
        return steps
    return finals[-1] if stalled(records, patience) and records[-1]["split"] == "final" else None


def format_scores(split: str, scores: dict) -> str:
    """Format a loss, with the bits per character and per byte, and the accuracy, if `scores` has them."""
    if scores["loss"] is None:
        return f"{split} loss not finite"
    bits = ""
    if "bits_per_character" in scores:
        bits = f" ({scores['bits_per_character']:.3f} bits per character, {scores['bits_per_byte']:.3f} per byte)"
    accuracy = f", accuracy {scores['accuracy']:.4f}" if "accuracy" in scores else ""
    return f"{split} loss {scores['loss']:.4f}{bits}{accuracy}"


def nonfinite(metrics: dict) -> str:
    """The first metric that is not finite, as in "loss is nan"; "" if all are finite."""
    return next((f"{name} is {value}" for name, value in metrics.items() if not math.isfinite(value)), "")


def memory_peaks(devices: Iterable[jax.Device]) -> dict[str, int]:
    """Peak memory in bytes since this process began.

    Returns:
      "host_peak_memory_bytes", the resident memory of the process; "device_peak_memory_bytes", the largest peak of a
      device, where the backend reports it (CPUs do not).
    """
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, else KiB
    peaks = {"host_peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    device_peaks = [peak for device in devices if (peak := memory_stats(device).get("peak_bytes_in_use"))]
    return peaks | ({"device_peak_memory_bytes": max(device_peaks)} if device_peaks else {})


def memory_stats(device: jax.Device) -> dict[str, int]:
    """A device's memory statistics in bytes; {} if its backend reports none, as on CPUs."""
    with contextlib.suppress(NotImplementedError, jax.errors.JaxRuntimeError):
        return device.memory_stats() or {}
    return {}


class ProgressReporter(Progress):
    """The steps of a run: a progress bar on a terminal, plain lines elsewhere, nothing when silent."""

    def __init__(self, steps: int, start: int = 0, silent: bool = False):
        steps_done = (TextColumn("step"), MofNCompleteColumn(), BarColumn())
        super().__init__(*steps_done, TextColumn("{task.description}"), TimeRemainingColumn(), quiet=silent)
        self.expect(steps, start)

    def say(self, text: str) -> None:
        """Show what begins now, before there is a bar."""
        if not self._console.quiet:
            status.show(text)

    def step(self, step: int, description: str) -> None:
        """Advance the bar; without a terminal, print the description as a line."""
        self.done = step
        self.show(description)
        if not self.on_terminal:
            self.print(f"step {step}/{self.total}  {description}")
