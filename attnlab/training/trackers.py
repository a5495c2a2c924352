"""Trackers, which get the metrics of a run as it goes on: the protocol, and TensorBoard."""

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from attnlab.support.errors import UserError


@runtime_checkable
class Tracker(Protocol):
    """Gets every record of `metrics.jsonl` once, whatever the number of starts; in the first process alone.

    A record that is written again after a crash is not logged again, as its numbers are the same.

    >>> class Printer:
    ...     def log(self, step, metrics):
    ...         print(step, metrics)
    ...     def close(self):
    ...         print("closed")
    >>> tracker: Tracker = Printer()
    >>> tracker.log(10, {"train/loss": 2.5})
    10 {'train/loss': 2.5}
    """

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log numbers of a step, named "SPLIT/NAME" as in `metrics.jsonl`; steps never decrease."""

    def close(self) -> None:
        """The run ends, or stops."""


NewTracker = Callable[[Path, dict], Tracker]  # (workdir, content of config.json) → a tracker of this start


def made(tracker: NewTracker, workdir: Path, saved: dict) -> Tracker:
    """The tracker of a start; UserError where it is none."""
    found = tracker(workdir, saved) if callable(tracker) else None
    if not isinstance(found, Tracker):
        raise UserError(
            f"tracker={tracker!r} makes no tracker: pass a class or a function that, called with (workdir, config), "
            "returns an object with log(step, metrics) and close()"
        )
    return found


@contextlib.contextmanager
def _no_torch():
    """Context for importing tensorboardX, which imports PyTorch where it is installed: 180 MiB, and a second."""
    absent = "torch" not in sys.modules
    if absent:
        sys.modules["torch"] = None  # an import of it fails
    try:
        yield
    finally:
        if absent:
            del sys.modules["torch"]


class TensorBoard:
    """TensorBoard events, written without TensorFlow; where they cannot be written, the run goes on without them.

    They are written at once: a full disk ends the thread of tensorboardX's SummaryWriter, whose queue then blocks the
    run forever.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._path = self._file = None
        self._dropped = False

    def log(self, step: int, metrics: Mapping[str, float | str]) -> None:
        """Append the numbers and texts of a step."""
        if self._dropped:
            return
        with _no_torch():  # here, as it is not needed when the run is finished
            from tensorboardX import summary
            from tensorboardX.proto.event_pb2 import Event

        try:
            if self._file is None:
                self._open()
            for name, value in metrics.items():
                made = summary.text(name, value) if isinstance(value, str) else summary.scalar(name, value)
                self._file.write_event(Event(step=step, wall_time=time.time(), summary=made))
            self._file.flush()
        except OSError as error:
            self.drop(error)

    def _open(self) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event

        self._folder.mkdir(parents=True, exist_ok=True)
        before = set(self._folder.iterdir())
        try:
            self._file = EventsWriter(str(self._folder / "events"))
        finally:
            self._path = next(iter(set(self._folder.iterdir()) - before), None)
        self._file.write_event(Event(file_version="brain.Event:2"))

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
        """Close the file; all is flushed."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
