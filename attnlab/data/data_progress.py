"""The progress of reading and tokenising, in bytes."""

from rich import progress

from attnlab.support.progress import Progress


class DataProgress(Progress):
    """Bytes done by a task such as "tokenising"; prints nothing for work of about a second, or when quiet."""

    def __init__(self, task: str, total: int | None = None, quiet: bool = False):
        name = progress.TextColumn("{task.description}")
        bytes_done = (progress.BarColumn(), progress.DownloadColumn(), progress.TransferSpeedColumn())
        super().__init__(name, *bytes_done, progress.TimeRemainingColumn(), quiet=quiet)
        self._name = task
        self.expect(total)

    def __exit__(self, *exception):
        super().__exit__(*exception)
        if self._last_line > self._start:
            self.print(self.line(self._clock() - self._start))

    def label(self, elapsed: int | float) -> str:
        return self._name

    def line(self, elapsed: int | float) -> str:
        of = f" of {self.total / 1e6:,.0f}" if self.total else ""
        return f"{self._name}: {self.done / 1e6:,.0f}{of} MB, {self.done / 1e6 / max(elapsed, 1e-3):.1f} MB/s"
