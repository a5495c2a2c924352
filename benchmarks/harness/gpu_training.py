"""Training on the device of `bench gpu`: GPT-2 beside nanoGPT, and populations of small runs in one program."""

import functools
import itertools
import statistics
import sys
import time

import jax
import numpy as np

from attnlab import experiments
from attnlab.data.batches import TrainBatches
from attnlab.support.errors import UserError
from attnlab.training import precision, run
from attnlab.training.population import Population
from attnlab.training.program import TrainProgram

from . import tables, workers
from .gpu_operator import Report, alternate


def gpt2(report: Report, values, setup: dict) -> None:
    """Benchmark training; nanoGPT is left out if it fails."""
    name, vocab_size = setup["train"], setup["vocab_size"]
    size = setup["size"] | {"batch_size": values.batch}
    alone = {"attnlab": {"peer": False, "precision": "bfloat16"}}
    # nanoGPT's recipe for GPUs compiles, and logs the loss every tenth step.
    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    peer = {
        "peer": True,
        "compiled": jax.default_backend() == "gpu",
        "device": device,
        "bfloat16": True,
        "log_every": 10,
    }
    if not values.peer_path:
        print("nanoGPT is left out: give a checkout with --peer_path")
    tokens = np.random.default_rng(0).integers(vocab_size, size=2**20)
    python = values.peer_python or sys.executable
    for contenders in [alone | {"nanoGPT": peer}, alone] if values.peer_path else [alone]:
        try:
            started = workers.started(contenders, f"train {name}", size, values.peer_path, python, tokens, vocab_size)
            with started as running:
                timers = {name: functools.partial(_seconds_of_training, worker) for name, worker in running.items()}
                seconds = alternate(timers, values.rounds, setup["train_block"])
            break
        except UserError as error:
            print(f"training of {' and '.join(contenders)} failed: {error}", flush=True)
    else:
        report.fail(f"training {name} failed")
        return
    print(tables.line(f"train {name}", seconds), flush=True)
    _record(report, values, name, size, vocab_size, seconds)


def _seconds_of_training(worker, steps) -> float:
    return worker.ask("train", steps=steps)["seconds"]


def _record(report, values, name, size, vocab_size, seconds) -> None:
    """Add the row and the figures of training."""
    depth, width, context = size["num_layers"], size["width"], size["context"]
    flops = 6 * (12 * depth * width**2 + vocab_size * width) + 12 * depth * width * context  # per token
    row = report.rows[f"train {name}, bfloat16, B = {values.batch}"] = {}
    for contender, taken in seconds.items():
        key, median = f"train_{name}_bfloat16_{contender.lower()}", statistics.median(taken)
        rate = values.batch * context / median
        report.figures.update({f"ms_{key}": 1e3 * median, f"tokens_per_second_{key}": rate})
        row[contender] = f"{1e3 * median:.1f} ({tables.ratio(seconds, contender, 'attnlab'):.2f}) {rate:,.0f}/s"
        if values.peak_tflops:
            mfu = rate * flops / (1e12 * values.peak_tflops)
            report.figures[f"mfu_{key}"] = mfu
            row[contender] += f" {100 * mfu:.1f} %"
    if "nanoGPT" in seconds:
        report.figures[f"ratio_train_{name}_bfloat16"] = tables.ratio(seconds, "nanoGPT", "attnlab")


def populations(report: Report, counts: list[int], rounds: int, block: float) -> None:
    """Time runs of the quickstart together, in one program, and record the tokens per second of all of them."""
    config = run.resolve(experiments.load("quickstart")).config
    program = TrainProgram(config, vocab_size=65)
    most, per_step = program.steps_per_call, config.batch_size * config.model.context
    text = np.random.default_rng(0).integers(65, size=2**18)
    for count in counts:
        population, seeds = Population(count), range(count)
        batches = population.stack(
            [TrainBatches(text, context=config.model.context, batch_size=config.batch_size, seed=n) for n in seeds]
        )
        taken = list(itertools.islice(batches, most))
        per_run = program.per_run([config.changed({"seed": n}) for n in seeds])
        states = [population.join([program.create_state(seed=n) for n in seeds])]

        def seconds(calls, taken=taken, per_run=per_run, states=states, population=population):
            start = time.perf_counter()
            with precision.products(config.precision):
                for _ in range(calls):
                    states[0], _ = program.train_steps(states[0], taken, per_run, most, population)
            jax.block_until_ready(states[0])
            return time.perf_counter() - start

        (taken_seconds,) = alternate({"attnlab": seconds}, rounds, block).values()
        step = statistics.median(taken_seconds) / most
        row, rate = f"populations, {count} runs of the quickstart", count * per_step / step
        report.rows[row] = {"attnlab": f"{1e3 * step:.2f} {rate:,.0f}/s"}
        key = f"populations_{count}"
        report.figures.update({f"ms_{key}": 1e3 * step, f"tokens_per_second_{key}": rate})
        print(f"{row}: {1e3 * step:.2f} ms a step, {rate:,.0f} tokens/s in all", flush=True)
