"""Measure the costs of a variant's finished runs, and their results beyond the context; or race several variants.

python -m attnlab.comparing [--import=FILE] [--run=FILE] [--race] OUT.json WORKDIR WORKDIR …
"""

import contextlib
import functools
import json
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from attnlab import commands, loading
from attnlab.comparing import certificate
from attnlab.comparing import protocol as protocols
from attnlab.comparing.race import LONGER, Race, extends, race
from attnlab.comparing.variants import state_bytes
from attnlab.config import RunConfig
from attnlab.data.batches import Batch
from attnlab.data.tasks import named
from attnlab.data.tasks.task_batches import HeldOutBatches
from attnlab.nn import custom, versions
from attnlab.support import paths, provenance, workers
from attnlab.support.errors import UserError
from attnlab.support.files import read_json
from attnlab.sweeping import training_runs
from attnlab.training import flops, precision, state
from attnlab.training import text as texts
from attnlab.training.program import TrainProgram
from attnlab.training.workdir import Workdir

FURTHEST = 4  # longest context for which losses are measured, in multiples of the training context
TASK_LENGTHS = (1, 2, 4, 8)  # lengths of a task's sequences, in multiples of the training context
SPANS = ((0, 1), (1, 2), (2, FURTHEST))  # ranges of positions, in multiples of the training context


@versions.taken_once()
def main(argv: list[str] | None = None) -> int:
    """Measure, write the file, and return the exit code."""
    words = (sys.argv if argv is None else argv)[1:]
    out, *names = (word for word in words if not word.startswith("--"))
    workdirs = list(map(Path, names))
    try:
        custom.load([(file, how) for how in ("import", "run") for file in commands.given(words, how)])
        results = race(workdirs)._asdict() if "--race" in words else measured(workdirs)
    except UserError as error:
        print(f"error: {commands.one_line(error)}", file=sys.stderr)
        return 2
    paths.write_text(Path(out), json.dumps(results, indent=1))
    return 0


def measured(workdirs: list[Path]) -> dict:
    """Measure one variant on its finished runs, which differ only in the seed; return values by table column."""
    runs = [loading.load(workdir) for workdir in workdirs]
    with precision.products(runs[0].config.precision):
        measurements = _costs(runs[0]) | _results(runs, workdirs)
    return measurements | {
        "machine": provenance.machine(),
        "versions": provenance.versions(),
        "sources": provenance.sources(64),
    }


def _costs(run: loading.Run) -> dict:
    config, model = run.config, run.model
    program = TrainProgram(config, run.tokenizer.vocab_size)
    memory = program.lower().compile().memory_analysis()
    costs = {
        "parameters": program.parameters,
        "flops_per_token_train": flops.per_token(model, config.model.context),
        "flops_per_token_decode": flops.per_decoded_token(model, config.model.context),
        "peak_memory_bytes": memory.temp_size_in_bytes
        + memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes,
        "certificate": certificate.certify(model),
    }
    for times in LONGER if extends(model) else LONGER[:1]:
        length = times * config.model.context
        costs[f"decode_state_bytes_{times}x"] = state_bytes(model.replace(context=length))
    return costs


def _results(runs: list[loading.Run], workdirs: list[Path]) -> dict:
    config = runs[0].config
    if task := named.parse(config.data.name):
        return _accuracies(task, runs)
    context = config.model.context
    losses = np.mean([_losses_by_position(run, workdir) for run, workdir in zip(runs, workdirs)], axis=0)
    spans = {end: losses[start * context : end * context] for start, end in SPANS}
    return {f"loss_{end}x": float(x.mean()) for end, x in spans.items() if len(losses) >= end * context}


def _accuracies(task: named.Task, runs: list[loading.Run]) -> dict:
    """Measure accuracy in the second half of sequences of several lengths: means over runs, and each run's values.

    Also return the number of answers N at each length, because unequal accuracies differ by at least 1/N.
    """
    config, by_length, answers = runs[0].config, {}, {}
    for times in TASK_LENGTHS if extends(runs[0].model) else TASK_LENGTHS[:1]:
        length = times * config.model.context
        if (longer := task.longer(length)) is None:
            break
        sizes = {"batch_size": max(1, config.batch_size // times), "windows": max(1, config.eval.windows // times)}
        batches = HeldOutBatches(longer, context=length, part="second", **sizes)
        model = runs[0].model.replace(context=length)
        answer = jax.jit(lambda params, tokens, model=model: model.apply(params, tokens).argmax(-1))
        scores = [_accuracy(functools.partial(answer, run.params), batches) for run in runs]
        by_length[length], answers[length] = [accuracy for accuracy, _ in scores], scores[0][1]
    means = {
        f"accuracy_{times}x": float(np.mean(accuracies)) for times, accuracies in zip(TASK_LENGTHS, by_length.values())
    }
    return means | {"accuracies_by_length": by_length, "answers_by_length": answers}


def _accuracy(answer: Callable, batches: HeldOutBatches) -> tuple[float, int]:
    right = count = 0
    for number in range(len(batches)):
        batch = batches[number]
        positions = np.arange(batch.targets.shape[1])
        counted = (batch.targets >= 0) & (positions >= len(positions) // 2) & (batch.weight > 0)[:, None]
        right += ((np.asarray(answer(batch.tokens[:, :-1])) == batch.targets) & counted).sum()
        count += counted.sum()
    return float(right / count), int(count)


def _losses_by_position(run: loading.Run, workdir: Path) -> np.ndarray:
    """Mean loss at each position, `[positions]`, in the longest windows that the model and the text allow."""
    for times in range(FURTHEST if extends(run.model) else 1, 1, -1):
        with contextlib.suppress(UserError):  # the text is too short
            return _mean_losses(run, _longer(run.config, times), workdir)
    return _mean_losses(run, _longer(run.config, 1), workdir)


def _longer(config: RunConfig, times: int) -> RunConfig:
    sizes = {"batch_size": max(1, config.batch_size // times), "eval.windows": max(1, config.eval.windows // times)}
    sizes |= {"model.context": config.model.context * times, "optimizer.accumulation": 1}
    return config.changed(sizes | {"eval.part": "second"})


def _mean_losses(run: loading.Run, config: RunConfig, workdir: Path) -> np.ndarray:
    model = run.model.replace(context=config.model.context)
    batches = texts.load(config, Workdir(workdir)).validation

    @jax.jit
    def losses(params, batch: Batch):
        return (state.token_losses(model, params, batch) * batch.weight[:, None]).sum(0), batch.weight.sum()

    sums, count = 0.0, 0.0
    for number in range(len(batches)):
        position_sums, windows = jax.device_get(losses(run.params["params"], batches[number]))
        sums, count = sums + position_sums.astype(np.float64), count + windows
    return sums / count


# All variants ---------------------------------------------------------------------------------------------------------


def measure(
    finished: Mapping[str, list[Path]], folder: Path, runner: training_runs.Runner, trained: Sequence[RunConfig]
) -> tuple[dict, Race | None]:
    """Measure the variants one after another, and then race them all; `trained` has a config of each variant."""
    logs = folder / training_runs.LOGS
    files = {
        name: logs / f"{workdirs[0].name}-{protocols.digest(workdirs)}.json" for name, workdirs in finished.items()
    }
    waiting = {
        f"measuring {workdirs[0].name}": [files[name], *workdirs]
        for name, workdirs in finished.items()
        if not files[name].exists()
    }
    first = [workdirs[0] for workdirs in finished.values()]
    race_file = logs / f"race-{protocols.digest(first)}.json"
    if first and not race_file.exists():
        waiting["race"] = ["--race", race_file, *first]
    waiting = {name: list(map(str, words)) for name, words in waiting.items()}
    if runner.jobs:
        code = custom.to_load([config.model for config in trained])
        module = ["attnlab.comparing.__main__", *(f"--{how}={path}" for path, how in code)]
        words = {name: [*module, *arguments] for name, arguments in waiting.items()}
        ended = workers.run(words, 1, logs, runner.lock, lambda name: print(name, flush=True))
        errors = {each.name: each.error for each in ended}
    else:
        errors = {name: _measure_here(name, arguments, logs) for name, arguments in waiting.items()}
    for name, error in errors.items():
        if error:
            print(f"{name} failed: {error} (see {logs})", file=sys.stderr)
    measured = {name: _measurements(file) for name, file in files.items() if file.exists()}
    return measured, Race(**_measurements(race_file)) if race_file.exists() else None


def _measurements(file: Path) -> dict:
    try:
        return read_json(file)
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON ({error}): delete it, and the same command measures again") from None


def _measure_here(name: str, arguments: Sequence[str], logs: Path) -> str:
    """Measure or race in this process, as `main` with `arguments`; return the error if it failed, else ""."""
    print(name, flush=True)
    with (logs / f"{name}.txt").open("a") as log, contextlib.redirect_stdout(log):
        try:
            return "" if main([name, *arguments]) == 0 else "its runs cannot be loaded"
        except Exception as error:  # from a custom layer, or out of memory
            traceback.print_exc(file=log)
            return f"{type(error).__name__}: {commands.one_line(error)}"
