"""Runs of one program in one process: so many trained together, or one after another with the same compiled steps.

python -m attnlab.sweeping.together TOGETHER FOLDER '{"NAME": ["--config=…", …], …}'
"""

import contextlib
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax

from attnlab import commands, compilation
from attnlab.config import RunConfig
from attnlab.data.batches import Stacked
from attnlab.nn import custom
from attnlab.support import workers
from attnlab.support.errors import UserError
from attnlab.sweeping import grid
from attnlab.training import metrics, precision, processes
from attnlab.training import run as runs
from attnlab.training import state as states
from attnlab.training.preemption import PreemptionHandler
from attnlab.training.run import RunPlan
from attnlab.training.trainer import Trainer

AUTO = "auto"
ERRORS = (UserError, MemoryError, RuntimeError, OSError)
MEMORY = 0.9  # share of a device's memory that a program may take


def main(argv: list[str]) -> int:
    """Train the runs, tell the caller of each that ends, and return the exit code."""
    together, folder, described = argv[1:]
    commands.prepare_output()
    compilation.keep_programs()
    compilation.release_memory()
    configs = {Path(folder) / name: grid.config_of(options) for name, options in json.loads(described).items()}
    return train_all(configs, together)


def train_all(configs: Mapping[Path, RunConfig], together: str) -> int:
    """Train runs of one program, by workdir, and tell of each that ends.

    Those that start from the same step are trained so many `together`, or as many as `most` says where it is "auto";
    where that fails, as for want of memory, by halves. Returns 0, or 128 + the number of the signal that stopped them.
    """
    waiting, programs = _starting(configs), {}
    with PreemptionHandler(own_process=True) as preemption:
        while waiting and not preemption.requested():
            start, plans = waiting.pop(0)
            now = plans
            try:
                if start not in programs:
                    programs[start] = _program(plans, together)
                program, count = programs[start]
                now, later = plans[:count], plans[count:]
                waiting[:0] = [(start, later)] if later else []
                if code := _train(now, program, preemption):
                    return code
            except ERRORS as error:
                message = commands.explained(error)
                if len(now) == 1 or start not in programs:
                    if message is None:
                        raise
                    for plan in now:
                        workers.tell(plan.workdir.path.name, message)
                    continue
                print(f"{len(now)} runs together failed ({message or repr(error)}): by halves", flush=True)
                half = len(now) // 2
                for part in (now[half:], now[:half]):  # which may have begun, and saved
                    waiting[:0] = _starting({plan.workdir.path: plan.config for plan in part})
        return preemption.exit_code if preemption.signal else 0


def _starting(configs: Mapping[Path, RunConfig]) -> list[tuple[str, list[RunPlan]]]:
    """The runs that are not finished, by the step from which they start."""
    found = {}
    for workdir, config in configs.items():
        try:
            plan = runs.resolve(config, workdir)
            if plan.origin == "finished":
                workers.tell(workdir.name)
            else:
                found.setdefault(repr(runs.start_of(plan)), []).append(plan)
        except UserError as error:
            workers.tell(workdir.name, commands.one_line(error))
    return list(found.items())


def _program(plans: Sequence[RunPlan], together: str) -> tuple[runs.Program, int]:
    """The program of runs that start from the same step, and how many of them it trains together."""
    program = runs.load(plans[0], runs.start_of(plans[0])[1])
    count = most(program, plans) if together == AUTO else min(int(together), len(plans))
    if count > 1 and program.experiment.parallel.splits_state:
        raise UserError(f"--together={together}: the mesh splits the state of each run: use --together=1")
    if custom.files() and (fault := compilation.miscompilation()):
        print(fault)
    program.experiment.compile_ahead(count if count > 1 else None)
    return program, count


def _train(plans: Sequence[RunPlan], program: runs.Program, preemption: PreemptionHandler) -> int:
    """Train runs together, and tell of each; 0, or 128 + the number of the signal that stopped them."""
    with contextlib.ExitStack() as opened:
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
        while count > 1 and _bytes(program, count) > MEMORY * metrics.memory_stats(device).get("bytes_limit", math.inf):
            count = -(-count // 2)
        if count == 1:
            return 1
        alone, together = (_seconds(program, plans[:n]) for n in (1, count))
    return count if together < count * alone else 1


def _bytes(program: runs.Program, count: int) -> int:
    """Of the training steps of some runs together."""
    try:
        memory = program.experiment.lower(count, program.experiment.steps_per_call).compile().memory_analysis()
    except jax.errors.JaxRuntimeError:  # the compiler refuses what does not fit
        return sys.maxsize
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes


def _seconds(program: runs.Program, plans: Sequence[RunPlan]) -> float:
    """Of a call of the training steps of some runs, the shorter of two."""
    experiment, configs, seconds = program.experiment, [plan.config for plan in plans], []
    each = [experiment.create_state(seed=config.seed) for config in configs]
    batches = [program.text.of_seed(config.seed).train for config in configs]
    state, batches = (states.joined(each), Stacked(batches)) if len(plans) > 1 else (each[0], batches[0])
    room = experiment.steps_per_call
    taken = [batches[step] for step in range(room)]
    for _ in range(3):  # the first compiles
        start = time.perf_counter()
        state, _ = jax.block_until_ready(experiment.train_steps(state, taken, experiment.fixed(*configs), room))
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


if __name__ == "__main__":
    processes.leave(main(sys.argv))
