"""The training loop: steps, logging, evaluation, checkpoints, samples, and stopping on signals."""

import collections
import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
from jax.experimental import multihost_utils

from attnlab.data.batches import Batch, Stacked, prefetched
from attnlab.data.tasks import named
from attnlab.generation.decoding import generate
from attnlab.generation.texts import prompt_ids
from attnlab.nn import GPT, custom, unstack_layers
from attnlab.support.errors import UserError
from attnlab.support.names import typed
from attnlab.training import flops as flops_lib
from attnlab.training import metrics as metrics_lib
from attnlab.training import parallel as parallel_lib
from attnlab.training import state as states
from attnlab.training.checkpoints import OnPhase, history_steps, sha256
from attnlab.training.preemption import PreemptionHandler
from attnlab.training.profiling import Profiler, Timer
from attnlab.training.run import Run

CALL = 1.0  # seconds that a call of the devices takes at most: signals wait for its end


class _Call(NamedTuple):
    """A call of the devices that was dispatched, and its metrics, each `[room]` or `[room, runs]`."""

    first: int  # step
    last: int
    metrics: dict


class Trainer:
    """Train from a state to the end of the run, or until stopped.

    Several runs that start from the same step, and differ in what `Experiment.fixed` holds alone, are trained together.
    Each has its own log, checkpoints and end: one that diverges, or is out of patience, ends before the others.

    Args:
      runs: open; their logs and files are written by the first process alone.
      on_step: called for every step in every process, `on_step(step, metrics)`; see `attnlab.train.train`.
      on_phase: `with on_phase(name)` surrounds each of `checkpoints.PHASES`.

    Attributes:
      errors: of the runs that diverged, by place.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        preemption: PreemptionHandler,
        on_step: Callable[[int, dict], None] | None = None,
        on_phase: OnPhase = contextlib.nullcontext,
    ):
        first = runs[0]
        self.config, self.experiment = first.plan.config, first.experiment
        self.start, self.reporter = first.start, first.reporter
        self.preemption, self.on_step, self.on_phase = preemption, on_step, on_phase
        self._together, self._count = len(runs) > 1, len(runs)
        self.state = states.joined([run.state for run in runs]) if self._together else first.state
        for leaf in jax.tree.leaves([run.state for run in runs if self._together]):
            leaf.delete()  # the copy takes its place
        self.experiment.forget_init()
        self._fixed = self.experiment.fixed(*(run.plan.config for run in runs))
        self._runs = {place: run._replace(state=None) for place, run in enumerate(runs)}  # that have not ended
        # No samples of a user's model, and of a task.
        is_text = isinstance(self.experiment.model, GPT) and named.parse(self.config.data.name) is None
        self._sampled = self.config.sample.length if is_text else 0  # tokens
        self._history = frozenset(history_steps(self.config.steps, self.config.checkpoint.history))
        self.errors: dict[int, str] = {}
        self._unread = collections.deque()  # calls that were dispatched, but not yet read
        self._timer = Timer(self.start)
        self._within = None  # steps of a call of `CALL` seconds, once known

    def run(self) -> int:
        """Train to the last step; returns 0, or 128 + the number of the signal that stopped and saved the run."""
        step, last = self.start, self.config.steps
        self._measure_flops()
        if not step and 0 in self._history:
            self._save(step, [place for place, run in self._runs.items() if 0 not in run.checkpoints.steps()])
        batches = prefetched(self._batches(), step, last)
        with self.reporter, self._profiler() as profiler:
            if self._evaluation_pending() and not self._evaluate(step):
                return self.preemption.exit_code
            self._end_exhausted(step)  # runs that were stopped before their last record
            self._timer.restart(step)
            while step < last and self._runs:
                step = self._call(step, batches, profiler)
                stopping = self.preemption.requested()  # polled once per call: later requests wait for the next
                evaluate, save, sample = self._due(step, stopping)
                pause = evaluate or save or sample
                self._read(wait=pause)
                if not self._runs:
                    break
                if evaluate:
                    stopping = not self._evaluate(step)
                if stopping:
                    self.reporter.close()
                    self.reporter.print(f"stopping: saving step {step}; a second signal ends the process without it")
                if save or stopping:
                    self._save(step, self._runs)
                if stopping:
                    self._report_saved(step)
                    return self.preemption.exit_code
                if evaluate:
                    self._end_exhausted(step)
                if sample:
                    for place in self._runs:
                        self._write_sample(place, step)
                if pause:
                    self._timer.restart(step)  # exclude evaluation, saving and sampling
                    self._within = None
            for place in list(self._runs):
                self._finish(place, step)
        return 0

    def _batches(self):
        """Batches by step, with an axis of runs where they are several."""
        batches = [run.text.train for run in self._runs.values()]
        return Stacked(batches) if self._together else batches[0]

    # ---------------------------------------------------------------------------------------------------------- steps

    def _call(self, step: int, batches: Iterator[Batch], profiler: Profiler) -> int:
        """Dispatch the steps after one, as many as the call may have; returns the last of them."""
        first, requested = step == self.start, time.perf_counter()
        if first:
            self.reporter.say("compiling the step")
        taken = list(itertools.islice(batches, self._steps_ahead(step)))
        if not self._unread or self._unread[-1].metrics["loss"].is_ready():  # else the devices were still computing
            self._timer.waited += time.perf_counter() - requested
        last = step + len(taken)
        with profiler.step(step + 1), self.on_phase("compile" if first else "step"):
            room = self.experiment.steps_per_call
            self.state, metrics = self.experiment.train_steps(self.state, taken, self._fixed, room)
            if first:
                jax.block_until_ready(self.state)
        self._timer.exclude(profiler.written(last, self.state))
        if first:
            self.preemption.handle()
            self.reporter.print(f"first step finished: {self._timer.elapsed():.1f} s, including compilation")
            self.reporter.show("")
            if not self._logs(last):
                self._timer.restart(last)  # exclude compilation too
        self._unread.append(_Call(step + 1, last, metrics))
        if self.on_step:
            for number in range(len(taken)):
                self.on_step(step + 1 + number, {name: x[number] for name, x in metrics.items()})
        return last

    def _steps_ahead(self, step: int) -> int:
        """How many steps the next call has: up to the next pause, and at most `CALL` seconds."""
        config, room = self.config, self.experiment.steps_per_call
        if room == 1 or step == self.start:  # before the first step, there is nothing to save
            return 1
        every = [config.eval.every, config.checkpoint.every, config.sample.every or config.steps]
        pauses = [step + each - step % each for each in every] + [config.steps, *self._history]
        first, last = config.profiled() or (0, 0)
        steps = min(each for each in [*pauses, first - 1, last] if each > step) - step
        known = self._within is not None and jax.process_count() > 1  # every process takes the same
        if self._timer.pace and not known:
            self._within = parallel_lib.from_first_process(int(CALL / self._timer.pace))
        return max(1, min(room, steps, self._within or 1))

    def _due(self, step: int, stopping: bool) -> tuple[bool, bool, bool]:
        """Whether to evaluate, save and sample after a step."""
        config = self.config
        last = step == config.steps
        evaluate = self._evaluates(step) and not stopping
        save = last or step % config.checkpoint.every == 0 or step in self._history
        sample = not last and bool(config.sample.every) and step % config.sample.every == 0
        return evaluate, save or stopping, sample

    def _evaluates(self, step: int) -> bool:
        return step == self.config.steps or step % self.config.eval.every == 0

    def _logs(self, step: int) -> bool:
        return step == self.config.steps or step % self.config.log.every == 0

    def _read(self, wait: bool) -> None:
        """Read and record the metrics of all calls, or of all but the last, which the devices may be computing."""
        while len(self._unread) > (not wait):
            call = self._unread.popleft()
            read = {name: x.reshape(len(x), -1) for name, x in jax.device_get(call.metrics).items()}
            # The dispatch of a loop may last as long as the loop: then later calls have ended as well.
            ended = [call, *(each for each in self._unread if each.metrics["loss"].is_ready())][-1].last
            self._timer.stop(ended)
            for number, step in enumerate(range(call.first, call.last + 1)):
                rows = {place: {name: float(x[number, place]) for name, x in read.items()} for place in self._runs}
                for place, metrics in rows.items():
                    self._check(place, step, metrics)
                if self._logs(step):
                    self._write_metrics(step, {place: rows[place] for place in self._runs})
            if any(map(self._logs, range(call.first, call.last + 1))):
                self._timer.restart(ended)

    def _check(self, place: int, step: int, metrics: dict) -> None:
        """End a run with metrics that are not finite, or report the step that its optimizer skips."""
        if not (found := metrics_lib.nonfinite(metrics)):
            return
        if self.config.on_nonfinite == "skip" and math.isfinite(metrics["param_norm"]):
            self._print(place, f"step {step} is skipped: {found} ({metrics['skipped']:.0f} skipped in total)")
        else:
            self._diverge(place, found, step)

    def _write_metrics(self, step: int, rows: dict[int, dict]) -> None:
        """Record a step of each run that goes on."""
        tokens_per_second = self._tokens(1) / self._timer.pace  # of one run
        together, rate = self._count * tokens_per_second, self.experiment.learning_rate
        peaks = metrics_lib.memory_peaks(jax.local_devices())
        for place, row in rows.items():
            run = self._runs[place]
            if run.log is None:
                continue
            row.update({name: None for name, value in row.items() if not math.isfinite(value)})
            peak = run.plan.config.optimizer.learning_rate
            run.log.write(
                step=step,
                split="train",
                **row,
                **run.text.bits_of(row["loss"]),
                **({"learning_rate": float(rate(peak, step - 1))} if rate else {}),
                tokens=self._tokens(step),
                tokens_per_second=tokens_per_second,
                mfu=self._flops * together / (self._peak_flops * self._devices),
                peak_flops=self._peak_flops,
                data_wait_time_share=self._timer.waited_share,
                **peaks,
            )
        shown = "  ".join(metrics_lib.format_scores("train", row) for row in rows.values())
        self.reporter.step(step, f"{shown}  {together:,.0f} tokens/s")

    # ----------------------------------------------------------------------------------------- evaluation, checkpoints

    def _evaluation_pending(self) -> bool:
        """Whether a run was stopped before the step that it resumes from could be evaluated."""
        step = self.start
        logs = [run.log for run in self._runs.values() if run.log]
        pending = step and self._evaluates(step) and any(log.validation(step) is None for log in logs)
        return bool(parallel_lib.from_first_process(bool(pending)))

    def _evaluate(self, step: int) -> bool:
        """Evaluate the state on the validation text; returns False when stopped before the end."""
        state = self.state[0] if self._together else self.state
        text = next(iter(self._runs.values())).text
        with self.on_phase("evaluation"):
            found = self.experiment.evaluate(
                state.evaluated, text.validation, self.preemption.requested, together=self._together
            )
        if found is None:
            return False
        for place, run in list(self._runs.items()):
            scores = {**found[place], **run.text.bits_of(found[place]["loss"])}
            if not math.isfinite(scores["loss"]):
                self._diverge(place, f"validation loss is {scores['loss']}", step)
                continue
            if run.log and run.log.validation(step) is None:
                run.log.write(step=step, split="val", **scores, tokens=self._tokens(step))
            self._print(place, f"step {step}/{self.config.steps}  {metrics_lib.format_scores('validation', scores)}")
        return True

    def _end_exhausted(self, step: int) -> None:
        """Save and finish the runs whose recorded evaluations up to a step end them before the last step."""
        config = self.config
        if not config.eval.patience or not self._evaluates(step) or step == config.steps:
            return
        for place, run in list(self._runs.items()):
            exhausted = run.log and metrics_lib.stalled(run.log.records, config.eval.patience)
            if parallel_lib.from_first_process(bool(exhausted)):
                self._save(step, [place])
                self._finish(place, step)
                self._end(place)

    def _save(self, step: int, places) -> None:
        for place in places:
            run = self._runs[place]
            state = self.experiment.parallel.over_processes(self._state_of(place))
            with self.on_phase("save"):
                log = run.log.offset() if run.log else None
                run.checkpoints.save(state, permanent=step in self._history, log=log)

    def _state_of(self, place: int) -> states.TrainState:
        return states.of_run(self.state[0], place) if self._together else self.state

    def _report_saved(self, step: int) -> None:
        """Print where the state is saved, once it is."""
        for place, run in self._runs.items():
            run.checkpoints.wait()
            where = f"step {step} is saved in {run.checkpoints.directory}"
            self._print(place, f"stopped: {where}; the same command resumes from there")
        # A launcher may kill the other processes as soon as one ends.
        multihost_utils.sync_global_devices("attnlab: stopped")

    def _write_sample(self, place: int, step: int) -> None:
        if not self._sampled:
            return
        run = self._runs[place]
        params = self.experiment.parallel.on_every_device(self._state_of(place).evaluated)
        if run.log is None:
            return
        params = jax.tree.map(lambda x: x.addressable_data(0), params)
        variables, tokenizer = {"params": jax.jit(self._unstacked)(params)}, run.text.tokenizer
        options = {"temperature": 0.8, "seed": run.plan.config.seed, "vocab_size": tokenizer.vocab_size}
        prompt = prompt_ids(tokenizer, None)
        generated = generate(self.experiment.model, variables, prompt, self._sampled, **options)
        with self.on_phase("sampling"):
            try:
                text = tokenizer.decode([tokens[0] for tokens in generated])
            except Exception as error:  # e.g. no memory is left: the run's record matters more
                why = str(error).split("\n")[0] or type(error).__name__
                self._print(place, f"no sample at step {step} ({why}); the run continues")
                return
        self._print(place, f"--- sample at step {step}:\n{text}\n---")
        run.log.write_text(step, text)

    # ------------------------------------------------------------------------------------------------------------ ends

    def _finish(self, place: int, step: int) -> None:
        """Write the last record of a run."""
        config, run = self.config, self._runs[place]
        if step < config.steps:
            self._print(
                place,
                f"stopped early at step {step} of {config.steps}: no lower validation loss in "
                f"config.eval.patience = {config.eval.patience} evaluations",
            )
        run.checkpoints.wait()
        self._write_sample(place, step)
        params = self.experiment.parallel.on_every_device(self._state_of(place).params)
        if run.log:
            scores = run.log.validation(step)
            result = {name: scores[name] for name in ("loss", "accuracy") if name in scores}
            digest = sha256(self._unstacked(jax.device_get(params)))
            run.log.write(step=step, split="final", **result, params_sha256=digest)
            *_, peak = metrics_lib.memory_peaks(jax.local_devices()).values()  # the device's, where it tells
            self._print(
                place, f"done: {metrics_lib.format_scores('validation', scores)}, peak memory {peak / 1e9:.2f} GB"
            )
            self._tell_of_use(run)

    def _diverge(self, place: int, found: str, step: int) -> None:
        """End a run at metrics that are not finite; raise UserError where it is trained alone."""
        run = self._runs[place]
        if run.log:
            run.log.write(step=step, split="diverged", loss=None)
        run.checkpoints.wait()
        kept = run.checkpoints.steps()
        where = f"the last good checkpoint is step {kept[-1]}" if kept else "no checkpoint was saved yet"
        error = UserError(
            f"{found} at step {step}; {where} in {run.plan.workdir}: lower config.optimizer.learning_rate or "
            "config.optimizer.clip_norm, or set config.on_nonfinite=skip, in a new --workdir"
        )
        if not self._together:
            raise error
        self.errors[place] = str(error)
        self._print(place, f"error: {error}")
        self._end(place)

    def _end(self, place: int) -> None:
        """A run takes no more steps."""
        del self._runs[place]
        if self._together:
            state, alive = self.state
            self.state = state, alive.at[place].set(False)

    def _print(self, place: int, text: str) -> None:
        """Print a line of a run, with its name where they are several."""
        self.reporter.print(f"{self._runs[place].plan.workdir.path.name}: {text}" if self._together else text)

    def _tell_of_use(self, run: Run) -> None:
        """The next command, or call where a command cannot make the model."""
        plan, files = run.plan, {}
        for name, path in custom.code(plan.config.model).items():
            copied = plan.metadata.get("code", {}).get(name, {}).get("file")
            files[f" --import={copied or path}"] = name
        if plan.passed.model is not None:
            self.reporter.print(f'load it in Python with: attnlab.load("{plan.workdir}", model=…)')
        elif any("<" in name for name in files.values()):  # a lambda, or a function within another
            self.reporter.print(f'load it in this process with: attnlab.load("{plan.workdir}")')
        elif self._sampled:
            options = f"--workdir={plan.workdir}{''.join(files)}"
            self.reporter.print(f"generate text with: {typed('sample')} {options}")

    def _profiler(self) -> Profiler:
        """Of the first run, in the first process."""
        run = self._runs[0]
        steps = self.config.profiled() if run.log else None
        return Profiler(steps, self.start, run.plan.workdir.path / "profile", self.reporter.print)

    def _measure_flops(self) -> None:
        """FLOPs per token and peak FLOP/s per device, for the model FLOPs utilization (MFU)."""
        config, model = self.config, self.experiment.model
        devices = self.experiment.parallel.mesh.devices.size
        # The virtual devices of a CPU share its cores.
        self._devices = jax.process_count() if jax.default_backend() == "cpu" else devices
        self._flops = flops_lib.per_token(model, config.model.context)
        self._peak_flops = config.log.peak_tflops * 1e12
        if not self._peak_flops and self._runs[0].log:
            self._peak_flops = flops_lib.peak(config.precision)
            most = f": at most {self._peak_flops * self._devices / self._flops:,.0f} tokens/s" if self._flops else ""
            self.reporter.print(f"{self._flops:.3g} FLOPs per token, {self._peak_flops:.3g} FLOP/s per device{most}")

    def _unstacked(self, params):
        """The parameters with their layers one by one; unchanged for a user's model, whatever their names."""
        return unstack_layers(params) if self.experiment.scan else params

    def _tokens(self, steps: int) -> int:
        config = self.config
        return steps * config.batch_size * config.model.context


def evaluate(run: Run) -> dict:
    """Loss on held-out text in nats per token and in bits, or on a task with the accuracy."""
    (scores,) = run.experiment.evaluate(run.state.evaluated, run.text.validation)
    return {**scores, **run.text.bits_of(scores["loss"])}
