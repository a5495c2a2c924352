"""Trackers, which receive the metrics of a run while it trains: the protocol, and TensorBoard."""

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable


@runtime_checkable
class Tracker(Protocol):
    """Receiver of the records of `metrics.jsonl` as they are written, only in the first process.

    After a kill, a record may arrive again, with other timings, or be missing; `metrics.jsonl` has each record once.

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
        """Log numbers of a step, named "SPLIT/NAME" as in `metrics.jsonl`; a tracker's steps never decrease."""

    def close(self) -> None:
        """Close the tracker when the run ends or stops."""


NewTracker = Callable[[Path, dict], Tracker]  # (workdir, content of config.json) → a tracker for this start of the run


class TensorBoard:
    """TensorBoard events, written without TensorFlow; if they cannot be written, the run continues without them.

    They are written at once, without tensorboardX's SummaryWriter: a full disk would end the thread that empties its
    queue, and the full queue would then block the run forever.
    """

    def __init__(self, folder: Path):
        self._folder, self._file, self._disabled = folder, None, False

    def log(self, step: int, metrics: Mapping[str, float | str]) -> None:
        """Append the numbers and texts of a step."""
        if self._disabled:
            return
        try:
            with _without_torch():  # imported here, because a finished run does not need it
                from tensorboardX import event_file_writer, summary
                from tensorboardX.proto.event_pb2 import Event
            if self._file is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                # tensorboardX names files by whole seconds: two starts within a second would write to the same file.
                suffix = f".{time.time_ns()}"
                self._file = event_file_writer.EventsWriter(str(self._folder / "events"), suffix)
                self._file.write_event(Event(file_version="brain.Event:2"))
            for name, value in metrics.items():
                entry = summary.text(name, value) if isinstance(value, str) else summary.scalar(name, value)
                self._file.write_event(Event(step=step, wall_time=time.time(), summary=entry))
            self._file.flush()
        except ImportError:
            self._disable("tensorboardX is not installed: pip install 'attnlab[log]'")
        except OSError as error:
            self._disable(error.strerror or str(error))

    def _disable(self, why: str) -> None:
        print(f"TensorBoard logging disabled ({why}); training continues", file=sys.stderr, flush=True)
        self._disabled = True
        self.close()

    def close(self) -> None:
        """Close the file; everything is flushed already."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # after a full disk, its buffer does not fit either
                file.close()


@contextlib.contextmanager
def _without_torch():
    """Context for importing tensorboardX without PyTorch, an optional import that costs 180 MiB and a second."""
    absent = "torch" not in sys.modules
    if absent:
        sys.modules["torch"] = None  # makes its import fail
    try:
        yield
    finally:
        if absent:
            del sys.modules["torch"]
