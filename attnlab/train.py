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
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import flax.linen as nn
import jax
import optax
from absl import flags
from ml_collections import ConfigDict

from attnlab import commands, compilation
from attnlab import config as configs
from attnlab.config import RunConfig
from attnlab.nn import custom, versions
from attnlab.nn.layer import LayerConfig
from attnlab.ops.masks import Mask
from attnlab.ops.score_mods import ScoreMods
from attnlab.support import status
from attnlab.support.errors import UserError
from attnlab.training import metrics, processes
from attnlab.training import run as runs
from attnlab.training.checkpoints import OnPhase
from attnlab.training.loading import Run, load
from attnlab.training.loop import TrainLoop
from attnlab.training.overrides import NOTHING, Overrides, with_parts
from attnlab.training.preemption import PreemptionHandler, exit_peer_lost, is_peer_lost
from attnlab.training.trackers import NewTracker
from attnlab.training.workdir import read_run


def main(argv: list[str] | None = None, **hooks) -> int:
    """Run the command and return its exit code; `hooks` are `on_step`, `on_phase` and `tracker` of `train`."""
    own_process = argv is None
    try:
        code = commands.run(_define, functools.partial(_main, own_process=own_process, **hooks), __doc__, argv)
    except Exception:
        if not own_process:
            raise
        traceback.print_exc()
        code = 1
    if code and own_process:
        processes.leave(code)
    return code


class TrainedRun(NamedTuple):
    """A run that `train` trained, evaluated, or found finished.

    Attributes:
      workdir: its folder.
      loss: validation loss in nats per token, at the end of training or from the evaluation; None if a signal stopped
        the run. After training, only the first process has it, because that process writes the records.
      signal: the number of the signal after which the run was saved and stopped; 0 for none.
      overrides: the user's model and optimizer.
    """

    workdir: Path
    loss: float | None
    signal: int
    overrides: Overrides

    @property
    def records(self) -> list[dict]:
        """The records of `metrics.jsonl`."""
        return metrics.read(self.workdir / "metrics.jsonl")

    def load(self, step: int | str = "latest") -> Run:
        """Load the run as `attnlab.load` does, with the user's model."""
        return load(self.workdir, step, model=self.overrides.model)


def train(
    config: ConfigDict | RunConfig,
    workdir: str | Path,
    *,
    eval_only: bool = False,
    layers: str | LayerConfig | Sequence[LayerConfig] | type[nn.Module] | None = None,
    mask: Mask | None = None,
    score_mod: ScoreMods | None = None,
    model: nn.Module | None = None,
    optimizer: optax.GradientTransformation | None = None,
    on_step: Callable[[int, dict], None] | None = None,
    on_phase: OnPhase = contextlib.nullcontext,
    tracker: NewTracker | None = None,
) -> TrainedRun:
    """Train with a config, resuming the run in `workdir` if there is one; a finished run is returned as it is.

    Args:
      config: a modified `attnlab.config.default()`, or a `RunConfig`, which may hold layers, masks and score mods; with
        more steps than the run in `workdir`, the run is extended.
      workdir: gets `config.json`, `tokenizer.json`, `metrics.jsonl`, `checkpoints/`, TensorBoard events and profiles.
      eval_only: evaluate the newest checkpoint on the validation text, and write nothing.
      layers: replace `config.model.layers`: names or configs of layers, or a class; see `attnlab.nn.register`.
      mask, score_mod: for all layers; a function `fn(score, b, h, i, j)` is a score mod as well.
      model: a linen module that replaces the GPT; only `context` of `config.model` is then used. Its only collection
        is `params`. It is called with int32 tokens `[B, T]`; in training also with `deterministic=False` and
        `dropout_key=`, a key for each sequence `[B]`; for `config.data.packing = "documents"` also with `segments=`,
        int32 `[B, T]`. It returns logits `[B, T, V or more]`. No samples are generated from it.
      optimizer: an optax transformation; only `accumulation` and `ema` of `config.optimizer` are then used. Its
        parameters are not stacked over layers, unless `config.model.scan` is True.
      on_step: called as `on_step(step, metrics)` after each step, in every process, with float32 scalars on the
        devices: "loss" (nats per token) and "grad_norm" before the update, "param_norm" after it, and "skipped" if
        `config.on_nonfinite` is "skip". Reading a scalar waits for its device call, which may cover several steps.
      on_phase: `with on_phase(name)` surrounds each of `attnlab.training.checkpoints.PHASES`.
      tracker: `tracker(workdir, saved)` returns a `Tracker` of `attnlab.training.trackers`; it is called in the first
        process, and `saved` is the content of `config.json`. An error that the tracker raises ends the run.

    Returns:
      The run, even if a signal stopped it after a save; its `loss` is then None.

    Raises:
      UserError: an unusable config, text, model or workdir; a loss or gradient that is not finite.

    >>> import tempfile
    >>> class Bigram(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, tokens, deterministic=True, dropout_key=None):
    ...         return nn.Dense(256)(nn.Embed(256, 16)(tokens))  # [B, T, 256]
    >>> config = configs.default()
    >>> config.steps, config.data.tokenizer, config.eval.windows, config.parallel.mesh.data = 2, "byte", 4, 1
    >>> run = train(config, tempfile.mkdtemp(), model=Bigram(), optimizer=optax.sgd(0.1))  # doctest: +ELLIPSIS
    reading python_docs
    ...
    >>> run.loss == run.records[-1]["loss"]
    True
    """
    parts = {"layers": layers, "mask": mask, "score_mod": score_mod}
    for name, value in parts.items():
        if model is not None and value is not None:
            raise UserError(f"{name}= applies to the config's GPT, which model= replaces: remove one of them")
    config, overrides = with_parts(configs.completed(config), **parts), Overrides(model, optimizer)
    hooks = {"on_step": on_step, "on_phase": on_phase, "tracker": tracker}
    return _train(config, workdir, overrides, eval_only=eval_only, **hooks)


@versions.taken_once()
def _train(config, workdir, overrides=NOTHING, *, eval_only, own_process=False, on_step=None, **hooks) -> TrainedRun:
    """Run `train`; with `own_process`, a signal before the first step, or a second one, ends the process."""
    plan = runs.resolve(config, workdir, eval_only=eval_only, overrides=overrides)
    if plan.origin == "finished":
        _print_finished(plan)
        return _trained(plan)
    with PreemptionHandler(own_process, plan.config.parallel.timeout) as preemption:
        try:
            with runs.open_run(plan, eval_only=eval_only, own_process=own_process, **hooks) as run:
                if eval_only:
                    return TrainedRun(plan.workdir.path, _evaluated(run), 0, overrides)
                loop = TrainLoop([run], preemption, on_step, hooks.get("on_phase", contextlib.nullcontext))
                code = loop.run()
            for error in loop.errors.values():
                raise error
            return _trained(plan, code)
        except (jax.errors.JaxRuntimeError, TimeoutError, ValueError) as error:
            if own_process and jax.process_count() > 1 and is_peer_lost(error):
                exit_peer_lost(commands.one_line(error))
            raise


def _trained(plan: runs.RunPlan, code: int = 0) -> TrainedRun:
    """The run as recorded in its folder; `code` is 0, or 128 + the number of the signal that stopped it."""
    trained = TrainedRun(plan.workdir.path, None, code % 128, plan.overrides)
    return trained if code or jax.process_index() else trained._replace(loss=trained.records[-1]["loss"])


def is_finished(config: ConfigDict | RunConfig, workdir: str | Path) -> bool:
    """Whether a workdir holds the finished run of a config; without a run there, no device is started."""
    return (Path(workdir) / "config.json").exists() and runs.resolve(config, workdir).origin == "finished"


def _print_finished(plan: runs.RunPlan) -> None:
    steps = plan.config.steps
    status.clear()
    early = "" if plan.finished == steps else f"; --config.eval.patience=0 continues to step {steps}"
    if jax.process_index() == 0:
        print(f"{plan.workdir} is finished ({plan.finished} steps): nothing to do{early}")


def _evaluated(run: runs.OpenRun) -> float:
    """Evaluate a run on the validation text and return the loss; the first process prints it."""
    if jax.process_index() == 0:
        status.show("evaluating")
    (scores,) = run.program.evaluate(run.state.evaluated, run.text.validation)
    scores |= run.text.bits_of(scores["loss"])
    status.clear()
    if jax.process_index() == 0:
        for step, why in run.damaged.items():
            print(f"checkpoint {step} is damaged ({why}); evaluating the newest intact one")
        windows = f"{run.text.validation.windows} windows of {run.plan.config.model.context} tokens"
        print(f"step {run.start}  {metrics.format_scores('validation', scores)}  over {windows}")
    return scores["loss"]


def _define(values, argv):
    commands.define_import(values, argv)
    workdir = Path((commands.given(argv, "workdir") or [runs.NOWHERE])[-1])
    needs = not commands.given(argv, "config") and (workdir / "config.json").exists()
    commands.define_config(values, argv, read_run(workdir)[1] if needs else None)
    flags.DEFINE_string("workdir", None, "folder of the run; by default runs/NAME-OF-CONFIG", flag_values=values)
    flags.DEFINE_bool("eval_only", False, "evaluate the newest checkpoint and write nothing", flag_values=values)


def _main(values, own_process: bool, **hooks) -> int:
    config, name = commands.config_of(values)
    if own_process:
        compilation.keep_programs()
        compilation.release_memory()
    custom.check_used(values["import"].value, config.model.used)
    status.show("starting the devices")
    processes.connect(config.parallel.timeout)  # `runs.resolve` needs all processes
    workdir = values.workdir or Path("runs") / name
    run = _train(config, workdir, eval_only=values.eval_only, own_process=own_process, **hooks)
    return 128 + run.signal if run.signal else 0


if __name__ == "__main__":
    sys.exit(main())
