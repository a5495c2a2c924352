"""What a run writes down: `metrics.jsonl`, TensorBoard events, and lines or a progress bar for whoever watches."""

import hashlib
import json
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from attnlab.errors import UserError


class MetricsLog:
    """`metrics.jsonl`: one flat JSON record a line, each once, in the order of steps.

    Args:
      path: the file; made when the first record is written.
      mark: where the run goes on from, what `mark()` was there; what was written since is removed, for it will be
        written again. None for the beginning.
      last_step: the step there.
      events: folder of TensorBoard events beside it; None for none.

    Attributes:
      records: all of them, those of earlier starts included.
      lost: there was a file at the mark, and there is none now.

    Raises:
      UserError: the file is not what it was at the mark.

    >>> import tempfile
    >>> log = MetricsLog(Path(tempfile.mkdtemp()) / "metrics.jsonl")
    >>> log.write(step=10, split="train", loss=2.5)
    >>> log.records
    [{'step': 10, 'split': 'train', 'loss': 2.5}]
    """

    def __init__(self, path: Path, mark: dict | None = None, last_step: int = 0, events: Path | None = None):
        self.path, self._events, self._writer, self._last_step = path, events, None, last_step
        size = mark["bytes"] if mark else 0
        self.lost = bool(size) and not path.exists()
        kept = b""
        if path.exists():
            with path.open("rb") as file:
                kept = file.read(size)
            if mark and hashlib.sha256(kept).hexdigest() != mark["sha256"]:
                raise UserError(
                    f"{path} is not what it was when step {last_step} was saved: bring it back, or move it away to go "
                    "on without its records"
                )
            if path.stat().st_size > size:
                os.truncate(path, size)
        self._size, self._sha256 = len(kept), hashlib.sha256(kept)
        self.records = [json.loads(line) for line in kept.splitlines()]

    def mark(self) -> dict:
        """Of all that was written so far, what a checkpoint keeps: JSON's `{"bytes": …, "sha256": …}`."""
        return {"bytes": self._size, "sha256": self._sha256.hexdigest()}

    def write(self, **record) -> None:
        """Appends a record and hands its numbers to TensorBoard."""
        line = _line(record).encode()
        with self.path.open("ab") as file:
            file.write(line)
        self._size += len(line)
        self._sha256.update(line)
        self.records.append(record)
        if self._tensorboard:
            for name, value in record.items():
                if name != "step" and isinstance(value, int | float):
                    self._tensorboard.add_scalar(f"{record['split']}/{name}", value, record["step"])

    def write_text(self, step: int, text: str) -> None:
        """A sample, for TensorBoard alone."""
        if self._tensorboard:
            self._tensorboard.add_text("sample", f"```\n{text}\n```", step)

    def close(self) -> None:
        """Flushes the events."""
        if self._writer:
            self._writer.close()

    @property
    def _tensorboard(self):
        if self._writer is None and self._events is not None:
            from tensorboardX import SummaryWriter  # takes half a second, which a run that is over need not spend

            # Events after the step that the run goes on from are struck out, as in metrics.jsonl.
            self._writer = SummaryWriter(str(self._events), purge_step=self._last_step + 1)
        return self._writer


def read(path: Path) -> list[dict]:
    """The records of a `metrics.jsonl`, none if there is no file; a last line that was cut off is left out.

    Raises:
      UserError: a line that is no record.
    """
    if not path.exists():
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
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
            raise UserError(f"{path} line {number} is no record ({line[:40]!r}): repair it or move it away") from error
    return records


def best_step(records: list[dict], steps: list[int]) -> int | None:
    """Of `steps` the one with the lowest validation loss in a run's records, None if none has one.

    >>> best_step([{"step": 2, "split": "val", "loss": 3.0}, {"step": 4, "split": "val", "loss": 2.5}], [2, 3])
    2
    """
    scored = {r["step"]: r["loss"] for r in records if r["split"] == "val" and r["step"] in steps}
    return min(scored, key=scored.get) if scored else None


class Watch:
    """What a person sees of a run: a progress bar on a terminal, plain lines elsewhere, nothing when silent.

    Args:
      steps: at the end of the run.
      start: where it begins.
      silent: for all processes but the first.
    """

    def __init__(self, steps: int, start: int = 0, silent: bool = False):
        self._console = _Console(quiet=silent, soft_wrap=True, highlight=False)
        self._steps = steps
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=self._console, disable=silent or not self._console.is_terminal)
        self._task = self._bar.add_task("", total=steps, completed=start)

    def __enter__(self):
        self._bar.start()
        return self

    def __exit__(self, *_):
        self._bar.stop()

    def step(self, step: int, description: str) -> None:
        """Moves the bar; on a terminal the description stands beside it, elsewhere it is a line."""
        self._bar.update(self._task, completed=step, description=description)
        if not self._console.is_terminal:
            self.say(f"step {step}/{self._steps}  {description}")

    def say(self, text: str) -> None:
        """Prints as it is."""
        try:
            self._console.out(text, highlight=False)
        except BrokenPipeError:  # whoever watched has left, as `| tee` does on Ctrl-C; the run does not depend on them
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _line(record) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


class _Console(Console):
    def on_broken_pipe(self):
        raise BrokenPipeError  # rich would end the process
