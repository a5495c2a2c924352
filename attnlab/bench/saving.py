"""What saving costs the loop, at one save a minute: blocks of steps with and without a save take turns.

python -m attnlab.bench saving [--config=configs/sancho.py:small] [--rounds=5] [--seconds=15]

A save is asynchronous: what it costs is spread over the steps after it. A block is long enough to hold all of it, and
the difference of two blocks is what one save costs, of a minute.
"""

import functools
import statistics
import tempfile
import time

import jax
from absl import flags

from attnlab import commands
from attnlab import config as configs
from attnlab.bench import options
from attnlab.data import corpora, tokenizers
from attnlab.data.batches import TrainBatches, prefetched
from attnlab.training import optimizer as optimizers
from attnlab.training import parallel as parallel_lib
from attnlab.training import state as states
from attnlab.training.checkpoints import Checkpoints


def define(values, argv) -> None:
    """The flags."""
    commands.define_config(values, argv)
    flags.DEFINE_integer("rounds", 5, "blocks of each kind", flag_values=values)
    flags.DEFINE_integer("seconds", 15, "of a block, about", flag_values=values)


def main(values) -> int:
    """Prints the share of a minute that one save takes."""
    config, name = commands.config_of(values)
    options.check_positive(values, "rounds", "seconds")
    with tempfile.TemporaryDirectory(prefix="attnlab-saving-") as folder:
        with_save, without = race(configs.completed(config), folder, values.rounds, values.seconds)
    cost = statistics.median(a - b for a, b in zip(with_save, without))
    print(
        f"{name}: a block takes {statistics.median(without):.2f} s, with a save {statistics.median(with_save):.2f} s: "
        f"one save costs {cost:+.3f} s, {100 * cost / 60:+.2f} % of a minute"
    )
    return 0


def race(config, folder: str, rounds: int, seconds: int) -> tuple[list[float], list[float]]:
    """Seconds of blocks of equally many steps, those with a save and those without, in the order in which they ran."""
    parallel = parallel_lib.make(config.parallel.strategy, **config.parallel.mesh)
    text = corpora.load("python_docs").train
    tokenizer = tokenizers.make("char", text)
    model = states.make_model(config, tokenizer.vocab_size)
    optimizer = optimizers.make(config.optimizer, config.steps)
    state = parallel.create_state(functools.partial(states.create, model, optimizer, config.seed))
    parts = config.optimizer.accumulation
    step_fn = parallel.compile_train(functools.partial(states.train_step, model, optimizer, config.seed, parts), state)
    sizes = {"context": config.model.context, "batch_size": config.batch_size}
    batches = prefetched(TrainBatches(tokenizer.encode(text), seed=config.seed, **sizes))
    checkpoints = Checkpoints(folder)

    def block(steps: int, saves: bool) -> float:
        nonlocal state
        start = time.perf_counter()
        if saves:
            checkpoints.save(state)
        for _ in range(steps):
            state, metrics = step_fn(state, parallel.place_batch(next(batches)))
            float(metrics["loss"])  # as a run that logs each step
        checkpoints.wait()  # as the next save does
        return time.perf_counter() - start

    block(3, saves=True)  # compiles, and opens what Orbax opens once
    steps = max(1, round(seconds / (block(3, saves=False) / 3)))
    with_save, without = [], []
    for _ in range(rounds):
        with_save.append(block(steps, saves=True))
        without.append(block(steps, saves=False))
    checkpoints.close()
    jax.block_until_ready(state)
    return with_save, without
