"""Train a GPT on text.

    python -m attnlab.train --config=configs/quickstart.py
    python -m attnlab.train --config=configs/sancho.py:tiny --workdir=runs/sancho --config.data.path=quijote.txt

The same command again goes on where the run was stopped. A finished run is left as it is.
"""

import contextlib
import fcntl
import functools
import math
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
from absl import flags
from ml_collections import ConfigDict

from attnlab import commands
from attnlab import config as configs
from attnlab.data import corpora, tokenizers
from attnlab.data.batches import EvalBatches, TrainBatches, prefetched
from attnlab.errors import UserError
from attnlab.loading import read_config, read_tokenizer
from attnlab.sample import generate, prompt_ids
from attnlab.training import metrics as metrics_lib
from attnlab.training import optimizer as optimizers
from attnlab.training import parallel as parallel_lib
from attnlab.training import state as states
from attnlab.training.checkpoints import Checkpoints, sha256


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    return commands.run(_define, _main, __doc__, argv)


def train(config: ConfigDict, workdir: str | Path, *, eval_only: bool = False) -> int:
    """Trains as `config` says, from where `workdir` left off.

    Args:
      config: an `attnlab.config.default()`, changed.
      workdir: gets `config.json`, `tokenizer.json`, `metrics.jsonl`, `checkpoints/` and TensorBoard events.
      eval_only: score the newest checkpoint on the validation text, and write nothing.

    Returns:
      0, or 128 + the signal's number when SIGINT or SIGTERM asked to stop and the state was saved.

    Raises:
      UserError: a config, a text or a workdir that cannot be used; a loss or gradient that is not finite.
    """
    with contextlib.ExitStack() as at_end:
        return _train(config, Path(workdir), eval_only, at_end)


def _train(config: ConfigDict, workdir: Path, eval_only: bool, at_end: contextlib.ExitStack) -> int:
    # ------------------------------------------------------------------------------------------------------- config
    config = configs.completed(config)
    before = _earlier_run(workdir, config)
    if eval_only and before is None:
        raise UserError(f"{workdir} holds no run to evaluate: train first")
    if before and not eval_only and jax.process_index() == 0:
        at_end.callback(os.close, _lock(workdir))  # before anything is read that another process might still write
    log_path = workdir / "metrics.jsonl"
    if before and not eval_only and any(record["split"] == "final" for record in metrics_lib.read(log_path)):
        print(f"{workdir} is finished ({config.steps} steps): nothing to do")
        return 0

    # ------------------------------------------------------------------------------------------------------ devices
    parallel = parallel_lib.make(config.parallel.strategy, config.parallel.mesh.data)
    devices, accumulation = parallel.mesh.devices.size, config.optimizer.accumulation
    parallel_lib.check_batch(config.batch_size, devices, accumulation)
    first_process = jax.process_index() == 0
    shares = {"process_index": jax.process_index(), "process_count": jax.process_count()}

    # --------------------------------------------------------------------------------------------------------- data
    data = config.data
    corpus = corpora.load(data.name, path=data.path, feature=data.feature, validation_fraction=data.validation_fraction)
    if before and before["corpus"]["sha256"] != corpus.sha256:
        raise UserError(
            f"{workdir} was trained on another text (sha256 {before['corpus']['sha256'][:12]}…, now "
            f"{corpus.sha256[:12]}…): bring that text back, or choose a new --workdir"
        )
    if before:
        tokenizer = read_tokenizer(workdir, before)
    else:
        tokenizer = tokenizers.make(data.tokenizer, corpus.text, data.vocab_size)
    train_tokens, val_tokens = tokenizer.encode(corpus.train), tokenizer.encode(corpus.validation)
    context, rows = config.model.context, config.batch_size
    train_batches = TrainBatches(train_tokens, context=context, batch_size=rows, seed=config.seed, **shares)
    eval_rows = rows // accumulation
    eval_batches = EvalBatches(val_tokens, context=context, batch_size=eval_rows, windows=config.eval.windows, **shares)
    bits = len(val_tokens) / len(corpus.validation) / math.log(2)  # per character, of a nat per token

    # ------------------------------------------------------------------------------------------------- model, state
    model = states.make_model(config, tokenizer.vocab_size)
    optimizer = optimizers.make(config.optimizer, config.steps)
    state = parallel.place_state(states.create(model, optimizer, config.seed))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))

    # --------------------------------------------------------------------------------------------------------- step
    step_fn = parallel.compile_train(functools.partial(states.train_step, model, optimizer, config.seed, accumulation))
    eval_fn = parallel.compile_eval(functools.partial(states.eval_step, model))
    rate = optimizers.learning_rate(config.optimizer, config.steps)

    def evaluate(params) -> dict:
        sums = np.zeros(2)
        for batch in prefetched(eval_batches):
            sums += np.asarray(eval_fn(params, parallel.place_batch(batch)), np.float64)
        loss = float(sums[0] / sums[1])
        return {"loss": loss, "bits_per_character": loss * bits}

    # ------------------------------------------------------------------------------------------------------ restore
    checkpoints = Checkpoints(config.checkpoint.dir or workdir / "checkpoints", config.checkpoint.keep)
    at_end.callback(checkpoints.close)
    start = max(checkpoints.steps(), default=0)
    if start and before is None:
        raise UserError(f"config.checkpoint.dir = {config.checkpoint.dir} holds another run's: choose a new folder")
    if before and not start:
        with contextlib.closing(
            Checkpoints(configs.from_dict(before).checkpoint.dir or workdir / "checkpoints")
        ) as was:
            if was.steps():
                raise UserError(
                    f"config.checkpoint.dir = {config.checkpoint.dir!r} is empty, and the run's checkpoints are in "
                    f"{was.directory}: move them, or name that folder"
                )
    if start:
        state = checkpoints.restore(start, state)
    if eval_only:
        if not start:
            raise UserError(f"{workdir} holds no checkpoint to evaluate: train longer")
        scores = evaluate(state.params)
        print(f"step {start}  {_scores('validation', scores)}  over {eval_batches.windows} windows of {context} tokens")
        return 0

    if config.checkpoint.dir:
        checkpoints.prepare()  # one that cannot be written is known before anything else is
    if first_process:
        text = configs.to_json(
            config,
            corpus={"name": corpus.name, "sha256": corpus.sha256, "characters": len(corpus.text)},
            vocab_size=tokenizer.vocab_size,
            tokenizer_sha256=before.get("tokenizer_sha256") if before else tokenizers.sha256(tokenizer),
            parameters=parameters,
        )
        if before is None:
            _found(workdir, text, tokenizer)
            at_end.callback(os.close, _lock(workdir))
        else:
            _replace(workdir / "config.json", text)  # what may differ between starts, such as checkpoint.dir
        log = metrics_lib.MetricsLog(log_path, start, workdir / "tensorboard" if config.log.tensorboard else None)
        at_end.callback(log.close)
    watch = metrics_lib.Watch(config.steps, start, silent=not first_process)
    watch.say(
        f"{config.data.name}: {len(train_tokens):,} tokens to train on, {len(val_tokens):,} to validate, "
        f"{tokenizer.vocab_size} kinds\n"
        f"GPT of {parameters:,} parameters on {devices} {jax.devices()[0].platform} "
        f"device{'s' if devices > 1 else ''} ({parallel.strategy}), into {workdir}"
    )
    if start:
        watch.say(f"resumed from step {start}")
    elif before:
        watch.say("no checkpoint was saved before: starting from the beginning")

    def write_sample(step):
        params = {"params": jax.tree.map(lambda x: x.addressable_data(0), state.params)}
        drawn = generate(
            model,
            params,
            prompt_ids(tokenizer, None),
            config.sample.length,
            temperature=0.8,
            seed=config.seed,
            vocab_size=tokenizer.vocab_size,
        )
        text = tokenizer.decode([tokens[0] for tokens in drawn])
        watch.say(f"--- a sample at step {step}:\n{text}\n---")
        log.write_text(step, text)

    # --------------------------------------------------------------------------------------------------------- loop
    scores = None
    unread = []  # the metrics of steps that nobody has waited for yet
    stop = _Stop()
    with watch, stop:
        clock, clock_step = time.perf_counter(), start
        for step, batch in enumerate(prefetched(train_batches, start, config.steps), start + 1):
            state, step_metrics = step_fn(state, parallel.place_batch(batch))
            unread.append(step_metrics)
            last = step == config.steps
            stopping = stop.signal is not None  # asked once: what comes later in this step waits for the next
            saves = last or step % config.checkpoint.every == 0 or stopping
            evaluates = last or step % config.eval.every == 0
            if step % config.log.every == 0 or saves or evaluates:
                newest = _finite(unread, step, checkpoints, workdir)
                unread = []
                seconds = time.perf_counter() - clock
                tokens_per_second = (step - clock_step) * rows * context / seconds
            if (step % config.log.every == 0 or last) and first_process:
                log.write(
                    step=step,
                    split="train",
                    **newest,
                    bits_per_character=newest["loss"] * bits,
                    learning_rate=float(rate(step - 1)),
                    tokens=step * rows * context,
                    tokens_per_second=tokens_per_second,
                )
                watch.step(step, f"{_scores('train', newest)}  {tokens_per_second:,.0f} tokens/s")
            if evaluates:
                scores = evaluate(state.params)
                if not math.isfinite(scores["loss"]):
                    raise _not_finite("validation loss", scores["loss"], step, checkpoints, workdir)
                if first_process:
                    log.write(step=step, split="val", **scores, tokens=step * rows * context)
                watch.say(f"step {step}/{config.steps}  {_scores('validation', scores)}")
            if saves:
                checkpoints.save(state, scores["loss"] if evaluates else None)
            if first_process and (last or (config.sample.every and step % config.sample.every == 0)):
                write_sample(step)
            if step % config.log.every == 0 or saves or evaluates:
                clock, clock_step = time.perf_counter(), step  # evaluation, saving and sampling are not training
            if stopping and not last:
                checkpoints.wait()
                watch.say(
                    f"stopped: step {step} is saved in {checkpoints.directory}; the same command goes on from there"
                )
                return 128 + stop.signal
    checkpoints.wait()
    scores = evaluate(state.params) if scores is None else scores  # killed between the last save and the last record
    if first_process:
        log.write(step=config.steps, split="final", loss=scores["loss"], params_sha256=sha256(state.params))
    watch.say(f"done: {_scores('validation', scores)}\nwrite with it: python -m attnlab.sample --workdir={workdir}")
    return 0


def _earlier_run(workdir: Path, config: ConfigDict) -> dict | None:
    """What `config.json` of an earlier start holds, None in a new workdir; refuses a folder that is something else."""
    try:
        if workdir.exists() and not workdir.is_dir():
            raise UserError(f"--workdir={workdir} is a file: name a folder")
        if not (workdir / "config.json").exists():
            if workdir.exists() and any(workdir.iterdir()):
                raise UserError(f"--workdir={workdir} holds other files and no run: choose a new folder")
            return None
    except OSError as error:  # a folder that may not be looked into, a name that none can have
        raise UserError(f"--workdir={workdir} cannot be read ({error.strerror}): choose another folder") from error
    before = read_config(workdir)
    if difference := configs.difference(before, config):
        raise UserError(
            f"{workdir} holds a run with another config ({difference}): choose a new --workdir, or repeat its command"
        )
    return before


def _found(workdir: Path, config: str, tokenizer) -> None:
    """Makes the workdir under another name and renames it: at any moment it is a whole run or not there."""
    unfinished = workdir.absolute().with_name(f".{workdir.absolute().name}.unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        tokenizers.save(tokenizer, unfinished / "tokenizer.json")
        (unfinished / "config.json").write_text(config, encoding="utf-8")
        unfinished.rename(workdir)  # an empty folder that stands there gives way
    except OSError as error:
        raise UserError(f"--workdir={workdir} cannot be written ({error.strerror}): choose another folder") from error


def _lock(workdir: Path) -> int:
    """Holds the folder until the process ends, however it ends; UserError when another process does."""
    folder = os.open(workdir, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(folder)
        raise UserError(f"--workdir={workdir}: another process trains there: wait for it, or choose another") from error
    return folder


def _replace(path: Path, text: str) -> None:
    """Writes a file that is whole at any moment, and only if it differs."""
    if path.read_text(encoding="utf-8") != text:
        path.with_suffix(".new").write_text(text, encoding="utf-8")
        os.replace(path.with_suffix(".new"), path)


def _finite(unread, step, checkpoints, workdir) -> dict:
    """The newest metrics as numbers; UserError when those of any step since the last look are not finite."""
    read = [{name: float(value) for name, value in metrics.items()} for metrics in jax.device_get(unread)]
    for at, metrics in enumerate(read, step - len(read) + 1):
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise _not_finite(name, value, at, checkpoints, workdir)
    return read[-1]


def _not_finite(name, value, step, checkpoints, workdir) -> UserError:
    checkpoints.wait()
    kept = checkpoints.steps()
    where = f"the last good checkpoint is step {kept[-1]}" if kept else "no checkpoint was saved yet"
    return UserError(
        f"{name} is {value} at step {step}; {where} in {workdir}: lower config.optimizer.learning_rate or "
        "config.optimizer.clip_norm, in a new --workdir"
    )


def _scores(what, scores) -> str:
    bits = f" ({scores['bits_per_character']:.3f} bits per character)" if "bits_per_character" in scores else ""
    return f"{what} loss {scores['loss']:.4f}{bits}"


class _Stop:
    """Inside it, SIGINT and SIGTERM are noted and the loop ends after its step; a second one ends it at once."""

    signal = None

    def __enter__(self):
        # Python lets no other thread handle signals; one that trains inside a larger program has its own ways to stop.
        numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
        self._old = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_):
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _note(self, number, _frame):
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number


def _define(values, argv):
    commands.define_config(values, argv)
    flags.DEFINE_string("workdir", None, "folder of the run; runs/NAME-OF-CONFIG when absent", flag_values=values)
    flags.DEFINE_bool("eval_only", False, "score the newest checkpoint, write nothing", flag_values=values)


def _main(values) -> int:
    config, name = commands.config_of(values)
    return train(config, values.workdir or Path("runs") / name, eval_only=values.eval_only)


if __name__ == "__main__":
    sys.exit(main())
