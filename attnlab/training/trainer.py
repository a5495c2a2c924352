"""The training loop: steps, logging, evaluation, checkpoints, samples, and stopping on signals."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator

import jax
from jax.experimental import multihost_utils

from attnlab.data.batches import Batch, prefetched
from attnlab.data.tasks import named
from attnlab.generation.decoding import generate
from attnlab.generation.texts import prompt_ids
from attnlab.nn import GPT, unstack_layers
from attnlab.support.errors import UserError
from attnlab.support.names import typed
from attnlab.training import flops as flops_lib
from attnlab.training import metrics as metrics_lib
from attnlab.training import parallel as parallel_lib
from attnlab.training.checkpoints import OnPhase, history_steps, sha256
from attnlab.training.preemption import PreemptionHandler
from attnlab.training.profiling import Profiler
from attnlab.training.run import Run
from attnlab.training.text import Text


class Trainer:
    """Train from a state to the end of the run, or until stopped.

    Args:
      run: open; its log and its files are written by the first process alone.
      on_step: called after every step in every process, `on_step(step, metrics)`; see `attnlab.train.train`.
      on_phase: `with on_phase(name)` surrounds each of `checkpoints.PHASES`.
    """

    def __init__(
        self,
        run: Run,
        preemption: PreemptionHandler,
        on_step: Callable[[int, dict], None] | None = None,
        on_phase: OnPhase = contextlib.nullcontext,
    ):
        self.opened, self.config, self.state = run, run.plan.config, run.state
        self.experiment, self.text, self.start = run.experiment, run.text, run.start
        self.checkpoints, self.log, self.reporter = run.checkpoints, run.log, run.reporter
        self.preemption, self.on_step, self.on_phase = preemption, on_step, on_phase
        # No samples of a user's model, and of a task.
        is_text = isinstance(self.experiment.model, GPT) and named.parse(self.config.data.name) is None
        self._sampled = self.config.sample.length if is_text else 0  # tokens
        self._history = frozenset(history_steps(self.config.steps, self.config.checkpoint.history))
        self._unread = []  # metrics of steps that were dispatched, but not yet read
        self._timer = _Timer(self.start)

    def run(self) -> int:
        """Train to the last step; returns 0, or 128 + the number of the signal that stopped and saved the run."""
        last = self.config.steps
        self._measure_flops()
        if not self.start and 0 in self._history and 0 not in self.checkpoints.steps():
            self._save()
        with self.reporter, self._profiler() as profiler:
            if self._evaluation_pending() and not self._evaluate(self.start):
                return self.preemption.exit_code
            if self._patience_exhausted(self.start):  # the run was stopped before its last record
                last = self.start
            self._timer.restart(self.start)
            batches = prefetched(self.text.train, self.start, last)
            for step in range(self.start + 1, last + 1):
                with profiler.step(step):
                    self._train_step(step, batches)
                self._timer.exclude(profiler.written(step, self.state))
                stopping = self.preemption.requested()  # polled once per step: later requests wait for the next
                log, evaluate, save, sample = self._due(step, stopping)
                read = log or evaluate or save
                if read:
                    metrics = self._read_metrics(step)
                    self._timer.stop(step)
                if log:
                    self._write_metrics(step, metrics)
                if evaluate:
                    stopping = not self._evaluate(step)
                if stopping:
                    self.reporter.close()
                    self.reporter.print(f"stopping: saving step {step}; a second signal ends the process without it")
                exhausted = evaluate and not stopping and self._patience_exhausted(step)
                if save or exhausted:
                    self._save()
                if stopping:
                    self._save_and_report()
                    return self.preemption.exit_code
                if exhausted:
                    break
                if sample:
                    self._write_sample(step)
                if read:
                    self._timer.restart(step)  # exclude evaluation, saving and sampling
            self._finish()
        return 0

    def _due(self, step: int, stopping: bool) -> tuple[bool, bool, bool, bool]:
        """Whether to log, evaluate, save and sample after a step."""
        config = self.config
        last = step == config.steps
        log = last or step % config.log.every == 0
        evaluate = self._evaluates(step) and not stopping
        save = last or stopping or step % config.checkpoint.every == 0 or step in self._history
        sample = not last and bool(config.sample.every) and step % config.sample.every == 0
        return log, evaluate, save, sample

    def _evaluates(self, step: int) -> bool:
        return step == self.config.steps or step % self.config.eval.every == 0

    def _evaluation_pending(self) -> bool:
        """Whether the run was stopped before the step that it resumes from could be evaluated."""
        pending = self.start and self._evaluates(self.start) and self.log and self.log.validation(self.start) is None
        return bool(parallel_lib.from_first_process(bool(pending)))

    def _patience_exhausted(self, step: int) -> bool:
        """Whether the recorded evaluations up to a step end the run before its last step."""
        config = self.config
        if not config.eval.patience or not self._evaluates(step) or step == config.steps:
            return False
        exhausted = self.log and metrics_lib.stalled(self.log.records, config.eval.patience)
        return bool(parallel_lib.from_first_process(bool(exhausted)))

    def _train_step(self, step: int, batches: Iterator[Batch]) -> None:
        config, parallel = self.config, self.experiment.parallel
        first = step == self.start + 1
        if first:
            self.reporter.say("compiling the step")
        requested = time.perf_counter()
        batch = next(batches)
        if not self._unread or self._unread[-1]["loss"].is_ready():  # otherwise the devices were still computing
            self._timer.waited += time.perf_counter() - requested
        placed = parallel.place_batch(batch)
        with self.on_phase("compile" if first else "step"), parallel.transfer_guard():
            self.state, metrics = self.experiment.train_step(self.state, placed)
            if first:
                jax.block_until_ready(self.state)
        if first:
            self.preemption.handle()
            self.reporter.print(f"first step finished: {self._timer.elapsed():.1f} s, including compilation")
            self.reporter.show("")
            if step % config.log.every and step < config.steps:
                self._timer.restart(step)  # exclude compilation too
        self._unread.append(metrics)
        if self.on_step:
            self.on_step(step, metrics)

    def _read_metrics(self, step: int) -> dict:
        """Wait for the step, and return its metrics, with None for values that are not finite."""
        skip = self.config.on_nonfinite == "skip"
        read = [{name: float(value) for name, value in old.items()} for old in jax.device_get(self._unread)]
        self._unread = []
        for at, metrics in enumerate(read, step - len(read) + 1):
            if found := _nonfinite(metrics):
                if not skip or not math.isfinite(metrics["param_norm"]):
                    raise self._not_finite(found, at)
                self.reporter.print(f"step {at} is skipped: {found} ({metrics['skipped']:.0f} skipped in total)")
        return {name: value if math.isfinite(value) else None for name, value in read[-1].items()}

    def _write_metrics(self, step: int, metrics: dict) -> None:
        if self.log is None:
            return
        tokens_per_second = self._timer.steps * self._tokens(1) / self._timer.seconds
        rate, peaks = self.experiment.learning_rate, metrics_lib.memory_peaks(jax.local_devices())
        self.log.write(
            step=step,
            split="train",
            **metrics,
            **_bits(self.text, metrics["loss"]),
            **({"learning_rate": float(rate(step - 1))} if rate else {}),
            tokens=self._tokens(step),
            tokens_per_second=tokens_per_second,
            mfu=self._flops * tokens_per_second / (self._peak_flops * self._devices),
            peak_flops=self._peak_flops,
            data_wait_time_share=self._timer.waited / self._timer.seconds,
            **peaks,
        )
        speed = f"{tokens_per_second:,.0f} tokens/s"
        self.reporter.step(step, f"{format_scores('train', metrics)}  {speed}")

    def _evaluate(self, step: int) -> bool:
        """Evaluate the state on the validation text; returns False when stopped before the end."""
        with self.on_phase("evaluation"):
            scores = evaluate(self.opened._replace(state=self.state), self.preemption.requested)
        if scores is None:
            return False
        if not math.isfinite(scores["loss"]):
            raise self._not_finite(f"validation loss is {scores['loss']}", step)
        if self.log:
            self.log.write(step=step, split="val", **scores, tokens=self._tokens(step))
        self.reporter.print(f"step {step}/{self.config.steps}  {format_scores('validation', scores)}")
        return True

    def _save(self) -> None:
        state = self.experiment.parallel.over_processes(self.state)
        permanent = int(self.state.step) in self._history
        with self.on_phase("save"):
            self.checkpoints.save(state, permanent=permanent, log=self.log.offset() if self.log else None)

    def _save_and_report(self) -> None:
        """Save the state and print where."""
        self._save()
        self.checkpoints.wait()
        step, directory = int(self.state.step), self.checkpoints.directory
        self.reporter.print(f"stopped: step {step} is saved in {directory}; the same command resumes from there")
        # A launcher may kill the other processes as soon as one ends.
        multihost_utils.sync_global_devices("attnlab: stopped")

    def _write_sample(self, step: int) -> None:
        if not self._sampled:
            return
        params = self.experiment.parallel.on_every_device(self.state.evaluated)
        if self.log is None:
            return
        params = jax.tree.map(lambda x: x.addressable_data(0), params)
        variables, tokenizer = {"params": jax.jit(self._unstacked)(params)}, self.text.tokenizer
        options = {"temperature": 0.8, "seed": self.config.seed, "vocab_size": tokenizer.vocab_size}
        prompt = prompt_ids(tokenizer, None)
        generated = generate(self.experiment.model, variables, prompt, self._sampled, **options)
        with self.on_phase("sampling"):
            try:
                text = tokenizer.decode([tokens[0] for tokens in generated])
            except Exception as error:  # e.g. no memory is left: the run's record matters more
                why = str(error).split("\n")[0] or type(error).__name__
                self.reporter.print(f"no sample at step {step} ({why}); the run continues")
                return
        self.reporter.print(f"--- sample at step {step}:\n{text}\n---")
        self.log.write_text(step, text)

    def _finish(self) -> None:
        config, last = self.config, int(self.state.step)
        if last < config.steps:
            self.reporter.print(
                f"stopped early at step {last} of {config.steps}: no lower validation loss in "
                f"config.eval.patience = {config.eval.patience} evaluations"
            )
        self.checkpoints.wait()
        self._write_sample(last)
        params = self.experiment.parallel.on_every_device(self.state.params)
        if self.log:
            scores = self.log.validation(last)
            result = {name: scores[name] for name in ("loss", "accuracy") if name in scores}
            digest = sha256(self._unstacked(jax.device_get(params)))
            self.log.write(step=last, split="final", **result, params_sha256=digest)
            *_, peak = metrics_lib.memory_peaks(jax.local_devices()).values()  # the device's, where it tells
            self.reporter.print(f"done: {format_scores('validation', scores)}, peak memory {peak / 1e9:.2f} GB")
            self._tell_of_use()

    def _tell_of_use(self) -> None:
        """The next command, or call where a command cannot make the model."""
        plan = self.opened.plan
        passed = [name for name in ("model", "mask", "score_mod") if getattr(plan.passed, name) is not None]
        if passed:
            arguments = ", ".join(f"{name}=…" for name in passed)
            self.reporter.print(f'load it in Python with: attnlab.load("{plan.workdir}", {arguments})')
        elif self._sampled:
            sources = plan.metadata.get("code", {}).values()
            files = dict.fromkeys(f" --import={source['file']}" for source in sources)
            options = f"--workdir={plan.workdir}{''.join(files)}"
            self.reporter.print(f"generate text with: {typed('sample')} {options}")

    def _profiler(self) -> Profiler:
        """Of the first process alone."""
        steps = self.config.profiled() if self.log else None
        return Profiler(steps, self.start, self.opened.plan.workdir.path / "profile", self.reporter.print)

    def _measure_flops(self) -> None:
        """FLOPs per token and peak FLOP/s per device, for the model FLOPs utilization (MFU)."""
        config, model = self.config, self.experiment.model
        devices = self.experiment.parallel.mesh.devices.size
        # The virtual devices of a CPU share its cores.
        self._devices = jax.process_count() if jax.default_backend() == "cpu" else devices
        self._flops = flops_lib.per_token(model, config.model.context)
        self._peak_flops = config.log.peak_tflops * 1e12
        if not self._peak_flops and self.log:
            self._peak_flops = flops_lib.peak(config.precision)
            self.reporter.print(
                f"{self._flops:.3g} FLOPs per token, {self._peak_flops:.3g} FLOP/s per device: "
                f"at most {self._peak_flops * self._devices / self._flops:,.0f} tokens/s"
            )

    def _unstacked(self, params):
        """The parameters with their layers one by one; unchanged for a user's model, whatever their names."""
        return unstack_layers(params) if self.experiment.scan else params

    def _tokens(self, steps: int) -> int:
        config = self.config
        return steps * config.batch_size * config.model.context

    def _not_finite(self, found: str, step: int) -> UserError:
        if self.log:
            self.log.write(step=step, split="diverged", loss=None)
        self.checkpoints.wait()
        kept = self.checkpoints.steps()
        where = f"the last good checkpoint is step {kept[-1]}" if kept else "no checkpoint was saved yet"
        return UserError(
            f"{found} at step {step}; {where} in {self.opened.plan.workdir}: lower config.optimizer.learning_rate or "
            "config.optimizer.clip_norm, or set config.on_nonfinite=skip, in a new --workdir"
        )


def evaluate(run: Run, stop: Callable[[], bool] = lambda: False) -> dict | None:
    """Loss on held-out text in nats per token and in bits, or on a task with the accuracy; None if `stop()` ends it."""
    scores = run.experiment.evaluate(run.state.evaluated, run.text.validation, stop)
    return None if scores is None else {**scores, **_bits(run.text, scores["loss"])}


def _bits(text: Text, loss: float | None) -> dict:
    return {name: None if loss is None else loss * factor for name, factor in text.bits.items()}


def format_scores(split: str, scores: dict) -> str:
    """Format a loss, with its bits per character and byte, or its accuracy, if there are any."""
    if scores["loss"] is None:
        return f"{split} loss not finite"
    bits = ""
    if "bits_per_character" in scores:
        bits = f" ({scores['bits_per_character']:.3f} bits per character, {scores['bits_per_byte']:.3f} per byte)"
    accuracy = f", accuracy {scores['accuracy']:.4f}" if "accuracy" in scores else ""
    return f"{split} loss {scores['loss']:.4f}{bits}{accuracy}"


class _Timer:
    """Training time since the last `restart`: `seconds` for `steps` steps, of which `waited` seconds for data."""

    def __init__(self, step: int):
        self.steps = self.seconds = 0
        self.restart(step)

    def restart(self, step: int) -> None:
        self._began, self._step, self.waited = time.perf_counter(), step, 0.0

    def exclude(self, seconds: float) -> None:
        self._began += seconds

    def stop(self, step: int) -> None:
        self.steps, self.seconds = step - self._step, self.elapsed()

    def elapsed(self) -> float:
        return time.perf_counter() - self._began


def _nonfinite(metrics: dict) -> str:
    """The first metric that is not finite, as in "loss is nan"; "" if all are finite."""
    return next((f"{name} is {value}" for name, value in metrics.items() if not math.isfinite(value)), "")
