"""Benchmark saving: the share of training time that a checkpoint every minute costs.

    python -m attnlab.bench saving --config=sancho:small [--rounds=5] [--seconds=15]

Blocks of steps with and without a save alternate. A save is asynchronous: its cost is spread over the steps after it. A
block is long enough to contain all of it, and the difference of two blocks is the cost of one save.
"""

import statistics
import tempfile
import time

import jax

from attnlab import commands
from attnlab.data.batches import TrainBatches, prefetched
from attnlab.support import timing
from attnlab.training import run
from attnlab.training.checkpoints import Checkpoints
from attnlab.training.experiment import Experiment

from .harness import options, workers

COUNTS = {"rounds": (5, "blocks of each kind"), "seconds": (15, "seconds a block, about")}


def define(values, argv) -> None:
    """Define the flags."""
    commands.define_config(values, argv)
    options.define_integers(values, COUNTS)


def main(values) -> int:
    """Measure, and print the cost of one save."""
    config, name = commands.config_of(values)
    options.check_positive(values, *COUNTS)
    with tempfile.TemporaryDirectory(prefix="attnlab-saving-") as folder:
        with_save, without = race(run.resolve(config).config, folder, values.rounds, values.seconds)
    cost = statistics.median(a - b for a, b in zip(with_save, without))
    print(
        f"{name}: a block takes {statistics.median(without):.2f} s, with a save {statistics.median(with_save):.2f} s: "
        f"one save costs {cost:+.3f} s, {100 * cost / 60:+.2f} % of a minute"
    )
    return 0


def race(config, folder: str, rounds: int, seconds: int) -> tuple[list[float], list[float]]:
    """Time blocks of equally many steps.

    Args:
      config: a complete config; its text is replaced by the quickstart's.
      folder: for the checkpoints.
      rounds: blocks of each kind.
      seconds: of a block, about.

    Returns:
      Seconds of the blocks with a save and of those without, in the order in which they ran.
    """
    tokens, vocab_size = workers.quickstart_text()
    experiment = Experiment(config, vocab_size)
    state = experiment.create_state()
    sizes = {"context": config.model.context, "batch_size": config.batch_size}
    batches = prefetched(TrainBatches(tokens, seed=config.seed, **sizes))
    checkpoints = Checkpoints(folder)

    def block(steps: int, saves: bool) -> float:
        nonlocal state
        start = time.perf_counter()
        if saves:
            checkpoints.save(state)
        for _ in range(steps):
            state, metrics = experiment.train_step(state, experiment.parallel.place_batch(next(batches)))
            float(metrics["loss"])  # as a run that logs every step does
        checkpoints.wait()  # as the next save does
        return time.perf_counter() - start

    print("compiling", flush=True)
    block(3, saves=True)  # compiles, and initialises Orbax
    steps = max(1, round(seconds / (block(3, saves=False) / 3)))
    with_save, without = [], []
    for _ in timing.rounds("saving", rounds):
        with_save.append(block(steps, saves=True))
        without.append(block(steps, saves=False))
    checkpoints.close()
    jax.block_until_ready(state)
    return with_save, without
