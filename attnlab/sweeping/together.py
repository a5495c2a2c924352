"""Runs of one program in one process: so many trained together, or one after another with the same compiled steps.

python -m attnlab.sweeping.together TOGETHER FOLDER '{"NAME": ["--config=…", …], …}'
"""

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax

from attnlab import commands, compilation
from attnlab.config import RunConfig
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
    return train_all(
        {Path(folder) / name: grid.config_of(options) for name, options in json.loads(described).items()}, together
    )


def train_all(configs: Mapping[Path, RunConfig], together: str) -> int:
    """Train runs of one program, by workdir, and tell of each that ends.

    Those that start from the same step are trained so many `together`, or as many as `most` says where it is "auto".
    Returns 0, or 128 + the number of the signal that stopped them.
    """
    starting = {}
    for workdir, config in configs.items():
        with _telling([workdir]):
            plan = runs.resolve(config, workdir)
            if plan.origin == "finished":
                workers.tell(workdir.name)
            else:
                starting.setdefault(repr(runs.start_of(plan)), []).append(plan)
    return next(filter(None, (_train(alike, together) for alike in starting.values())), 0)


def _train(plans: list[RunPlan], together: str) -> int:
    """Runs that cannot be trained together are trained by halves; an error is reported of one that is alone."""
    with _telling([plan.workdir.path for plan in plans]):
        program, waiting = runs.load(plans[0], runs.start_of(plans[0])[1]), plans
        count = most(program, plans) if together == AUTO else int(together)
        program.experiment.compile_ahead(min(count, len(plans)) if count > 1 and len(plans) > 1 else None)
        while waiting:
            now, waiting = waiting[:count], waiting[count:]
            try:
                with _telling([now[0].workdir.path]) if len(now) == 1 else contextlib.nullcontext():
                    if code := train(now, program):
                        return code
            except (UserError, MemoryError, RuntimeError):
                count, waiting = len(now) // 2, now + waiting
    return 0


@contextlib.contextmanager
def _telling(workdirs: Sequence[Path]) -> Iterator[None]:
    """Errors of the user are reported of the runs in some folders, and end no other."""
    try:
        yield
    except (UserError, MemoryError, RuntimeError) as error:
        if (message := commands.explained(error)) is None:
            raise
        for workdir in workdirs:
            workers.tell(workdir.name, message)


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
