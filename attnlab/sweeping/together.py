"""Runs of one program in one process: so many trained together, or one after another with the same compiled steps.

python -m attnlab.sweeping.together TOGETHER FOLDER '{"NAME": ["--config=…", …], …}'
"""

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from attnlab import commands, compilation
from attnlab.data.batches import Stacked
from attnlab.support import status, workers
from attnlab.support.errors import UserError
from attnlab.sweeping import grid
from attnlab.training import metrics, precision
from attnlab.training import run as runs
from attnlab.training import state as states
from attnlab.training.preemption import PreemptionHandler
from attnlab.training.run import RunPlan
from attnlab.training.trainer import Trainer

AUTO = "auto"
MEMORY = 0.9  # share of a device's memory that a program may take


def main(argv: list[str]) -> int:
    """Train the runs, tell the caller of each that ends, and return the exit code."""
    together, folder, described = argv[1:]
    status.open_streams()
    compilation.keep_programs()
    compilation.release_memory()
    starting = {}
    for name, options in json.loads(described).items():
        plan = runs.resolve(grid.config_of(options), Path(folder) / name)
        if plan.origin == "finished":
            workers.tell(name)
        else:
            starting.setdefault(repr(runs.start_of(plan)), []).append(plan)
    return next(filter(None, (train_all(plans, together) for plans in starting.values())), 0)


def train_all(plans: Sequence[RunPlan], together: str) -> int:
    """Train runs of one program that start from the same step; 0, or 128 + the number of the signal that stopped them.

    What of them cannot be trained together is trained by halves, down to one by one, and an error is told of one alone.
    """
    program, waiting = runs.load(plans[0], runs.start_of(plans[0])[1]), list(plans)
    count = most(program, plans) if together == AUTO else int(together)
    while waiting:
        now, waiting = waiting[:count], waiting[count:]
        try:
            if code := train(now, program):
                return code
        except (UserError, MemoryError, RuntimeError) as error:
            if len(now) > 1:
                count, waiting = len(now) // 2, now + waiting
            else:
                workers.tell(now[0].workdir.path.name, commands.explained(error) or repr(error))
    return 0


def train(plans: Sequence[RunPlan], program: runs.Program) -> int:
    """Train runs together, and tell of each; 0, or 128 + the number of the signal that stopped them."""
    with PreemptionHandler(True, plans[0].config.parallel.timeout) as preemption, contextlib.ExitStack() as opened:
        members = [opened.enter_context(runs.open(plan, program=program, together=len(plans))) for plan in plans]
        trainer = Trainer(members, preemption)
        code = trainer.run()
    for place, plan in enumerate(plans if not code else ()):
        workers.tell(plan.workdir.path.name, trainer.errors.get(place, ""))
    return code


def most(program: runs.Program, plans: Sequence[RunPlan]) -> int:
    """How many of some runs to train together: as many as the device holds, if that is faster than one by one.

    On CPUs 1: there, runs take as long together as one after another, or longer.
    """
    device, count = jax.local_devices()[0], len(plans)
    if device.platform == "cpu" or jax.device_count() > 1:
        return 1
    with precision.products(plans[0].config.precision):
        while count > 1 and _bytes(program, count) > MEMORY * metrics.memory_stats(device)["bytes_limit"]:
            count = -(-count // 2)
        alone, together = (_seconds(program, plans[:n]) for n in (1, count))
    return count if together < count * alone else 1


def _bytes(program: runs.Program, count: int) -> int:
    """Of the training steps of some runs together."""
    room = program.experiment.config.parallel.steps_per_call
    memory = program.experiment.lower(count, room).compile().memory_analysis()
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes


def _seconds(program: runs.Program, plans: Sequence[RunPlan]) -> float:
    """Of a call of the training steps of some runs, the shorter of two."""
    experiment, configs, seconds = program.experiment, [plan.config for plan in plans], []
    each = [experiment.create_state(seed=config.seed) for config in configs]
    batches = [program.text.of_seed(config.seed).train for config in configs]
    state, batches = (states.joined(each), Stacked(batches)) if len(plans) > 1 else (each[0], batches[0])
    room = experiment.config.parallel.steps_per_call
    taken = [batches[step] for step in range(room)]
    for _ in range(3):  # the first compiles
        start = time.perf_counter()
        state, _ = jax.block_until_ready(experiment.train_steps(state, taken, experiment.fixed(*configs), room))
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv))
