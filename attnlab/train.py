"""Train a GPT on text.

    attnlab train --config=quickstart
    attnlab train --config=sancho:tiny --workdir=runs/sancho --config.data.path=quijote.txt

The same command resumes a stopped run, and does nothing for a finished one. For an existing run the folder alone is
enough: --workdir=runs/sancho resumes it, or evaluates it with --eval_only, or extends it with --config.steps=MORE. An
extended run continues from its last checkpoint, with the learning rate schedule of the new number of steps.
`python -m attnlab.train` is the same command.
"""

if __name__ == "__main__":
    import sys

    from attnlab.support import hugepages, status

    hugepages.restart("attnlab.train")
    status.end_when_interrupted()
    status.importing(sys.argv)

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

from attnlab import commands, compilation
from attnlab import config as configs
from attnlab.config import RunConfig
from attnlab.nn import custom
from attnlab.ops.masks import Mask
from attnlab.ops.score_mods import ScoreMods
from attnlab.support import status
from attnlab.training import metrics, processes
from attnlab.training import run as runs
from attnlab.training import trainer as trainers
from attnlab.training.checkpoints import OnPhase
from attnlab.training.passed import Passed
from attnlab.training.preemption import PreemptionHandler, exit_peer_lost
from attnlab.training.trackers import NewTracker
from attnlab.training.workdir import read_config


def main(argv: list[str] | None = None, **hooks) -> int:
    """Run the command and return its exit code; `hooks` are `on_step`, `on_phase` and `tracker` of `train`."""
    code = commands.run(_define, functools.partial(_main, own_process=argv is None, **hooks), __doc__, argv)
    if code and argv is None:
        processes.leave(code)
    return code


def train(
    config: ConfigDict | RunConfig,
    workdir: str | Path,
    *,
    eval_only: bool = False,
    own_process: bool = False,
    layers: type[nn.Module] | None = None,
    mask: Mask | None = None,
    score_mod: ScoreMods | None = None,
    model: nn.Module | None = None,
    optimizer: optax.GradientTransformation | None = None,
    on_step: Callable[[int, dict], None] | None = None,
    on_phase: OnPhase = contextlib.nullcontext,
    tracker: NewTracker | None = None,
) -> int:
    """Train with a config, resuming the run in `workdir` if there is one.

    Args:
      config: a modified `attnlab.config.default()`. If it has more steps than the run in `workdir`, the run is
        extended: it continues from its last checkpoint, with the learning rate schedule of the new number of steps. A
        rate that had already decayed jumps up at that step. `config.json` lists the extensions.
      workdir: gets `config.json`, `tokenizer.json`, `metrics.jsonl`, `checkpoints/`, TensorBoard events and profiles.
      eval_only: evaluate the newest checkpoint on the validation text, and write nothing.
      own_process: a signal before the first step, and a second one, end the process; otherwise they raise
        KeyboardInterrupt.
      layers: a class of layers in place of `config.model.layers`, see `attnlab.nn.register`.
      mask, score_mod: for all layers of the config's GPT; a function `fn(score, b, h, i, j)` is a score mod as well.
        Pass equal ones when resuming.
      model: a linen module in place of the GPT of `config.model`, of which only `context` is then used. Its only
        collection is `params`. It is called with int32 tokens `[B, T]`, in training with `deterministic=False` and
        `dropout_key=` a key for each sequence `[B]`, for `config.data.packing = "documents"` with `segments=`, int32
        `[B, T]`, and returns logits `[B, T, V or more]`. It is not sampled from. Pass an equal model when resuming.
      optimizer: an optax transformation in place of `config.optimizer`, of which only `accumulation` and `ema` are then
        used. Pass an equal optimizer when resuming. It has layers one by one, unless `config.model.scan` is True.
      on_step: called for every step, in every process, as `on_step(step, metrics)`: the number of updates done, and
        float32 scalars on the devices: `loss` (nats per token) and `grad_norm` before the update, `param_norm` after
        it, and `skipped` if `config.on_nonfinite` is "skip". Reading a metric waits for the call of the devices, of
        `config.parallel.steps_per_call` steps.
      on_phase: `with on_phase(name)` surrounds each phase of the run, see `PHASES` in `attnlab.training.checkpoints`.
      tracker: makes a tracker of this start, besides TensorBoard, in the first process: `tracker(workdir, saved)`, with
        the content of `config.json`, returns an `attnlab.training.trackers.Tracker`. What it raises ends the run.

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
    reading python_docs
    ...
    >>> len(losses)
    2
    """
    passed = Passed(layers, mask, score_mod, model, optimizer)
    plan = runs.resolve(config, workdir, eval_only=eval_only, passed=passed)
    if plan.origin == "finished":
        if jax.process_index() == 0:
            _print_finished(plan)
        return 0
    with PreemptionHandler(own_process, plan.config.parallel.timeout) as preemption:
        try:
            options = {"on_phase": on_phase, "tracker": tracker, "own_process": own_process}
            with runs.open(plan, eval_only=eval_only, **options) as run:
                if eval_only:
                    _print_evaluation(run)
                    return 0
                has_parts = custom.files() or any(part is not None for part in passed)
                if has_parts and (fault := compilation.miscompilation()):
                    run.reporter.print(fault)
                return trainers.Trainer([run], preemption, on_step, on_phase).run()
        except (jax.errors.JaxRuntimeError, TimeoutError) as error:
            if own_process and jax.process_count() > 1 and "RESOURCE_EXHAUSTED" not in str(error):
                exit_peer_lost(commands.one_line(error))
            raise


def is_finished(config: ConfigDict | RunConfig, workdir: str | Path) -> bool:
    """Whether the run of a config is in a workdir and finished; nothing is loaded or written.

    Without a run there no device is started: the caller may leave training to another process.
    """
    return (Path(workdir) / "config.json").exists() and runs.resolve(config, workdir).origin == "finished"


def _print_finished(plan: runs.RunPlan) -> None:
    steps = plan.config.steps
    status.clear()
    early = "" if plan.finished == steps else f"; --config.eval.patience=0 goes on to step {steps}"
    print(f"{plan.workdir} is finished ({plan.finished} steps): nothing to do{early}")


def _print_evaluation(run: runs.Run) -> None:
    """Evaluate a state on the validation text, and print the loss in the first process."""
    is_first = jax.process_index() == 0
    if is_first:
        status.show("evaluating")
    scores = trainers.evaluate(run)
    status.clear()
    if is_first:
        for step, why in run.damaged.items():
            print(f"checkpoint {step} is damaged ({why}); evaluating the newest intact one")
        windows = f"{run.text.validation.windows} windows of {run.plan.config.model.context} tokens"
        print(f"step {run.start}  {metrics.format_scores('validation', scores)}  over {windows}")


def _define(values, argv):
    commands.define_import(values, argv)
    workdir = Path((commands.given(argv, "workdir") or [runs.NOWHERE])[-1])
    needs = not commands.given(argv, "config") and (workdir / "config.json").exists()
    commands.define_config(values, argv, configs.editable(configs.from_json(read_config(workdir))) if needs else None)
    flags.DEFINE_string("workdir", None, "folder of the run; by default runs/NAME-OF-CONFIG", flag_values=values)
    flags.DEFINE_bool("eval_only", False, "evaluate the newest checkpoint and write nothing", flag_values=values)


def _main(values, own_process: bool, **hooks) -> int:
    config, name = commands.config_of(values)
    if own_process:
        compilation.keep_programs()
        compilation.release_memory()
    completed = configs.completed(config)
    custom.check_used(values["import"].value, completed.model.used)
    status.show("starting the devices")
    processes.connect(completed.parallel.timeout)  # a plan needs all processes
    workdir = values.workdir or Path("runs") / name
    return train(completed, workdir, eval_only=values.eval_only, own_process=own_process, **hooks)


if __name__ == "__main__":
    sys.exit(main())
