"""A run: its plan before anything is loaded or written, and its open resources while it trains or is evaluated.

`resolve` makes a `RunPlan` from a config and a folder; `open_run` loads its text and state, and claims its files.
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
from ml_collections import ConfigDict

from attnlab import config as configs
from attnlab.config import RunConfig
from attnlab.data import tokenizers
from attnlab.nn import custom
from attnlab.nn.config import KINDS
from attnlab.support import status
from attnlab.support.errors import UserError
from attnlab.training import metrics as metrics_lib
from attnlab.training import parallel as parallel_lib
from attnlab.training import precision, pretrained, trackers
from attnlab.training import text as texts
from attnlab.training.checkpoints import Checkpoints, OnPhase
from attnlab.training.overrides import NOTHING, Overrides
from attnlab.training.program import TrainProgram
from attnlab.training.state import TrainState
from attnlab.training.text import Text
from attnlab.training.workdir import Workdir

NOWHERE = Path("/dev/null/no-run")  # a folder that cannot hold a run


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """The plan of a run, before anything is loaded or written.

    Attributes:
      config: complete and checked, with the precision "auto" resolved.
      workdir: the folder, and the run that an earlier start left there.
      finished: the last step of a run that has ended; None for any other run, and for an evaluation.
      tokenizer: the tokenizer in `config.init_from`; None to use the tokenizer of the text or of the previous run.
      overrides: the user's model and optimizer.
      metadata: the part of the metadata in `config.json` that is known by now.
    """

    config: RunConfig
    workdir: Workdir
    finished: int | None
    tokenizer: tokenizers.Tokenizer | None
    overrides: Overrides
    metadata: dict

    @property
    def origin(self) -> str:
        """ "fresh" or "weights" for a new run; "finished", "extended" or "resumed" for a run in the folder."""
        if self.workdir.previous_run is None:
            return "weights" if self.config.init_from else "fresh"
        if self.finished is not None:
            return "finished"
        return "extended" if self.config.steps > self.workdir.steps else "resumed"


def resolve(
    config: ConfigDict | RunConfig,
    workdir: str | Path = NOWHERE,
    *,
    eval_only: bool = False,
    overrides: Overrides = NOTHING,
    device: jax.Device | None = None,
) -> RunPlan:
    """Decide everything about a run, without loading or writing anything.

    Args:
      config: the config, which is not changed.
      workdir: the run's folder, which may already hold the run.
      eval_only: evaluate the run as it is.
      overrides: arguments of `attnlab.train.train`.
      device: one of the devices that will compute; None for the first device of this process.

    Raises:
      UserError: an invalid config, a config that does not continue the run in the folder, or a precision that the
        device lacks.

    >>> resolve(configs.default()).origin
    'fresh'
    """
    config, folder = configs.completed(config), Workdir(workdir)
    if folder.previous_run is None:
        config.check_effects()
    config, tokenizer = pretrained.completed(config, folder)
    config = config.changed({"precision": _precision(config, folder, overrides, device)})
    folder.check_config(config, may_extend=not eval_only)
    if folder.previous_run is not None:
        overrides.check_continues(folder.previous_run, config, folder)
    copies = folder.path.absolute() / "source"  # a notebook cell's code has no other file
    sources = custom.sources(config.model.layers).items()
    registered = [(kind, source) for kind, source in sources if kind in KINDS]
    code = {kind: {"file": str(copies / source.path) if source.text else ""} for kind, source in registered}
    metadata = overrides.metadata() | ({"code": code} if code else {})
    if eval_only and folder.previous_run is None:
        raise UserError(f"{folder} holds no run to evaluate: train first")
    # An evaluation needs no log, so a damaged log does not prevent it.
    finished = None if eval_only else metrics_lib.finished(folder.metrics, config.steps, config.eval.patience)
    if not eval_only and finished is None:  # an existing run may be read and evaluated on any device
        precision.resolved(config.precision, device)
    return RunPlan(config, folder, finished, tokenizer, overrides, metadata)


def _precision(config: RunConfig, workdir: Workdir, overrides: Overrides, device: jax.Device | None) -> str:
    """The config's precision; for "auto" the previous run's, a user's model's, or the first process' faster type."""
    if config.precision == "auto" and workdir.config is not None:
        return workdir.config.precision
    if overrides.model is not None:
        return overrides.precision(config.precision)
    if config.precision != "auto":
        return config.precision
    if device is not None:
        return precision.resolved("auto", device)
    chosen = ("float32", "bfloat16")
    return chosen[parallel_lib.from_first_process(chosen.index(precision.resolved("auto")))]


class Shared(NamedTuple):
    """The text and program of runs that start from the same step and differ only in seed and learning rates."""

    text: Text
    program: TrainProgram


def load(plan: RunPlan, extensions: Sequence[dict] = (), say: Callable[[str], None] = status.silent) -> Shared:
    """Load the text of a run, and create its program; `extensions` as in `optimizer.learning_rate`."""
    parallel = parallel_lib.from_config(plan.config)
    text = texts.load(plan.config, plan.workdir, plan.tokenizer, parallel.batch_share, say)
    options = {"parallel": parallel, "extensions": extensions, **plan.overrides._asdict()}
    return Shared(text, TrainProgram(plan.config, text.tokenizer.vocab_size, **options))


def start_of(plan: RunPlan) -> tuple[int, list[dict]]:
    """The step from which a run starts, and its extensions."""
    with contextlib.closing(Checkpoints(plan.workdir.checkpoint_dir(plan.config))) as checkpoints:
        start, _ = _resume_step(checkpoints, plan.workdir, plan.config, eval_only=False)
    return start, plan.workdir.extensions(plan.config, start)


class OpenRun(NamedTuple):
    """A run while it trains or is evaluated.

    Attributes:
      start: the step of the state.
      damaged: faults of checkpoints after `start`, by step.
      log: None in all processes but the first, and if the run is only evaluated.
    """

    plan: RunPlan
    program: TrainProgram
    text: Text
    checkpoints: Checkpoints
    state: TrainState
    start: int
    damaged: dict[int, str]
    reporter: metrics_lib.ProgressReporter
    log: metrics_lib.MetricsLog | None


@contextlib.contextmanager
def open_run(
    plan: RunPlan,
    *,
    eval_only: bool = False,
    on_phase: OnPhase = contextlib.nullcontext,
    tracker: trackers.NewTracker | None = None,
    own_process: bool = False,
    shared: Shared | None = None,
    together: int = 1,
) -> Iterator[OpenRun]:
    """Load the text and the newest intact state of a run, and claim its files unless `eval_only`.

    Args:
      plan: the result of `resolve`.
      eval_only, on_phase, tracker: as in `attnlab.train.train`.
      own_process: compile the training and evaluation steps in the background while the state is created.
      shared: the result of `load` for this plan, or for a plan with the same program.
      together: how many runs are trained as one program.

    Raises:
      UserError: a different text, another process in the folder, or a missing or damaged checkpoint.

    >>> import tempfile
    >>> config = configs.default()
    >>> config.parallel.mesh.data, config.data.tokenizer = 1, "byte"
    >>> with open_run(resolve(config, Path(tempfile.mkdtemp()) / "run")) as run:  # doctest: +ELLIPSIS
    ...     run.start
    reading python_docs
    ...
    0
    """
    config, workdir, is_first = plan.config, plan.workdir, jax.process_index() == 0
    say = status.show if is_first else status.silent
    with contextlib.ExitStack() as resources:
        resources.enter_context(precision.products(config.precision))
        if workdir.previous_run and is_first and not eval_only:
            resources.enter_context(workdir.claimed())
        checkpoints = Checkpoints(workdir.checkpoint_dir(config), config.checkpoint.keep, on_phase)
        resources.callback(checkpoints.close)
        start, damaged = _resume_step(checkpoints, workdir, config, eval_only)
        extensions = workdir.extensions(config, start)
        shared = load(plan, extensions, say) if shared is None else shared
        text, program = shared.text.of_seed(config.seed), shared.program
        if not eval_only:
            program.check_backend()
        if own_process and not eval_only:
            program.compile_ahead()
        say(f"restoring step {start}" if start else "initializing the model")
        state = _state(program, checkpoints, start, config)
        reporter, log = metrics_lib.ProgressReporter(config.steps, start, silent=not is_first or eval_only), None
        if not eval_only:
            offset = checkpoints.metadata(start)["log"] if start else None  # in every process: Orbax waits for all
            if is_first:
                metadata = plan.metadata | {"corpus": text.corpus, "vocab_size": text.tokenizer.vocab_size}
                metadata |= {"parameters": program.parameters}
                metadata |= {"extensions": extensions} if extensions else {}
                metadata |= _versions(plan)
                together = max(together, (workdir.previous_run or {}).get("together", 1))
                metadata |= {"together": together} if together > 1 else {}
                log = _open_files(config, metadata, workdir, text, checkpoints, start, offset, resources, tracker)
        opened = OpenRun(plan, program, text, checkpoints, state, start, damaged, reporter, log)
        if log:
            _set_aside_damaged(opened)
        _report_start(opened)
        yield opened


def _resume_step(checkpoints: Checkpoints, workdir: Workdir, config: RunConfig, eval_only: bool):
    """(Step to resume from or 0, faults of newer checkpoints); UserError if a required checkpoint is missing."""
    newest, damaged = checkpoints.newest_intact() if jax.process_index() == 0 else (None, {})
    newest = parallel_lib.from_first_process(-1 if newest is None else newest)
    start, has_checkpoint, previous_run = max(newest, 0), newest >= 0, workdir.previous_run
    if has_checkpoint and previous_run is None:
        raise UserError(
            f"config.checkpoint.dir = {config.checkpoint.dir} holds checkpoints of another run: choose a new folder"
        )
    if start or previous_run is None:
        return start, damaged
    # A save starts only when the previous save is on disk, so after two intervals there must be a checkpoint.
    was = workdir.config
    reached = max((record["step"] for record in metrics_lib.read(workdir.metrics)), default=0)
    if reached > 2 * was.checkpoint.every:
        raise UserError(
            f"{checkpoints.directory} holds no checkpoint{' after step 0' if has_checkpoint else ''}, but the run had "
            f"reached step {reached} with checkpoints in {workdir.checkpoint_dir(was)}: restore them, or start over in "
            "another --workdir"
        )
    if eval_only and not has_checkpoint:
        raise UserError(f"{workdir} holds no checkpoint to evaluate: train longer")
    return start, damaged


def _state(program: TrainProgram, checkpoints: Checkpoints, start: int, config: RunConfig) -> TrainState:
    """The state at a checkpoint, or the initial one."""
    if start:
        return checkpoints.restore(start, program.abstract_state)
    if not config.init_from:
        return program.create_state(seed=config.seed)
    return program.create_state(pretrained.params(config, program.abstract_state.params))


def _versions(plan: RunPlan) -> dict:
    """The entry "versions" of `config.json`, for the code with which the run began; {} without user code."""
    if plan.workdir.previous_run is not None:
        return {name: x for name, x in plan.workdir.previous_run.items() if name == "versions"}
    entries = {part: code.record() for part, code in plan.overrides.code(plan.config).items()}
    return {"versions": entries} if entries else {}


def _open_files(
    config, metadata, workdir, text, checkpoints, start, offset, resources, tracker
) -> metrics_lib.MetricsLog:
    """Create or update the files of a run (only in the first process); return its metrics log."""
    previous_run = workdir.previous_run
    digest = tokenizers.sha256(text.tokenizer) if previous_run is None else previous_run.get("tokenizer_sha256")
    config_json = configs.to_json(config, tokenizer_sha256=digest, **metadata)
    if previous_run is None:
        if config.checkpoint.dir:
            checkpoints.prepare()  # first, so that a failure leaves no workdir behind
        resources.enter_context(workdir.claimed())
        workdir.create(config_json, config, text.tokenizer)
    checkpoints.prepare()
    events = [trackers.TensorBoard(workdir.path / "tensorboard")] if config.log.tensorboard else []
    log = metrics_lib.MetricsLog(workdir.metrics, offset, start, events)
    resources.callback(log.close)
    if previous_run is not None:
        workdir.write_config(config_json)
    if tracker:
        log.trackers.append(tracker(workdir.path, json.loads(config_json)))
    checkpoints.best = lambda steps: metrics_lib.best_step(log.records, steps)
    return log


def _set_aside_damaged(run: OpenRun) -> None:
    for step, why in run.damaged.items():
        name = run.checkpoints.set_aside(step)
        run.reporter.print(f"checkpoint {step} is damaged ({why}): set aside as {name}")
    if run.log.lost:
        run.reporter.print(f"{run.log.path} is missing: the records up to step {run.start} are lost")


def _report_start(run: OpenRun) -> None:
    plan, program, text, reporter = run.plan, run.program, run.text, run.reporter
    config, parallel, workdir = plan.config, program.parallel, plan.workdir
    devices, model = parallel.mesh.devices.size, type(program.model).__name__
    reporter.print(
        f"{config.data.name}: {text.summary}, vocabulary size {text.tokenizer.vocab_size}\n"
        f"{model} of {program.parameters:,} parameters on {devices} {jax.devices()[0].platform} "
        f"device{'s' if devices > 1 else ''} ({parallel.strategy}), in {precision.described(config.precision)}, "
        f"into {workdir}"
    )
    if run.start:
        reporter.print(f"resumed from step {run.start}")
    elif plan.origin == "weights":
        reporter.print(f"starting from {config.init_from}, sequences of {config.model.context} tokens")
    elif workdir.previous_run:
        reporter.print("no checkpoint was saved yet: starting from the beginning")
    if plan.origin == "extended":
        message, rate = f"extended from {workdir.steps} to {config.steps} steps", program.learning_rate
        if rate and run.start:
            before, after = (float(rate(config.optimizer.learning_rate, run.start - n)) for n in (1, 0))
            message += f": the learning rate was {before:.3g}, and is now {after:.3g}"
        reporter.print(message)
