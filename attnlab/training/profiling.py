"""Step times, and a trace by `jax.profiler` of the steps that `config.log.profile` names."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import jax


class Profiler:
    """Trace steps `first` to `last` of a run.

    A run that resumes between these steps traces the rest, except its first step, which compiles. If the run stops
    before `last`, the trace has the steps up to there.

    Args:
      steps: `first` and `last`; None for no trace.
      start: the step of the state from which the run starts.
      folder: receives plugins/profile/TIME/*, where TensorBoard looks for traces.
      report: called with a line for the user.
    """

    def __init__(self, steps: tuple[int, int] | None, start: int, folder: Path, report: Callable[[str], None]):
        first, self._last = steps or (0, 0)
        self._first = first if first > start else start + 2
        self._folder, self._report, self._tracing = folder, report, False
        if steps and self._first > self._last:
            report(f"config.log.profile = {first}:{self._last}: no trace, because the run resumes from step {start}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._write()

    def step(self, number: int) -> contextlib.AbstractContextManager:
        """Context for a step; begins the trace before the first traced step."""
        if number == self._first <= self._last:
            self._tracing = self._attempt(jax.profiler.start_trace, self._folder)
        return jax.profiler.StepTraceAnnotation("train", step_num=number) if self._tracing else contextlib.nullcontext()

    def written(self, number: int, result) -> float:
        """Write the trace after its last step, once `result` is computed; returns the seconds that writing took."""
        if not self._tracing or number != self._last:
            return 0.0
        jax.block_until_ready(result)
        began = time.perf_counter()
        self._write()
        return time.perf_counter() - began

    def _write(self) -> None:
        if self._tracing:
            self._tracing = False
            if self._attempt(jax.profiler.stop_trace):
                self._report(f"config.log.profile: the trace is in {self._folder}")

    def _attempt(self, function: Callable, *args) -> bool:
        """Whether a call succeeds; if it fails, as with a full disk, the run continues without a trace."""
        try:
            function(*args)
        except (OSError, RuntimeError) as error:  # RuntimeError: another trace is running, or XLA cannot write
            self._report(f"config.log.profile: no trace ({str(error).splitlines()[0]})")
            return False
        return True


class Timer:
    """`pace`: seconds per step from `restart` to the last `stop`; `waited_share`: share spent waiting for data."""

    def __init__(self, step: int):
        self.pace = self.waited_share = 0.0
        self.restart(step)

    def restart(self, step: int) -> None:
        self._began, self._step, self.waited = time.perf_counter(), step, 0.0

    def exclude(self, seconds: float) -> None:
        self._began += seconds

    def stop(self, step: int) -> None:
        if step > self._step:
            self.pace, self.waited_share = self.elapsed() / (step - self._step), self.waited / self.elapsed()

    def elapsed(self) -> float:
        return time.perf_counter() - self._began
