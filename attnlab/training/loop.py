"""The training loop: one run, or several as one program, from the first step to the last."""

import collections
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax

from attnlab.data.batches import Batch, prefetched
from attnlab.training import parallel as parallel_lib
from attnlab.training.checkpoints import OnPhase
from attnlab.training.members import Members
from attnlab.training.preemption import PreemptionHandler
from attnlab.training.profiling import Profiler, Timer
from attnlab.training.run import OpenRun

LONGEST_CALL = 1.0  # seconds that one dispatch to the devices may take, because signals wait for its end


class _Call(NamedTuple):
    """Steps that were dispatched to the devices as one call; each metric is `[max_steps]` or `[max_steps, runs]`."""

    first: int  # step
    last: int
    metrics: dict


class TrainLoop:
    """Train from a state to the end of the run, or until stopped.

    Each iteration dispatches one call of one or more steps. The devices compute it while the host reads the metrics of
    the previous call. At a pause (to evaluate, save or sample), the host waits for the devices.

    After the first step, signals (SIGTERM, Ctrl-C) are polled once per call and during evaluation; after a signal, the
    loop saves and ends. After SIGKILL, the newest intact checkpoint remains. The next start truncates the log to the
    step of this checkpoint, and evaluates that step if no evaluation is in the log.

    Several runs that differ only in seed and learning rates take each step as one program. `members` holds their
    state, and logs, evaluates and saves each run; a run that diverges or runs out of patience ends before the others.

    Args:
      runs: the open runs; only the first process writes their logs and files.
      preemption: reports signals.
      on_step: called for every step in every process, `on_step(step, metrics)`; see `attnlab.train.train`.
      on_phase: `with on_phase(name)` surrounds each of `checkpoints.PHASES`.

    Attributes:
      errors: the errors of diverged runs, by their index; the caller raises or reports them.
    """

    def __init__(
        self,
        runs: Sequence[OpenRun],
        preemption: PreemptionHandler,
        on_step: Callable[[int, dict], None] | None = None,
        on_phase: OnPhase = contextlib.nullcontext,
    ):
        self.members = Members(runs, on_phase)
        self.config, self.program = self.members.config, self.members.program
        self.start, self.reporter, self.errors = runs[0].start, runs[0].reporter, self.members.errors
        self.preemption, self.on_step, self.on_phase = preemption, on_step, on_phase
        self._per_run = self.program.per_run([run.plan.config for run in runs])
        self._unread = collections.deque()  # calls that were dispatched, but not yet read
        self._timer = Timer(self.start)
        self._longest = None  # steps that fit into `LONGEST_CALL` seconds, once known

    def run(self) -> int:
        """Train to the last step; returns 0, or 128 + the number of the signal that stopped and saved the run."""
        members, step, end = self.members, self.start, self.config.steps
        members.begin(step)
        batches = prefetched(members.batches(), step, end)
        with self.reporter, members.profiler(step) as profiler:
            if members.evaluation_pending(step) and not members.evaluate(step, self.preemption.requested):
                return self.preemption.exit_code
            members.end_exhausted(step)  # runs that ran out of patience just before they were stopped
            self._timer.restart(step)
            while step < end and members.runs:
                step = self._call(step, batches, profiler)
                stopping = self.preemption.requested()  # a later signal is handled after the next call
                due = members.due(step)
                self._read(wait=stopping or any(due))
                if not members.runs:  # all have diverged
                    break
                if due.evaluate and not stopping:
                    stopping = not members.evaluate(step, self.preemption.requested)
                if stopping:
                    members.save_and_stop(step)
                    return self.preemption.exit_code
                if due.save:
                    members.save(step, members.runs)
                if due.evaluate:
                    members.end_exhausted(step)
                if due.sample:
                    members.sample(step)
                if any(due):
                    self._timer.restart(step)  # exclude evaluation, saving and sampling
                    self._longest = None
            members.finish(step)
        return 0

    def _call(self, step: int, batches: Iterator[Batch], profiler: Profiler) -> int:
        """Dispatch the steps after `step`, as many as one call may have; returns the number of the last."""
        is_first, began, members = step == self.start, time.perf_counter(), self.members
        if is_first:
            self.reporter.say("compiling the step")
        taken = list(itertools.islice(batches, self._steps_ahead(step)))
        if not self._unread or self._unread[-1].metrics["loss"].is_ready():  # else the devices were still computing
            self._timer.waited += time.perf_counter() - began
        last = step + len(taken)
        with profiler.step(step + 1), self.on_phase("compile" if is_first else "step"):
            most = self.program.steps_per_call
            members.state, metrics = self.program.train_steps(
                members.state, taken, self._per_run, most, members.population
            )
            if is_first:
                jax.block_until_ready(members.state)
        self._timer.exclude(profiler.written(last, members.state))
        if is_first:
            self._report_first_step(last)
        self._unread.append(_Call(step + 1, last, metrics))
        if self.on_step:
            for number in range(len(taken)):
                self.on_step(step + 1 + number, {name: x[number] for name, x in metrics.items()})
        return last

    def _report_first_step(self, step: int) -> None:
        self.preemption.handle()  # from now on there is something to save
        self.reporter.print(f"first step finished: {self._timer.elapsed():.1f} s, including compilation")
        self.reporter.show("")
        if not self.members.logs_at(step):
            self._timer.restart(step)  # exclude compilation too

    def _steps_ahead(self, step: int) -> int:
        """The number of steps in the next call: up to the next pause, and for at most `LONGEST_CALL` seconds."""
        config, most = self.config, self.program.steps_per_call
        if most == 1 or step == self.start:  # the first step is a call by itself, as signals save nothing before
            return 1
        every = [config.eval.every, config.checkpoint.every, config.sample.every or config.steps]
        pauses = [step + each - step % each for each in every] + [config.steps, *self.members.history]
        first, last = config.profiled() or (0, 0)
        steps = min(each for each in [*pauses, first - 1, last] if each > step) - step
        is_agreed = self._longest is not None and jax.process_count() > 1  # every process must use the same number
        if self._timer.pace and not is_agreed:
            self._longest = parallel_lib.from_first_process(int(LONGEST_CALL / self._timer.pace))
        return max(1, min(most, steps, self._longest or 1))

    def _read(self, wait: bool) -> None:
        """Read and record the metrics of all calls; unless `wait`, skip the last, which may still be running."""
        while len(self._unread) > (not wait):
            call = self._unread.popleft()
            read = self.members.population.rows(call.metrics)
            # A dispatch may block until its steps have been computed, so later calls may have ended as well.
            ended = [call, *(each for each in self._unread if each.metrics["loss"].is_ready())][-1].last
            self._timer.stop(ended)
            steps = range(call.first, call.last + 1)
            for number, step in enumerate(steps):
                self.members.record(step, {name: x[number] for name, x in read.items()}, self._timer)
            if any(map(self.members.logs_at, steps)):
                self._timer.restart(ended)
