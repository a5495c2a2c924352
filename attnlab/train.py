"""Train a GPT on text.

    python -m attnlab.train --config=configs/quickstart.py
    python -m attnlab.train --config=configs/sancho.py:tiny --workdir=runs/sancho --config.data.path=quijote.txt

The same command again goes on where the run was stopped. A finished run is left as it is.
"""

if __name__ == "__main__":
    from attnlab import hugepages

    hugepages.restart("attnlab.train")

import contextlib
import errno
import fcntl
import functools
import math
import os
import shutil
import sys
import time
from pathlib import Path

import jax
import numpy as np
from absl import flags
from ml_collections import ConfigDict

from attnlab import commands, compilation, pretrained
from attnlab import config as configs
from attnlab.data import corpora, tokenizers
from attnlab.data.batches import EvalBatches, TrainBatches, prefetched
from attnlab.errors import UserError
from attnlab.loading import read_config, read_tokenizer
from attnlab.sample import generate, prompt_ids
from attnlab.training import flops as flops_lib
from attnlab.training import metrics as metrics_lib
from attnlab.training import optimizer as optimizers
from attnlab.training import parallel as parallel_lib
from attnlab.training import processes
from attnlab.training import state as states
from attnlab.training.checkpoints import Checkpoints, sha256
from attnlab.training.stopping import Stop, lost


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    code = commands.run(_define, functools.partial(_main, own_process=argv is None), __doc__, argv)
    if code and argv is None:
        processes.leave(code)
    return code


def train(config: ConfigDict, workdir: str | Path, *, eval_only: bool = False, own_process: bool = False) -> int:
    """Trains as `config` says, from where `workdir` left off.

    Args:
      config: an `attnlab.config.default()`, changed.
      workdir: gets `config.json`, `tokenizer.json`, `metrics.jsonl`, `checkpoints/` and TensorBoard events.
      eval_only: score the newest checkpoint on the validation text, and write nothing.
      own_process: nothing else happens in this process, so that a signal may end it from a thread as soon as the
        state is saved; else the loop ends after its step.

    Returns:
      0, or 128 + the signal's number when SIGINT or SIGTERM asked to stop and the state was saved.

    Raises:
      UserError: a config, a text or a workdir that cannot be used; a loss or gradient that is not finite.
    """
    config = configs.completed(config)
    with Stop(own_process, config.parallel.timeout) as stop, contextlib.ExitStack() as at_end:
        try:
            return _train(config, Path(workdir), eval_only, stop, at_end)
        except (jax.errors.JaxRuntimeError, TimeoutError) as error:
            if own_process and jax.process_count() > 1 and "RESOURCE_EXHAUSTED" not in str(error):
                lost(commands.one_line(error))
            raise


def _train(config: ConfigDict, workdir: Path, eval_only: bool, stop: Stop, at_end: contextlib.ExitStack) -> int:
    starting = at_end.enter_context(contextlib.ExitStack())
    starting.enter_context(stop.at_rest(lambda: print("stopped before the first step: nothing to save", flush=True)))

    # ------------------------------------------------------------------------------------------------------- config
    config, pretrained_tokenizer, facts = pretrained.completed(config, workdir)
    before = _earlier_run(workdir, config)
    if eval_only and before is None:
        raise UserError(f"{workdir} holds no run to evaluate: train first")
    first_process = jax.process_index() == 0
    log_path = workdir / "metrics.jsonl"
    if before and not eval_only:
        if any(record["split"] == "final" for record in metrics_lib.read(log_path)):
            if first_process:
                print(f"{workdir} is finished ({config.steps} steps): nothing to do")
            return 0
        if first_process:
            at_end.callback(os.close, _lock(workdir))

    # ------------------------------------------------------------------------------------------------------ devices
    parallel = parallel_lib.make(config.parallel.strategy, **config.parallel.mesh)
    devices, accumulation = parallel.mesh.devices.size, config.optimizer.accumulation
    parallel_lib.check_batch(config.batch_size, devices, accumulation)
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
    elif pretrained_tokenizer is not None:
        tokenizer = pretrained_tokenizer
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
    skips = config.on_nonfinite == "skip"
    optimizer = optimizers.make(config.optimizer, config.steps, skip_nonfinite=skips)
    parallel_lib.check_width(config.model.width, config.parallel.mesh.fsdp)
    state = parallel.create_state(functools.partial(states.create, model, optimizer, config.seed))
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))

    # --------------------------------------------------------------------------------------------------------- step
    pure_step = functools.partial(states.train_step, model, optimizer, config.seed, accumulation)
    step_fn = parallel.compile_train(pure_step, state)
    eval_fn = parallel.compile_eval(functools.partial(states.eval_step, model))
    rate = optimizers.learning_rate(config.optimizer, config.steps)

    def evaluate(params) -> dict | None:
        """The scores on the validation text, None when asked to stop."""
        sums = np.zeros(2)
        for batch in prefetched(eval_batches):
            if stop.asked():
                return None
            sums += jax.device_get(eval_fn(params, parallel.place_batch(batch)))
        loss = float(sums[0] / sums[1])
        return {"loss": loss, "bits_per_character": loss * bits}

    # ------------------------------------------------------------------------------------------------------ restore
    checkpoints = Checkpoints(config.checkpoint.dir or workdir / "checkpoints", config.checkpoint.keep)
    at_end.callback(checkpoints.close)
    start, damaged = checkpoints.newest_whole() if first_process else (0, {})
    start = parallel_lib.from_first_process(start)
    if start and before is None:
        raise UserError(f"config.checkpoint.dir = {config.checkpoint.dir} holds another run's: choose a new folder")
    if before and not start:
        _check_really_none(workdir, configs.from_dict(before), config)
    mark = None
    if before and "init_from_sha256" in before:
        facts["init_from_sha256"] = before["init_from_sha256"]
    if start:
        state, mark = checkpoints.restore(start, state), checkpoints.facts(start)["log"]
    elif config.init_from and not eval_only:
        params = pretrained.params(config)
        if before and before.get("init_from_sha256") != sha256(params):
            raise UserError(
                f"config.init_from = {config.init_from} is not what {workdir} began with, and no checkpoint was saved "
                "yet: bring it back, or choose a new --workdir"
            )
        facts["init_from_sha256"] = sha256(params)
        state = state._replace(
            params=jax.tree.map(lambda x, old: jax.device_put(x, old.sharding), params, state.params)
        )
    if eval_only:
        if not start:
            raise UserError(f"{workdir} holds no checkpoint to evaluate: train longer")
        if (scores := evaluate(state.params)) is None:
            return 128 + stop.signal
        if first_process:
            for step, why in damaged.items():
                print(f"checkpoint {step} is damaged ({why}); the newest whole one is")
            windows = f"{eval_batches.windows} windows of {context} tokens"
            print(f"step {start}  {_scores('validation', scores)}  over {windows}")
        return 0

    watch = metrics_lib.Watch(config.steps, start, silent=not first_process)
    if first_process:
        text = configs.to_json(
            config,
            corpus={"name": corpus.name, "sha256": corpus.sha256, "characters": len(corpus.text)},
            vocab_size=tokenizer.vocab_size,
            tokenizer_sha256=before.get("tokenizer_sha256") if before else tokenizers.sha256(tokenizer),
            parameters=parameters,
            **facts,
        )
        if before is None:
            if config.checkpoint.dir:
                checkpoints.prepare()  # one that cannot be made is known before the workdir is
            at_end.callback(os.close, _found(workdir, text, tokenizer))
        checkpoints.prepare()
        checkpoints.sweep()
        log = metrics_lib.MetricsLog(log_path, mark, start, workdir / "tensorboard" if config.log.tensorboard else None)
        at_end.callback(log.close)
        if before:
            _replace(workdir / "config.json", text)  # what may differ between starts, such as checkpoint.dir
        for step, why in damaged.items():
            watch.say(f"checkpoint {step} is damaged ({why}): set aside as {checkpoints.set_aside(step)}")
        if log.lost:
            watch.say(f"{log_path} is not there: the records up to step {start} are lost")
        checkpoints.best = lambda steps: metrics_lib.best_step(log.records, steps)
    watch.say(
        f"{config.data.name}: {len(train_tokens):,} tokens to train on, {len(val_tokens):,} to validate, "
        f"{tokenizer.vocab_size} kinds\n"
        f"GPT of {parameters:,} parameters on {devices} {jax.devices()[0].platform} "
        f"device{'s' if devices > 1 else ''} ({parallel.strategy}), into {workdir}"
    )
    if start:
        watch.say(f"resumed from step {start}")
    elif config.init_from:
        watch.say(f"starting from {config.init_from}, sequences of {context} tokens")
    elif before:
        watch.say("no checkpoint was saved before: starting from the beginning")

    def validates(step) -> bool:
        return step == config.steps or step % config.eval.every == 0

    def save():
        checkpoints.save(parallel.over_processes(state), log=log.mark() if first_process else None)

    def leave():
        """Whole at any moment in which the state is at rest."""
        save()
        checkpoints.wait()
        watch.say(f"stopped: step {int(state.step)} is saved in {checkpoints.directory}; {_GO_ON}")
        parallel_lib.from_first_process(0)  # a launcher may kill what is left as soon as one process ends

    def validate(step) -> bool:
        """Scores the state of a step; False when asked to stop before that was done."""
        with stop.at_rest(leave):
            scores = evaluate(state.params)
        if scores is None:
            return False
        if not math.isfinite(scores["loss"]):
            raise _not_finite(f"validation loss is {scores['loss']}", step, checkpoints, workdir)
        if first_process:
            log.write(step=step, split="val", **scores, tokens=step * rows * context)
        watch.say(f"step {step}/{config.steps}  {_scores('validation', scores)}")
        return True

    def write_sample(step):
        params = parallel.on_every_device(state.params)
        if not first_process:
            return
        drawn = generate(
            model,
            {"params": jax.tree.map(lambda x: x.addressable_data(0), params)},
            prompt_ids(tokenizer, None),
            config.sample.length,
            temperature=0.8,
            seed=config.seed,
            vocab_size=tokenizer.vocab_size,
        )
        with stop.at_rest(leave):
            text = tokenizer.decode([tokens[0] for tokens in drawn])
        watch.say(f"--- a sample at step {step}:\n{text}\n---")
        log.write_text(step, text)

    flops, peak = flops_lib.per_token(model, context), config.log.peak_tflops * 1e12
    peaks = jax.process_count() if jax.default_backend() == "cpu" else devices  # CPU devices share the cores
    if not peak and first_process:
        peak = flops_lib.peak(config.precision)
        watch.say(
            f"a token takes {flops:.3g} FLOP, a device does {peak:.3g} a second: "
            f"at most {peak * peaks / flops:,.0f} tokens/s"
        )

    # --------------------------------------------------------------------------------------------------------- loop
    unread = []  # the metrics of steps that nobody has waited for yet
    with watch:
        # Stopped when it was about to be validated.
        owed = start and validates(start) and first_process and _validation(log, start) is None
        if parallel_lib.from_first_process(owed) and not validate(start):
            return 128 + stop.signal
        clock, clock_step, waited = time.perf_counter(), start, 0.0
        batches = prefetched(train_batches, start, config.steps)
        for step in range(start + 1, config.steps + 1):
            asked = time.perf_counter()
            batch = next(batches)
            if not unread or unread[-1]["loss"].is_ready():  # else the devices were at work meanwhile
                waited += time.perf_counter() - asked
            placed = parallel.place_batch(batch)
            with parallel.transfer_guard():
                state, step_metrics = step_fn(state, placed)
            if step == start + 1:
                jax.block_until_ready(state)
                starting.close()  # from here on there is something to save
                watch.say(f"first step finished: {time.perf_counter() - clock:.1f} s with its compilation")
                if step % config.log.every and step < config.steps:  # compiling is not training either
                    clock, clock_step, waited = time.perf_counter(), step, 0.0
            unread.append(step_metrics)
            last = step == config.steps
            stopping = stop.asked()  # asked once: what comes later in this step waits for the next
            saves = last or step % config.checkpoint.every == 0 or stopping
            evaluates = validates(step) and not stopping
            if step % config.log.every == 0 or saves or evaluates:
                read = [{name: float(value) for name, value in old.items()} for old in jax.device_get(unread)]
                unread = []
                for at, old in enumerate(read, step - len(read) + 1):
                    if what := _nonfinite(old):
                        if not skips or not math.isfinite(old["param_norm"]):
                            raise _not_finite(what, at, checkpoints, workdir)
                        watch.say(f"step {at} is skipped: {what} ({old['skipped']:.0f} skipped in all)")
                newest = {name: value if math.isfinite(value) else None for name, value in read[-1].items()}
                seconds = time.perf_counter() - clock
                tokens_per_second = (step - clock_step) * rows * context / seconds
            if (step % config.log.every == 0 or last) and first_process:
                log.write(
                    step=step,
                    split="train",
                    **newest,
                    bits_per_character=None if newest["loss"] is None else newest["loss"] * bits,
                    learning_rate=float(rate(step - 1)),
                    tokens=step * rows * context,
                    tokens_per_second=tokens_per_second,
                    mfu=flops * tokens_per_second / (peak * peaks),
                    peak_flops=peak,
                    data_wait_time_share=waited / seconds,
                )
                watch.step(step, f"{_scores('train', newest)}  {tokens_per_second:,.0f} tokens/s")
            if evaluates:
                stopping = not validate(step)
            if saves:
                save()
            if stopping:
                leave()
                return 128 + stop.signal
            if not last and config.sample.every and step % config.sample.every == 0:
                write_sample(step)
            if step % config.log.every == 0 or saves or evaluates:
                clock, clock_step, waited = (
                    time.perf_counter(),
                    step,
                    0.0,
                )  # evaluation, saving and sampling are not training

        # ------------------------------------------------------------------------------------------------------ end
        starting.close()
        with stop.at_rest(leave):
            checkpoints.wait()
        write_sample(config.steps)
        params = parallel.on_every_device(state.params)
        if first_process:
            scores = _validation(log, config.steps)
            log.write(step=config.steps, split="final", loss=scores["loss"], params_sha256=sha256(params))
            watch.say(
                f"done: {_scores('validation', scores)}\nwrite with it: python -m attnlab.sample --workdir={workdir}"
            )
    return 0


_GO_ON = "the same command goes on from there"


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
        raise configs.another(workdir, difference)
    return before


def _found(workdir: Path, config: str, tokenizer) -> int:
    """Makes the workdir under another name and renames it: at any moment it is a whole run, locked, or not there."""
    unfinished = workdir.absolute().with_name(f".{workdir.absolute().name}.unfinished")
    held = None
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
        (unfinished / "tokenizer.json").touch()
        held = _lock(unfinished, workdir)
        tokenizers.save(tokenizer, unfinished / "tokenizer.json")
        (unfinished / "config.json").write_text(config, encoding="utf-8")
        unfinished.rename(workdir)  # an empty folder that stands there gives way
    except OSError as error:
        if held is not None:
            os.close(held)
        if error.errno == errno.ENOENT:  # another process has renamed it
            raise _busy(workdir) from error
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # another process made the workdir
            shutil.rmtree(unfinished, ignore_errors=True)
            raise _busy(workdir) from error
        raise UserError(f"--workdir={workdir} cannot be written ({error.strerror}): choose another folder") from error
    return held


def _lock(folder: Path, workdir: Path | None = None) -> int:
    """Holds a workdir until the process ends, however it ends; UserError when another process does.

    Args:
      folder: where the workdir is.
      workdir: what it will be, if that is something else yet.
    """
    path = folder / "tokenizer.json"  # never written again; NFS locks no folder, and no file that is open for reading
    try:
        held = os.open(path, os.O_RDWR)
    except OSError as error:
        raise UserError(
            f"{path} cannot be opened for writing ({error.strerror}): see to it, or choose another"
        ) from error
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(held), path.stat()):  # opened before it was renamed
            raise FileNotFoundError
    except (BlockingIOError, FileNotFoundError) as error:
        os.close(held)
        raise _busy(workdir or folder) from error
    except OSError:  # a file system without locks
        pass
    return held


def _busy(workdir: Path) -> UserError:
    return UserError(f"--workdir={workdir}: another process trains there: wait for it, or choose another")


def _check_really_none(workdir: Path, was: ConfigDict, config: ConfigDict) -> None:
    """Raises UserError where a run that has no checkpoint must have had one."""
    with contextlib.closing(Checkpoints(was.checkpoint.dir or workdir / "checkpoints")) as before:
        if before.steps():
            raise UserError(
                f"config.checkpoint.dir = {config.checkpoint.dir!r} is empty, and the run's checkpoints are in "
                f"{before.directory}: move them, or name that folder"
            )
    # A save begins when the one before it is on disk, so that past two of them one must be there.
    reached = max((record["step"] for record in metrics_lib.read(workdir / "metrics.jsonl")), default=0)
    if reached > 2 * was.checkpoint.every:
        raise UserError(
            f"{before.directory} holds no checkpoint, but the run had come to step {reached}: bring them back, or "
            "start anew in another --workdir"
        )


def _validation(log: metrics_lib.MetricsLog, step: int) -> dict | None:
    """The record of the validation at a step."""
    return next((record for record in log.records if (record["split"], record["step"]) == ("val", step)), None)


def _replace(path: Path, text: str) -> None:
    """Writes a file that is whole at any moment, and only if it differs."""
    if path.read_text(encoding="utf-8") != text:
        path.with_suffix(".new").write_text(text, encoding="utf-8")
        os.replace(path.with_suffix(".new"), path)


def _nonfinite(metrics: dict) -> str:
    """What is not finite in the metrics of a step: 'loss is nan'; "" when all is."""
    return next((f"{name} is {value}" for name, value in metrics.items() if not math.isfinite(value)), "")


def _not_finite(what, step, checkpoints, workdir) -> UserError:
    checkpoints.wait()
    kept = checkpoints.steps()
    where = f"the last good checkpoint is step {kept[-1]}" if kept else "no checkpoint was saved yet"
    return UserError(
        f"{what} at step {step}; {where} in {workdir}: lower config.optimizer.learning_rate or "
        "config.optimizer.clip_norm, or set config.on_nonfinite=skip, in a new --workdir"
    )


def _scores(what, scores) -> str:
    bits = f" ({scores['bits_per_character']:.3f} bits per character)" if "bits_per_character" in scores else ""
    return f"{what} loss {scores['loss']:.4f}{bits}" if scores["loss"] is not None else f"{what} loss not finite"


def _define(values, argv):
    commands.define_config(values, argv)
    flags.DEFINE_string("workdir", None, "folder of the run; runs/NAME-OF-CONFIG when absent", flag_values=values)
    flags.DEFINE_bool("eval_only", False, "score the newest checkpoint, write nothing", flag_values=values)


def _main(values, own_process: bool) -> int:
    config, name = commands.config_of(values)
    config = configs.completed(config)
    if own_process:
        compilation.keep_programs()
    processes.connect(config.parallel.timeout)
    workdir = values.workdir or Path("runs") / name
    return train(config, workdir, eval_only=values.eval_only, own_process=own_process)


if __name__ == "__main__":
    sys.exit(main())
