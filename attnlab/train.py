"""Train a GPT on text.

    python -m attnlab.train --config=configs/quickstart.py
    python -m attnlab.train --config=configs/sancho.py:tiny --workdir=runs/sancho --config.data.path=quijote.txt

The same command resumes a stopped run, and does nothing for a finished one. For an existing run the folder alone is
enough: --workdir=runs/sancho resumes it, or evaluates it with --eval_only, or extends it with --config.steps=MORE. An
extended run continues from its last checkpoint, with the learning rate schedule of the new number of steps.
"""

if __name__ == "__main__":
    from attnlab.support import hugepages

    hugepages.restart("attnlab.train")

import contextlib
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import flax.linen as nn
import jax
import optax
from absl import flags
from ml_collections import ConfigDict

from attnlab import commands, compilation, pretrained
from attnlab import config as configs
from attnlab.data import tokenizers
from attnlab.data.tasks import named
from attnlab.loading import weights_sha256
from attnlab.nn import GPT
from attnlab.sample import generate, prompt_ids
from attnlab.support.errors import UserError
from attnlab.training import metrics as metrics_lib
from attnlab.training import parallel as parallel_lib
from attnlab.training import precision, processes
from attnlab.training import text as texts
from attnlab.training import trainer as trainers
from attnlab.training.checkpoints import Checkpoints
from attnlab.training.experiment import Experiment
from attnlab.training.phases import OnPhase, no_phase
from attnlab.training.preemption import PreemptionHandler, exit_peer_lost
from attnlab.training.state import TrainState
from attnlab.training.text import Text
from attnlab.training.workdir import Workdir


def main(argv: list[str] | None = None, **hooks) -> int:
    """Run the command and return its exit code; `hooks` are `on_step` and `on_phase` of `train`."""
    code = commands.run(_define, functools.partial(_main, own_process=argv is None, **hooks), __doc__, argv)
    if code and argv is None:
        processes.leave(code)
    return code


def train(
    config: ConfigDict,
    workdir: str | Path,
    *,
    eval_only: bool = False,
    own_process: bool = False,
    model: nn.Module | None = None,
    optimizer: optax.GradientTransformation | None = None,
    on_step: Callable[[int, dict], None] | None = None,
    on_phase: OnPhase = no_phase,
) -> int:
    """Train with a config, resuming the run in `workdir` if there is one.

    Args:
      config: a modified `attnlab.config.default()`. If it has more steps than the run in `workdir`, the run is
        extended: it continues from its last checkpoint, with the learning rate schedule of the new number of steps. A
        rate that had already decayed jumps up at that step. `config.json` lists the extensions.
      workdir: gets `config.json`, `tokenizer.json`, `metrics.jsonl`, `checkpoints/` and TensorBoard events.
      eval_only: evaluate the newest checkpoint on the validation text, and write nothing.
      own_process: a signal before the first step, and a second one, end the process; otherwise they raise
        KeyboardInterrupt.
      model: a linen module in place of the GPT of `config.model`, of which only `context` is then used. Its only
        collection is `params`. It is called with int32 tokens `[B, T]`, in training with `deterministic=False` and
        `dropout_key=` a key for each sequence `[B]`, for `config.data.packing = "documents"` with `segments=`, int32
        `[B, T]`, and returns logits `[B, T, V or more]`. It is not sampled from. Pass an equal model when resuming.
      optimizer: an optax transformation in place of `config.optimizer`, of which only `accumulation` and `ema` are then
        used. Pass an equal optimizer when resuming. It has layers one by one, unless `config.model.scan` is True.
      on_step: called after every step, in every process, as `on_step(step, metrics)`: the number of updates done, and
        float32 scalars on the devices: `loss` (nats per token) and `grad_norm` before the update, `param_norm` after
        it, and `skipped` if `config.on_nonfinite` is "skip". Reading a metric waits for the step.
      on_phase: `with on_phase(name)` surrounds each phase of the run, see `attnlab.training.phases`.

    Returns:
      0, or 128 + the signal's number if SIGINT or SIGTERM stopped the run, after its state was saved.

    Raises:
      UserError: an unusable config, text, model or workdir; a loss or gradient that is not finite.

    >>> import tempfile
    >>> from attnlab.config import default
    >>> class Bigram(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, tokens, deterministic=True, dropout_key=None):
    ...         return nn.Dense(256)(nn.Embed(256, 16)(tokens))  # [B, T, 256]
    >>> config = default()
    >>> config.steps, config.batch_size, config.model.context, config.eval.windows = 2, 4, 8, 4
    >>> config.data.tokenizer, config.parallel.mesh.data, config.log.tensorboard = "byte", 1, False
    >>> workdir, losses = tempfile.mkdtemp(), []
    >>> own = {"model": Bigram(), "optimizer": optax.sgd(0.1), "on_step": lambda _, m: losses.append(float(m["loss"]))}
    >>> _ = train(config, workdir, **own)  # doctest: +ELLIPSIS
    python_docs: ...
    >>> len(losses)
    2
    """
    config = configs.completed(config)
    own = {"model": model, "optimizer": optimizer}
    with PreemptionHandler(own_process, config.parallel.timeout) as preemption, contextlib.ExitStack() as resources:
        try:
            return _train(config, Workdir(workdir), eval_only, preemption, resources, own, on_step, on_phase)
        except (jax.errors.JaxRuntimeError, TimeoutError) as error:
            if own_process and jax.process_count() > 1 and "RESOURCE_EXHAUSTED" not in str(error):
                exit_peer_lost(commands.one_line(error))
            raise


def _train(config, workdir: Workdir, eval_only, preemption, resources, own, on_step, on_phase) -> int:
    first_process = jax.process_index() == 0

    # config
    config, pretrained_tokenizer, metadata = _completed(config, workdir, may_extend=not eval_only)
    metadata |= _user_defined(workdir, **own)
    if eval_only and workdir.previous_run is None:
        raise UserError(f"{workdir} holds no run to evaluate: train first")
    if workdir.previous_run and not eval_only:
        if (last := finished_at(workdir, config)) is not None:
            if first_process:
                early = "" if last == config.steps else f"; --config.eval.patience=0 goes on to step {config.steps}"
                print(f"{workdir} is finished ({last} steps): nothing to do{early}")
            return 0
        if first_process:
            workdir.lock()
    resources.callback(workdir.close)

    # devices, data
    parallel = parallel_lib.from_config(config)
    text = texts.load(config, workdir, pretrained_tokenizer, parallel.batch_share)

    # model, optimizer, state
    checkpoints = Checkpoints(workdir.checkpoint_dir(config), config.checkpoint.keep, on_phase)
    resources.callback(checkpoints.close)
    start, damaged = _resume_step(checkpoints, workdir, config, eval_only)
    extensions = workdir.extensions(config, start)
    experiment = Experiment(config, text.tokenizer.vocab_size, parallel=parallel, extensions=extensions, **own)
    state, origin = _state(experiment, checkpoints, workdir, start)
    if eval_only:
        _print_evaluation(experiment, text, state, start, damaged)
        return 0

    # files, loop
    offset = checkpoints.metadata(start)["log"] if start else None  # in every process: Orbax waits for all of them
    reporter, log = metrics_lib.ProgressReporter(config.steps, start, silent=not first_process), None
    if first_process:
        metadata |= text.facts | {"parameters": experiment.parameters} | origin
        metadata |= {"extensions": extensions} if extensions else {}
        log = _open_files(config, metadata, workdir, text, checkpoints, start, offset, resources)
        _report_losses(checkpoints, damaged, log, start, reporter)
    _report_start(experiment, text, workdir, start, reporter)
    return trainers.Trainer(
        experiment=experiment,
        text=text,
        workdir=workdir,
        checkpoints=checkpoints,
        log=log,
        reporter=reporter,
        preemption=preemption,
        state=state,
        start=start,
        sample=_sampler(experiment, text.tokenizer),
        on_step=on_step,
        on_phase=on_phase,
    ).run()


def is_finished(config: ConfigDict, workdir: str | Path) -> bool:
    """Whether the run of a completed config is in a workdir and finished; nothing is loaded or written."""
    workdir = Workdir(workdir)
    if workdir.previous_run is None:
        return False
    config, *_ = _completed(config.copy_and_resolve_references(), workdir, may_extend=True)
    return finished_at(workdir, config) is not None


def _completed(config: ConfigDict, workdir: Workdir, *, may_extend: bool) -> tuple:
    """As `pretrained.completed`, with the run's precision, checked against the previous run."""
    config, *others = pretrained.completed(config, workdir.path)
    config.precision = _precision(config, workdir)
    workdir.check_config(config, may_extend=may_extend)
    return config, *others


def _precision(config: ConfigDict, workdir: Workdir) -> str:
    """The config's precision; for "auto" the previous run's, or the precision of the first process' hardware."""
    if config.precision != "auto":
        return config.precision
    if workdir.previous_run is not None:
        return configs.from_dict(workdir.previous_run).precision
    chosen = ("float32", "bfloat16")
    return chosen[parallel_lib.from_first_process(chosen.index(precision.resolved("auto")))]


def finished_at(workdir: Workdir, config: ConfigDict) -> int | None:
    """The last step of a run that is finished, by its steps or by `config.eval.patience`; None if it is not."""
    records = metrics_lib.read(workdir.metrics)
    finals = [record["step"] for record in records if record["split"] == "final"]
    if config.steps in finals:
        return config.steps
    exhausted = metrics_lib.stalled(records, config.eval.patience) and records[-1]["split"] == "final"
    return finals[-1] if exhausted else None


def _user_defined(workdir: Workdir, model, optimizer) -> dict:
    """Metadata of a user-defined model or optimizer for `config.json`; UserError if the run began with others."""
    now = {"model": model and type(model).__name__, "optimizer": optimizer is not None}
    now = {"user_defined": now} if any(now.values()) else {}
    if workdir.previous_run is not None and workdir.previous_run.get("user_defined") != now.get("user_defined"):
        was = workdir.previous_run.get("user_defined", {"model": None, "optimizer": False})
        model, optimizer = was["model"] or "its config's", "user-defined" if was["optimizer"] else "AdamW"
        raise UserError(
            f"{workdir} holds a run whose model is {model} and whose optimizer is {optimizer}: pass the same to "
            "attnlab.train.train(…, model=…, optimizer=…), or choose a new --workdir"
        )
    return now


def _resume_step(checkpoints: Checkpoints, workdir: Workdir, config: ConfigDict, eval_only: bool):
    """The step to resume from, or 0, and the damage of newer checkpoints; UserError if a checkpoint must exist."""
    newest, damaged = checkpoints.newest_intact() if jax.process_index() == 0 else (None, {})
    newest = parallel_lib.from_first_process(-1 if newest is None else newest)
    start, found, previous_run = max(newest, 0), newest >= 0, workdir.previous_run
    if found and previous_run is None:
        raise UserError(
            f"config.checkpoint.dir = {config.checkpoint.dir} holds checkpoints of another run: choose a new folder"
        )
    if start or previous_run is None:
        return start, damaged
    was = configs.from_dict(previous_run)
    with contextlib.closing(Checkpoints(workdir.checkpoint_dir(was))) as earlier:
        if earlier.steps() and not found:
            raise UserError(
                f"config.checkpoint.dir = {config.checkpoint.dir!r} is empty, and the run's checkpoints are in "
                f"{earlier.directory}: move them, or name that folder"
            )
    # A save starts only when the previous save is on disk: after two intervals there must be a checkpoint.
    reached = max((record["step"] for record in metrics_lib.read(workdir.metrics)), default=0)
    if reached > 2 * was.checkpoint.every:
        raise UserError(
            f"{earlier.directory} holds no checkpoint{' after step 0' if found else ''}, but the run had reached step "
            f"{reached}: restore them, or start over in another --workdir"
        )
    if eval_only and not found:
        raise UserError(f"{workdir} holds no checkpoint to evaluate: train longer")
    return start, damaged


def _state(experiment: Experiment, checkpoints: Checkpoints, workdir: Workdir, start: int) -> tuple[TrainState, dict]:
    """The initial state, and the origin of its parameters as metadata for `config.json`."""
    config, previous_run = experiment.config, workdir.previous_run or {}
    origin = {name: previous_run[name] for name in ("init_from_sha256",) if name in previous_run}
    if start:
        return checkpoints.restore(start, experiment.abstract_state), origin
    if not config.init_from:
        return experiment.create_state(), origin
    digest = weights_sha256(Path(config.init_from))
    if previous_run and previous_run.get("init_from_sha256") != digest:
        raise UserError(
            f"config.init_from = {config.init_from} is not what {workdir} started from, and no checkpoint was saved "
            "yet: restore it, or choose a new --workdir"
        )
    params = pretrained.params(config, experiment.abstract_state.params)
    return experiment.create_state(params), {"init_from_sha256": digest}


def _print_evaluation(experiment: Experiment, text: Text, state: TrainState, start, damaged) -> None:
    """Evaluate a state on the validation text and print the loss."""
    scores = trainers.evaluate(experiment, text, state.evaluated)
    if jax.process_index() == 0:
        for step, why in damaged.items():
            print(f"checkpoint {step} is damaged ({why}); evaluating the newest intact one")
        windows = f"{text.validation.windows} windows of {experiment.config.model.context} tokens"
        print(f"step {start}  {trainers.format_scores('validation', scores)}  over {windows}")


def _open_files(config, metadata, workdir, text, checkpoints, start, offset, resources) -> metrics_lib.MetricsLog:
    """Create or update the files of a run, in the first process; returns its metrics log."""
    previous_run = workdir.previous_run
    digest = tokenizers.sha256(text.tokenizer) if previous_run is None else previous_run.get("tokenizer_sha256")
    config_json = configs.to_json(config, tokenizer_sha256=digest, **metadata)
    if previous_run is None:
        if config.checkpoint.dir:
            checkpoints.prepare()  # first, so that a failure leaves no workdir behind
        workdir.create(config_json, text.tokenizer)
    checkpoints.prepare()
    checkpoints.sweep()
    events = workdir.path / "tensorboard" if config.log.tensorboard else None
    log = metrics_lib.MetricsLog(workdir.metrics, offset, start, events)
    resources.callback(log.close)
    if previous_run is not None:
        workdir.write_config(config_json)
    checkpoints.best = lambda steps: metrics_lib.best_step(log.records, steps)
    return log


def _report_losses(checkpoints, damaged, log, start, reporter) -> None:
    for step, why in damaged.items():
        reporter.print(f"checkpoint {step} is damaged ({why}): set aside as {checkpoints.set_aside(step)}")
    if log.lost:
        reporter.print(f"{log.path} is missing: the records up to step {start} are lost")


def _report_start(experiment: Experiment, text: Text, workdir: Workdir, start: int, reporter) -> None:
    config, parallel = experiment.config, experiment.parallel
    devices, model = parallel.mesh.devices.size, type(experiment.model).__name__
    reporter.print(
        f"{config.data.name}: {text.summary}, vocabulary size {text.tokenizer.vocab_size}\n"
        f"{model} of {experiment.parameters:,} parameters on {devices} {jax.devices()[0].platform} "
        f"device{'s' if devices > 1 else ''} ({parallel.strategy}), in {config.precision}, into {workdir}"
    )
    if workdir.previous_run and (config.precision, precision.resolved("auto")) == ("bfloat16", "float32"):
        reporter.print(
            "the run began in bfloat16, and goes on in it, although this hardware has no instructions for it"
        )
    if fault := compilation.miscompilation():
        reporter.print(fault)
    if start:
        reporter.print(f"resumed from step {start}")
    elif config.init_from:
        reporter.print(f"starting from {config.init_from}, sequences of {config.model.context} tokens")
    elif workdir.previous_run:
        reporter.print("no checkpoint was saved yet: starting from the beginning")
    steps = workdir.previous_run and configs.from_dict(workdir.previous_run).steps
    if steps and steps != config.steps:
        message, rate = f"extended from {steps} to {config.steps} steps", experiment.learning_rate
        if rate and start:
            message += f": the learning rate was {float(rate(start - 1)):.3g}, and is now {float(rate(start)):.3g}"
        reporter.print(message)


def _sampler(experiment: Experiment, tokenizer):
    """A function that samples token ids from a GPT; None for a user-defined model."""
    length, seed = experiment.config.sample.length, experiment.config.seed
    if not isinstance(experiment.model, GPT) or not length or named.parse(experiment.config.data.name):
        return None
    prompt, options = prompt_ids(tokenizer, None), {"seed": seed, "vocab_size": tokenizer.vocab_size}
    return lambda params: generate(experiment.model, {"params": params}, prompt, length, temperature=0.8, **options)


def _define(values, argv):
    workdir = commands.given(argv, "workdir")
    saved = pretrained.saved_config(Path(workdir[-1])) if workdir else None
    commands.define_config(values, argv, saved)
    flags.DEFINE_string("workdir", None, "folder of the run; by default runs/NAME-OF-CONFIG", flag_values=values)
    flags.DEFINE_bool("eval_only", False, "evaluate the newest checkpoint and write nothing", flag_values=values)


def _main(values, own_process: bool, **hooks) -> int:
    config, name = commands.config_of(values)
    config = configs.completed(config)
    if own_process:
        compilation.keep_programs()
    processes.connect(config.parallel.timeout)
    workdir = values.workdir or Path("runs") / name
    return train(config, workdir, eval_only=values.eval_only, own_process=own_process, **hooks)


if __name__ == "__main__":
    sys.exit(main())
