"""Runs of one program in one process: so many trained together, or one after another with the same compiled steps.

python -m attnlab.sweeping.together TOGETHER FOLDER FILE, of {"NAME": ["--config=…", …], …}
"""

import contextlib
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax

from attnlab import commands, compilation
from attnlab.config import RunConfig
from attnlab.nn import versions
from attnlab.support import files, workers
from attnlab.support.errors import UserError
from attnlab.sweeping import grid
from attnlab.training import processes
from attnlab.training import run as runs
from attnlab.training.preemption import PreemptionHandler
from attnlab.training.run import RunPlan
from attnlab.training.trainer import Trainer

AUTO = "auto"
ERRORS = (UserError, MemoryError, RuntimeError, OSError)
Tell = Callable[[str, str], None]  # of a run that has ended: its name, and its error or ""


def main(argv: list[str]) -> int:
    """Train the runs, tell the caller of each that ends, and return the exit code."""
    together, folder, file = argv[1:]
    commands.prepare_output()
    compilation.keep_programs()
    compilation.release_memory()
    runs_by_name = files.read_json(Path(file))
    configs = {Path(folder) / name: grid.config_of(options) for name, options in runs_by_name.items()}
    return train_all(configs, together)


@versions.taken_once()
def train_all(configs: Mapping[Path, RunConfig], together: str, tell: Tell = workers.tell, own_process=True) -> int:
    """Train runs of one program, by workdir, and tell of each that ends.

    Those that start from the same step are trained so many `together`, or all where it is "auto" on a GPU; where that
    fails, as for want of memory, by halves. Returns 0, or 128 + the number of the signal that stopped them.
    """
    waiting, programs = _starting(configs, tell), {}
    with PreemptionHandler(own_process) as preemption:
        while waiting and not preemption.requested():
            start, plans = waiting.pop(0)
            now = plans
            try:
                if start not in programs:
                    programs[start] = _program(plans, together, own_process)
                program, count = programs[start]
                now, later = plans[:count], plans[count:]
                waiting[:0] = [(start, later)] if later else []
                if code := _train(now, program, preemption, tell):
                    return code
            except Exception as error:
                message = commands.explained(error)
                is_last = len(now) == 1 or start not in programs
                if own_process and not (isinstance(error, ERRORS) and (message or not is_last)):
                    raise
                if message is None:  # in a notebook an error of a layer ends its runs alone
                    traceback.print_exc(file=sys.stdout)
                    message = f"{type(error).__name__}: {commands.one_line(error)}"
                if is_last:
                    for plan in now:
                        tell(plan.workdir.path.name, message)
                    continue
                print(f"{len(now)} runs together failed ({message}): by halves", flush=True)
                half = len(now) // 2
                for part in (now[half:], now[:half]):  # which may have begun, and saved
                    waiting[:0] = _starting({plan.workdir.path: plan.config for plan in part}, tell)
        return preemption.exit_code if preemption.signal else 0


def _starting(configs: Mapping[Path, RunConfig], tell: Tell) -> list[tuple[str, list[RunPlan]]]:
    """The runs that are not finished, by the step from which they start."""
    found = {}
    for workdir, config in configs.items():
        try:
            plan = runs.resolve(config, workdir)
            if plan.origin == "finished":
                tell(workdir.name, "")
            else:
                found.setdefault(repr(runs.start_of(plan)), []).append(plan)
        except UserError as error:
            tell(workdir.name, commands.one_line(error))
    return list(found.items())


def _program(plans: Sequence[RunPlan], together: str, own_process: bool) -> tuple[runs.Program, int]:
    """The program of runs that start from the same step, and how many of them it trains together."""
    program = runs.load(plans[0], runs.start_of(plans[0])[1])
    # On CPUs runs take as long together as one after another, or longer.
    auto = len(plans) if jax.default_backend() != "cpu" and jax.device_count() == 1 else 1
    count = auto if together == AUTO else min(int(together), len(plans))
    if count > 1 and program.experiment.parallel.splits_state:
        raise UserError(f"--together={together}: the mesh splits the state of each run: use --together=1")
    if own_process:
        program.experiment.compile_ahead(count if count > 1 else None)
    return program, count


def _train(plans: Sequence[RunPlan], program: runs.Program, preemption: PreemptionHandler, tell: Tell) -> int:
    """Train runs together, and tell of each; 0, or 128 + the number of the signal that stopped them."""
    with contextlib.ExitStack() as opened:
        members = [opened.enter_context(runs.open(plan, program=program, together=len(plans))) for plan in plans]
        trainer = Trainer(members, preemption)
        code = trainer.run()
    for place, plan in enumerate(plans if not code else ()):
        tell(plan.workdir.path.name, trainer.errors.get(place, ""))
    return code


if __name__ == "__main__":
    processes.leave(main(sys.argv))
