"""Progress of long work: a bar on a terminal, plain lines elsewhere; closing the output pipe does not end the work.

On a terminal, control characters in texts are shown instead of obeyed.
"""

import contextlib
import io
import os
import sys
import time
from collections.abc import Callable

from rich import console, progress

from attnlab.support import status

LINE_INTERVAL = 10.0  # minimal seconds between two lines; in long work, a tenth of the time so far
BAR_AFTER = 1.0  # seconds of work before a bar appears


def shown(text: str, file=None) -> str:
    r"""Return `text` for `file` (None: `sys.stdout`); for a terminal, escape control characters, as in `\x1b`."""
    return status.escaped(text) if _is_terminal(file) else text


def _is_terminal(file) -> bool:
    """Whether a file is a terminal, whatever FORCE_COLOR says: Jupyter's kernels set it, and cannot draw a bar."""
    return (sys.stdout if file is None else file).isatty()


class Progress:
    """Progress in counted units of work; subclasses define the printed line and the text beside the bar."""

    def __init__(
        self,
        *columns: progress.ProgressColumn,
        quiet: bool = False,
        transient: bool = False,
        file=None,
        clock: Callable[[], float] | None = None,
    ):
        options = {"force_jupyter": False, "force_terminal": _is_terminal(file)}
        self._console = _Console(file=file, quiet=quiet, soft_wrap=True, highlight=False, **options)
        self.on_terminal, self._clock = self._console.is_terminal, clock or time.monotonic
        disable = quiet or not self.on_terminal
        self._bar = progress.Progress(*columns, console=self._console, transient=transient, disable=disable)
        self._task = self._bar.add_task("", total=None)
        self.expect(None)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self) -> None:
        """End the bar, with the cursor visible and at the start of a line."""
        self._bar.stop()

    def expect(self, total: int | float | None, done: int | float = 0) -> Callable[..., None]:
        """Announce the work ahead, in units that take about the same time; return `advance(amount=1)`."""
        self.total, self.done = total, done
        self._start = self._last_line = self._clock()
        self._bar.update(self._task, total=total, completed=done)
        return self.advance

    def advance(self, amount: int | float = 1) -> None:
        """Count finished units."""
        self.done += amount
        now = self._clock()
        elapsed = now - self._start
        if self.on_terminal:
            if elapsed >= BAR_AFTER:
                self.show(self.label(elapsed))
        elif now - self._last_line >= max(LINE_INTERVAL, elapsed / 10) and (line := self.line(elapsed)):
            self._last_line = now
            with contextlib.suppress(OSError):  # such as a full disk
                self.print(line)

    def show(self, label: str) -> None:
        """Update the bar and the text beside it; without a terminal, print nothing."""
        self._bar.update(self._task, completed=self.done, description=label)
        status.clear()
        self._bar.start()

    def print(self, text: str) -> None:
        """Print text without markup, above the bar."""
        status.clear()
        try:
            self._console.out(status.escaped(text) if self.on_terminal else text, highlight=False)
        except BrokenPipeError:  # the pipe's reader has exited, as `| tee` does on Ctrl-C
            self._console.quiet = True
            with contextlib.suppress(io.UnsupportedOperation):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._console.file.fileno())

    def label(self, elapsed: int | float) -> str:
        """The text beside the bar after `elapsed` seconds."""
        return ""

    def line(self, elapsed: int | float) -> str:
        """The line to print after `elapsed` seconds; "" for none."""
        return ""


class _Console(console.Console):
    def on_broken_pipe(self):
        raise BrokenPipeError  # rich would end the process
