"""Train runs of one program in one process, at once or one after another, with the same compiled steps.

python -m attnlab.sweeping.together TOGETHER FOLDER FILE, where FILE is written by `write`
"""

import contextlib
import io
import json
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from attnlab import commands, compilation
from attnlab import config as configs
from attnlab.config import RunConfig
from attnlab.nn import custom, records, versions
from attnlab.support import files, paths, workers
from attnlab.support.errors import ArgumentError, UserError
from attnlab.training import processes
from attnlab.training import run as runs
from attnlab.training.loop import TrainLoop
from attnlab.training.population import Population
from attnlab.training.preemption import PreemptionHandler
from attnlab.training.run import RunPlan

AUTO = "auto"
ERRORS = (UserError, MemoryError, RuntimeError, OSError)
Tell = Callable[[str, str], None]  # called with the name of a run that has ended, and its error or ""


def main(argv: list[str]) -> int:
    """Train the runs, report each to the parent process when it ends, and return the exit code."""
    together, folder, file = argv[1:]
    commands.prepare_output()
    compilation.keep_programs()
    compilation.release_memory()
    return train_all({Path(folder) / name: config for name, config in _read(Path(file)).items()}, together)


def write(runs: Mapping[str, RunConfig], file: Path) -> None:
    """Write runs, by name, to a file for another process, because an argument is limited to 128 KiB.

    The file holds {"code": …, "runs": {NAME: config}}; arrays go to a second file beside it.

    Raises:
      UserError: a layer, a mask or a score mod exists only in this process.
    """
    content = {"code": custom.to_load([config.model for config in runs.values()])}
    content |= {"runs": {name: configs.to_tree(config) for name, config in runs.items()}}
    np.savez(arrays := io.BytesIO(), **records.arrays_of(tuple(config.model.layers for config in runs.values())))
    paths.write_bytes(file.with_suffix(".npz"), arrays.getvalue())
    paths.write_text(file, json.dumps(content))


def _read(file: Path) -> dict[str, RunConfig]:
    """Read the runs of a file, and load the code of their custom layers into this process."""
    content = files.read_json(file)
    custom.load(content["code"])
    with np.load(file.with_suffix(".npz")) as arrays:
        return {name: configs.from_json(tree, arrays) for name, tree in content["runs"].items()}


@versions.taken_once()
def train_all(
    runs_by_workdir: Mapping[Path, RunConfig], together: str, tell: Tell = workers.tell, own_process=True
) -> int:
    """Train runs of one program, by workdir, and call `tell` for each run that ends.

    Runs that start from the same step are trained `together` at a time; for "auto" all at once on a single GPU or TPU,
    else one by one. If that fails, for example for lack of memory, they are split into halves. Return 0, or 128 + the
    number of the signal that stopped them.
    """
    waiting, programs = _starting(runs_by_workdir, tell), {}
    with PreemptionHandler(own_process) as preemption:
        while waiting and not preemption.requested():
            start, plans = waiting.pop(0)
            now = plans
            try:
                if start not in programs:
                    programs[start] = _shared(plans, together, own_process)
                shared, count = programs[start]
                now, later = plans[:count], plans[count:]
                waiting[:0] = [(start, later)] if later else []
                if code := _train(now, shared, preemption, tell):
                    return code
            except Exception as error:
                message = commands.explained(error)
                is_last = len(now) == 1 or start not in programs
                if own_process and not (isinstance(error, ERRORS) and (message or not is_last)):
                    raise
                if message is None:  # in a notebook, a layer's error ends only its own runs
                    traceback.print_exc(file=sys.stdout)
                    message = f"{type(error).__name__}: {commands.one_line(error)}"
                if is_last:
                    for plan in now:
                        tell(plan.workdir.path.name, message)
                    continue
                print(f"{len(now)} runs failed together ({message}): retrying in halves", flush=True)
                half = len(now) // 2
                for part in (now[half:], now[:half]):  # regrouped by step, as some may have saved since
                    waiting[:0] = _starting({plan.workdir.path: plan.config for plan in part}, tell)
        return preemption.exit_code if preemption.signal else 0


def _starting(runs_by_workdir: Mapping[Path, RunConfig], tell: Tell) -> list[tuple[str, list[RunPlan]]]:
    """Group the unfinished runs by the step from which they start, and report the others."""
    groups = {}
    for workdir, config in runs_by_workdir.items():
        try:
            plan = runs.resolve(config, workdir)
            if plan.origin == "finished":
                tell(workdir.name, "")
            else:
                groups.setdefault(repr(runs.start_of(plan)), []).append(plan)
        except UserError as error:
            tell(workdir.name, commands.one_line(error))
    return list(groups.items())


def by_default() -> bool:
    """Whether "auto" trains runs together: on one device, but not on CPUs, because it saves no time there."""
    return jax.default_backend() != "cpu" and jax.device_count() == 1


def _shared(plans: Sequence[RunPlan], together: str, own_process: bool) -> tuple[runs.Shared, int]:
    """Load the shared text and program of runs that start from the same step; also return how many train at once."""
    shared = runs.load(plans[0], runs.start_of(plans[0])[1])
    most = (len(plans) if by_default() else 1) if together == AUTO else int(together)
    count = min(most, len(plans))
    if count > 1 and shared.program.parallel.splits_state:
        raise ArgumentError("together", together, "the mesh splits the state of each run: expected 1")
    if own_process:
        shared.program.compile_ahead(Population(count))
    return shared, count


def _train(plans: Sequence[RunPlan], shared: runs.Shared, preemption: PreemptionHandler, tell: Tell) -> int:
    """Train runs together and report each; return 0, or 128 + the number of the signal that stopped them."""
    with contextlib.ExitStack() as opened:
        members = [opened.enter_context(runs.open_run(plan, shared=shared, together=len(plans))) for plan in plans]
        loop = TrainLoop(members, preemption)
        code = loop.run()
    for index, plan in enumerate(plans if not code else ()):
        tell(plan.workdir.path.name, commands.one_line(loop.errors[index]) if index in loop.errors else "")
    return code


if __name__ == "__main__":
    processes.leave(main(sys.argv))
