"""The runs of a training loop: their state and their steps, evaluations, saves, samples and ends."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from attnlab.data.batches import Batches
from attnlab.data.tasks import named
from attnlab.generation.decoding import generate
from attnlab.generation.texts import prompt_ids
from attnlab.nn import GPT, custom, unstack_layers
from attnlab.support.errors import UserError
from attnlab.support.names import typed
from attnlab.training import flops as flops_lib
from attnlab.training import metrics as metrics_lib
from attnlab.training import parallel as parallel_lib
from attnlab.training.checkpoints import OnPhase, history_steps, sha256
from attnlab.training.population import Population
from attnlab.training.profiling import Profiler, Timer
from attnlab.training.run import OpenRun


class Due(NamedTuple):
    """Whether to evaluate, save and sample after a step."""

    evaluate: bool
    save: bool
    sample: bool


class Members:
    """The runs of a population: each has its own log, checkpoints and end.

    Attributes:
      runs: the runs that have not ended, by their index in the population.
      state: the state of the population.
      errors: the errors of diverged runs, by index.
      history: the steps of permanent checkpoints.
    """

    def __init__(self, runs: Sequence[OpenRun], on_phase: OnPhase):
        first, self.population = runs[0], Population(len(runs))
        self.config, self.program, self.reporter = first.plan.config, first.program, first.reporter
        self.state, self._on_phase = self.population.join([run.state for run in runs]), on_phase
        self.program.forget_init()
        self.runs = {index: run._replace(state=None) for index, run in enumerate(runs)}
        self.errors: dict[int, UserError] = {}
        self.history = frozenset(history_steps(self.config.steps, self.config.checkpoint.history))
        # Only a GPT that trains on text writes samples.
        is_text = isinstance(self.program.model, GPT) and named.parse(self.config.data.name) is None
        self._sampled = self.config.sample.length if is_text else 0  # tokens

    # ------------------------------------------------------------------------------------------------ before the loop

    def begin(self, step: int) -> None:
        """Measure the peak speed, and save the initial state if it is part of the history."""
        self._measure_flops()
        if not step and 0 in self.history:
            self.save(step, [index for index, run in self.runs.items() if 0 not in run.checkpoints.steps()])

    def batches(self) -> Batches:
        """The training batches of all runs, by step."""
        return self.population.stack([run.text.train for run in self.runs.values()])

    def profiler(self, start: int) -> Profiler:
        """A profiler that writes in the first process, to the first run's folder."""
        run = self.runs[0]
        steps = self.config.profiled() if run.log else None
        return Profiler(steps, start, run.plan.workdir.path / "profile", self.reporter.print)

    def _measure_flops(self) -> None:
        """Measure FLOPs per token and peak FLOP/s per device, for the model FLOPs utilization (MFU)."""
        config, devices = self.config, self.program.parallel.mesh.devices.size
        # The virtual devices of a CPU share its cores.
        self._devices = jax.process_count() if jax.default_backend() == "cpu" else devices
        self._flops = flops_lib.per_token(self.program.model, config.model.context)
        self._peak_flops = config.log.peak_tflops * 1e12
        if not self._peak_flops and self.runs[0].log:
            self._peak_flops = flops_lib.peak(config.precision)
            most = f": at most {self._peak_flops * self._devices / self._flops:,.0f} tokens/s" if self._flops else ""
            self.reporter.print(f"{self._flops:.3g} FLOPs per token, {self._peak_flops:.3g} FLOP/s per device{most}")

    # ------------------------------------------------------------------------------------------------- what is due

    def due(self, step: int) -> Due:
        """The pauses that are due after a step."""
        config, is_last = self.config, step == self.config.steps
        save = is_last or step % config.checkpoint.every == 0 or step in self.history
        sample = not is_last and bool(config.sample.every) and step % config.sample.every == 0
        return Due(self._evaluates_at(step), save, sample)

    def logs_at(self, step: int) -> bool:
        """Whether the metrics of a step are recorded."""
        return step == self.config.steps or step % self.config.log.every == 0

    def _evaluates_at(self, step: int) -> bool:
        return step == self.config.steps or step % self.config.eval.every == 0

    # ------------------------------------------------------------------------------------------------- metrics

    def record(self, step: int, metrics: dict[str, np.ndarray], timer: Timer) -> None:
        """Check the metrics of a step, each `[n]`, and record them if the step is logged."""
        rows = {index: {name: float(x[index]) for name, x in metrics.items()} for index in self.runs}
        for index, row in rows.items():
            if fault := metrics_lib.nonfinite(row):
                self._react(index, fault, step, row)
        if self.logs_at(step):
            self._log(step, {index: rows[index] for index in self.runs}, timer)

    def _react(self, index: int, fault: str, step: int, row: dict) -> None:
        """End a run whose metrics are not finite, or report that its optimizer skipped the step."""
        if self.config.on_nonfinite == "skip" and math.isfinite(row["param_norm"]):
            self._print(index, f"step {step} is skipped: {fault} ({row['skipped']:.0f} skipped in total)")
        else:
            self._diverge(index, fault, step)

    def _log(self, step: int, rows: dict[int, dict], timer: Timer) -> None:
        tokens_per_second, rate = self._tokens(1) / timer.pace, self.program.learning_rate  # per run
        throughput = self.population.n * tokens_per_second
        peaks = metrics_lib.memory_peaks(jax.local_devices())
        for index, row in rows.items():
            run = self.runs[index]
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
                mfu=self._flops * throughput / (self._peak_flops * self._devices),
                peak_flops=self._peak_flops,
                data_wait_time_share=timer.waited_share,
                **peaks,
            )
        shown = "  ".join(metrics_lib.format_scores("train", row) for row in rows.values())
        self.reporter.step(step, f"{shown}  {throughput:,.0f} tokens/s")

    # ------------------------------------------------------------------------------------------------- evaluation

    def evaluation_pending(self, start: int) -> bool:
        """Whether the step from which a run resumes was saved but not yet evaluated."""
        logs = [run.log for run in self.runs.values() if run.log]
        pending = start and self._evaluates_at(start) and any(log.validation(start) is None for log in logs)
        return bool(parallel_lib.from_first_process(bool(pending)))

    def evaluate(self, step: int, stop: Callable[[], bool]) -> bool:
        """Evaluate the state on the validation text; return False if `stop()` ended the evaluation."""
        text, params = next(iter(self.runs.values())).text, self.population.states(self.state).evaluated
        with self._on_phase("evaluation"):
            results = self.program.evaluate(params, text.validation, stop, self.population)
        for index, run in list(self.runs.items()) if results else ():
            scores = {**results[index], **run.text.bits_of(results[index]["loss"])}
            if not math.isfinite(scores["loss"]):
                self._diverge(index, f"validation loss is {scores['loss']}", step)
                continue
            if run.log and run.log.validation(step) is None:
                run.log.write(step=step, split="val", **scores, tokens=self._tokens(step))
            self._print(index, f"step {step}/{self.config.steps}  {metrics_lib.format_scores('validation', scores)}")
        return results is not None

    # ------------------------------------------------------------------------------------------------- checkpoints

    def save(self, step: int, indices: Iterable[int]) -> None:
        """Start saving the states of some runs."""
        for index in indices:
            run = self.runs[index]
            state = self.program.parallel.over_processes(self.population.of_run(self.state, index))
            with self._on_phase("save"):
                log = run.log.offset() if run.log else None
                run.checkpoints.save(state, permanent=step in self.history, log=log)

    def save_and_stop(self, step: int) -> None:
        """Save all runs after a signal, wait for the saves, and print where each run was saved."""
        self.reporter.close()
        self.reporter.print(f"stopping: saving step {step}; a second signal ends the process without saving")
        self.save(step, self.runs)
        for index, run in self.runs.items():
            run.checkpoints.wait()
            where = f"step {step} is saved in {run.checkpoints.directory}"
            self._print(index, f"stopped: {where}; the same command resumes from there")
        # A launcher may kill the other processes as soon as one ends.
        multihost_utils.sync_global_devices("attnlab: stopped")

    # ------------------------------------------------------------------------------------------------- samples

    def sample(self, step: int) -> None:
        """Print and record a sample of each run."""
        for index in self.runs if self._sampled else ():
            self._sample(index, step)

    def _sample(self, index: int, step: int) -> None:
        run, state = self.runs[index], self.population.of_run(self.state, index)
        params = self.program.parallel.on_every_device(state.evaluated)
        if run.log is None:
            return
        params = jax.tree.map(lambda x: x.addressable_data(0), params)
        variables, tokenizer = {"params": jax.jit(self._unstacked)(params)}, run.text.tokenizer
        options = {"temperature": 0.8, "seed": run.plan.config.seed, "vocab_size": tokenizer.vocab_size}
        generated = generate(self.program.model, variables, prompt_ids(tokenizer, None), self._sampled, **options)
        with self._on_phase("sampling"):
            try:
                text = tokenizer.decode([tokens[0] for tokens in generated])
            except Exception as error:  # e.g. out of memory: a missing sample must not end the run
                why = str(error).split("\n")[0] or type(error).__name__
                self._print(index, f"no sample at step {step} ({why}); the run continues")
                return
        self._print(index, f"--- sample at step {step}:\n{text}\n---")
        run.log.write_text(step, text)

    # ------------------------------------------------------------------------------------------------- ends

    def end_exhausted(self, step: int) -> None:
        """Save and finish the runs that are out of patience before the last step."""
        config = self.config
        if not config.eval.patience or not self._evaluates_at(step) or step == config.steps:
            return
        for index, run in list(self.runs.items()):
            exhausted = run.log and metrics_lib.stalled(run.log.records, config.eval.patience)
            if parallel_lib.from_first_process(bool(exhausted)):
                self.save(step, [index])
                without = f"no lower validation loss in config.eval.patience = {config.eval.patience} evaluations"
                self._print(index, f"stopped early at step {step} of {config.steps}: {without}")
                self._finish(index, step)
                self._end(index)

    def finish(self, step: int) -> None:
        """Write a last sample and the final record of each run, once its checkpoint is saved."""
        for index in self.runs:
            self._finish(index, step)

    def _finish(self, index: int, step: int) -> None:
        run = self.runs[index]
        run.checkpoints.wait()
        if self._sampled:
            self._sample(index, step)
        params = self.program.parallel.on_every_device(self.population.of_run(self.state, index).params)
        if run.log:
            scores = run.log.validation(step)
            result = {name: scores[name] for name in ("loss", "accuracy") if name in scores}
            digest = sha256(self._unstacked(jax.device_get(params)))
            run.log.write(step=step, split="final", **result, params_sha256=digest)
            *_, peak = metrics_lib.memory_peaks(jax.local_devices()).values()  # of the device, if known
            shown = metrics_lib.format_scores("validation", scores)
            self._print(index, f"done: {shown}, peak memory {peak / 1e9:.2f} GB")
            self._tell_of_use(run)

    def _diverge(self, index: int, fault: str, step: int) -> None:
        """End a run because its metrics are not finite; its state is not saved again."""
        run = self.runs[index]
        if run.log:
            run.log.write(step=step, split="diverged", loss=None)
        run.checkpoints.wait()
        steps = run.checkpoints.steps()
        where = f"the last good checkpoint is step {steps[-1]}" if steps else "no checkpoint was saved yet"
        self.errors[index] = UserError(
            f"{fault} at step {step}; {where} in {run.plan.workdir}: lower config.optimizer.learning_rate or "
            "config.optimizer.clip_norm, or set config.on_nonfinite=skip, in a new --workdir"
        )
        self._end(index)

    def _end(self, index: int) -> None:
        """Remove a run, so that it takes no more steps."""
        del self.runs[index]
        self.state = self.population.end(self.state, index)

    def _print(self, index: int, text: str) -> None:
        """Print a line about a run, with its name if there are several runs."""
        name = f"{self.runs[index].plan.workdir.path.name}: " if self.population.n > 1 else ""
        self.reporter.print(f"{name}{text}")

    def _tell_of_use(self, run: OpenRun) -> None:
        """Print the next command, or a Python call if no command can create the model."""
        plan, files = run.plan, {}
        for name, path in custom.code(plan.config.model).items():
            copied = plan.metadata.get("code", {}).get(name, {}).get("file")
            files[f" --import={copied or path}"] = name
        if plan.overrides.model is not None:
            self.reporter.print(f'load it in Python with: attnlab.load("{plan.workdir}", model=…)')
        elif any("<" in name for name in files.values()):  # a lambda or a nested function
            self.reporter.print(f'load it in this process with: attnlab.load("{plan.workdir}")')
        elif self._sampled:
            options = f"--workdir={plan.workdir}{''.join(files)}"
            self.reporter.print(f"generate text with: {typed('sample')} {options}")

    def _unstacked(self, params):
        """Unstack stacked layers; a user-defined model's parameters stay unchanged, whatever their names."""
        return unstack_layers(params) if self.program.scan else params

    def _tokens(self, steps: int) -> int:
        return steps * self.config.batch_size * self.config.model.context
