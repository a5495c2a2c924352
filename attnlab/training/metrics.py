"""The records of a run: `metrics.jsonl`, TensorBoard events, and a progress bar or lines on the terminal."""

import contextlib
import hashlib
import json
import os
import sys
import time
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from attnlab.support import files
from attnlab.support.errors import UserError
from attnlab.support.paths import named, write_bytes
from attnlab.support.progress import Progress


class MetricsLog:
    """`metrics.jsonl`: one flat JSON record per line, in the order of steps, without duplicates.

    Args:
      path: the file; created with the first record.
      offset: the value of `offset()` when the checkpoint was saved from which the run resumes; None for a new run.
        Later records are removed, as they will be written again, except a "final" record of `last_step`, from which a
        run is extended.
      last_step: the step at that offset.
      events: folder of TensorBoard events; None for none.

    Attributes:
      records: all records, including the records of earlier starts.
      lost: whether the file had records at the offset, and is missing.

    Raises:
      UserError: the part up to the offset has changed.

    >>> import tempfile
    >>> log = MetricsLog(Path(tempfile.mkdtemp()) / "metrics.jsonl")
    >>> log.write(step=10, split="train", loss=2.5)
    >>> log.records
    [{'step': 10, 'split': 'train', 'loss': 2.5}]
    """

    def __init__(self, path: Path, offset: dict | None = None, last_step: int = 0, events: Path | None = None):
        self.path = path
        # Events after the step from which the run resumes are purged, as in metrics.jsonl.
        self._events = None if events is None else _Events(events, purge_step=last_step + 1)
        size = offset["bytes"] if offset else 0
        self.lost = bool(size) and not path.exists()
        kept = b""
        if path.exists():
            with path.open("rb") as file:
                kept, next_line = file.read(size), file.readline()
            if offset and hashlib.sha256(kept).hexdigest() != offset["sha256"]:
                raise UserError(
                    f"{path} is not what it was when step {last_step} was saved: restore it, or move it away to "
                    "continue without its records"
                )
            if offset and _is_final(next_line, last_step):
                kept += next_line
            if path.stat().st_size > len(kept):
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
        """Append a record to the file, and its numbers to the TensorBoard events."""
        line = _encoded(record)
        try:
            self._append(line)
        except OSError as error:
            if self._events is None or not self._events.drop(error):
                raise
            os.truncate(self.path, self._size)  # the events took the room
            self._append(line)
        self._size += len(line)
        self._sha256.update(line)
        self.records.append(record)
        if self._events:
            numbers = {name: x for name, x in record.items() if name != "step" and isinstance(x, int | float)}
            self._events.write(record["step"], {f"{record['split']}/{name}": x for name, x in numbers.items()})

    def _append(self, line: bytes) -> None:
        if self._size and not self.path.exists():
            print(f"{self.path} was deleted: it is written again, with all records", file=sys.stderr, flush=True)
            write_bytes(self.path, b"".join(map(_encoded, self.records)))
        with named(self.path), self.path.open("ab") as file:
            file.write(line)

    def write_text(self, step: int, text: str) -> None:
        """Write a sample to TensorBoard only."""
        if self._events:
            self._events.write(step, {"sample": f"```\n{text}\n```"})

    def close(self) -> None:
        """Close the TensorBoard events."""
        if self._events:
            self._events.close()


class _Events:
    """TensorBoard events; where they cannot be written, the run goes on without them.

    They are written at once: a full disk ends the thread of tensorboardX's SummaryWriter, whose queue then blocks the
    run forever.
    """

    def __init__(self, folder: Path, purge_step: int):
        self._folder, self._purge_step = folder, purge_step
        self._path = self._file = None
        self._dropped = False

    def write(self, step: int, values: dict[str, float | str]) -> None:
        """Append the numbers and texts of a step."""
        if self._dropped:
            return
        from tensorboardX import summary  # slow (half a second), and not needed when the run is finished
        from tensorboardX.proto.event_pb2 import Event

        try:
            if self._file is None:
                self._open()
            for name, value in values.items():
                made = summary.text(name, value) if isinstance(value, str) else summary.scalar(name, value)
                self._file.write_event(Event(step=step, wall_time=time.time(), summary=made))
            self._file.flush()
        except OSError as error:
            self.drop(error)

    def _open(self) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._folder.mkdir(parents=True, exist_ok=True)
        before = set(self._folder.iterdir())
        try:
            self._file = EventsWriter(str(self._folder / "events"))
        finally:
            self._path = next(iter(set(self._folder.iterdir()) - before), None)
        for start in ({"file_version": "brain.Event:2"}, {"session_log": SessionLog(status=SessionLog.START)}):
            self._file.write_event(Event(step=self._purge_step, **start))

    def drop(self, error: OSError) -> bool:
        """Write no more, and delete the file of this start; returns whether there was one."""
        if not self._dropped:
            line = f"TensorBoard events are given up ({error.strerror or error}): the run goes on without them"
            print(line, file=sys.stderr, flush=True)
        file, self._file, self._dropped = self._file, None, True
        if file is not None:
            with contextlib.suppress(OSError):  # its buffer does not fit either
                file.close()
        found = self._path is not None and self._path.exists()
        if found:
            self._path.unlink()
        return found

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # all is flushed
                self._file.close()


def _encoded(record: dict) -> bytes:
    return (json.dumps(record, allow_nan=False) + "\n").encode()


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
            record = json.loads(line)
            record["split"], int(record["step"])
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
    """Whether none of the last `patience` evaluations had a lower validation loss than all before them.

    >>> losses = [3.0, 2.5, 2.6, 2.5]
    >>> records = [{"step": step, "split": "val", "loss": loss} for step, loss in enumerate(losses)]
    >>> stalled(records, 2), stalled(records[:3], 2)
    (True, False)
    """
    losses = [record["loss"] for record in records if record["split"] == "val"]
    return 0 < patience < len(losses) and min(losses[-patience:]) >= min(losses[:-patience])


def finished(path: Path, steps: int, patience: int) -> int | None:
    """The last step of a run that has ended, by its steps or by `config.eval.patience`; None if it has not."""
    records = read(path)
    finals = [record["step"] for record in records if record["split"] == "final"]
    if steps in finals:
        return steps
    return finals[-1] if stalled(records, patience) and records[-1]["split"] == "final" else None


class ProgressReporter(Progress):
    """The steps of a run: a progress bar on a terminal, plain lines elsewhere, nothing when silent."""

    def __init__(self, steps: int, start: int = 0, silent: bool = False):
        super().__init__(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            quiet=silent,
        )
        self.expect(steps, start)

    def describe(self, text: str) -> None:
        """Set the text beside the bar; without a terminal, print nothing."""
        self.show(text)
        self._bar.refresh()

    def step(self, step: int, description: str) -> None:
        """Advance the bar; without a terminal, print the description as a line."""
        self.done = step
        self.show(description)
        if not self.on_terminal:
            self.print(f"step {step}/{self.total}  {description}")


def _is_final(line: bytes, step: int) -> bool:
    try:
        record = json.loads(line)
        return line.endswith(b"\n") and (record["split"], record["step"]) == ("final", step)
    except (ValueError, TypeError, KeyError):
        return False
