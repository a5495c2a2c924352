"""The linear recurrence on the device of `bench gpu`: checked against its specification, then raced against fla."""

import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import attnlab
from attnlab import commands
from attnlab.support.errors import UserError
from attnlab.testing import RecurrenceShape, check_recurrence, recurrence_call

from . import tables, workers
from .gpu_operator import Report, alternate

BACKENDS = ("parallel", "jla")
# Features of `check_recurrence` whose calls are timed, and the name of fla's function.
MEMBERS = {
    "decay": "chunk_simple_gla",
    "decay by feature": "chunk_gla",
    "beta and decay": "chunk_gated_delta_rule",
    "beta and decay by feature": "chunk_kda",
}


class Sizes(NamedTuple):
    """Sizes of the timed calls, with as many features of keys as of values; `checked`: the lengths of checked calls."""

    batch: int
    length: int
    heads: int
    features: int
    checked: tuple[int, ...]


def check(report: Report, sizes: Sizes) -> None:
    """Compare each backend with the specification in bfloat16: outputs, states and gradients for every feature."""
    shapes = [RecurrenceShape(1, length, 2, sizes.features, sizes.features) for length in sizes.checked]
    for impl in BACKENDS:
        run = functools.partial(attnlab.linear_recurrence, impl=impl, return_state=True)
        refused = _refusal(recurrence_call("beta", 0, shapes[0], "bfloat16"), impl)
        rows = () if refused else check_recurrence(run, cases=1, shapes=shapes, dtype=jnp.bfloat16).rows
        if refused:
            print(f"check recurrence: attnlab {impl} is not available: {refused}", flush=True)
        for row in rows:
            line = f"check recurrence, {row.feature}: attnlab {impl} is {row.outcome}"
            report.figures[f"check_recurrence_{impl}_{row.feature}".replace(" ", "_")] = row.outcome
            report.rows.setdefault(f"check recurrence, {row.feature}", {})[f"attnlab {impl}"] = row.outcome
            if row.outcome == "right":
                print(line, flush=True)
            elif row.outcome != "refused":
                report.fail(f"{line}: {row.why}")


def _refusal(call: dict, impl: str) -> str | None:
    try:
        attnlab.explain(**call, impl=impl, operator=attnlab.linear_recurrence)
    except ValueError:
        return attnlab.explain(**call, operator=attnlab.linear_recurrence).rejected[impl]
    return None


def race(report: Report, sizes: Sizes, rounds: int, block: float, python: str, folder: Path, deadline: float) -> None:
    """Time the backends and fla, forward and with all gradients that a contender has.

    Args:
      report: gets rows and figures.
      python: a Python interpreter that may have fla installed.
      folder: for arrays and logs.
    """
    shape = RecurrenceShape(*sizes[:3], sizes.features, sizes.features)
    for feature, fla in MEMBERS.items():
        if time.monotonic() > deadline:
            print(f"recurrence, {feature} is left out: the time is over", flush=True)
            return
        call = recurrence_call(feature, 0, shape, "bfloat16")
        contenders = {f"attnlab {impl}": functools.partial(_ours, call, impl) for impl in BACKENDS}
        contenders["fla"] = functools.partial(_fla, call, fla, python, folder)
        timers = {"forward": {}, "backward": {}}
        for name, prepare in contenders.items():
            try:
                for which, timer in prepare().items():
                    timer(1)  # compiles, or says why not
                    timers[which][name] = timer
            except (UserError, ValueError) as error:
                print(f"{name} is left out of recurrence, {feature}: {commands.one_line(error)}", flush=True)
        for which, pass_timers in timers.items():
            if pass_timers:
                _record(report, feature, which, alternate(pass_timers, rounds, block))


def _ours(call: dict, impl: str) -> dict[str, Callable]:
    run = functools.partial(attnlab.linear_recurrence, impl=impl)
    forward = jax.jit(lambda x: run(**x))
    backward = jax.jit(jax.grad(lambda x: run(**x).astype(jnp.float32).sum()))
    arrays = jax.tree.map(jnp.asarray, call)

    def timer(function, calls):
        start = time.perf_counter()
        for _ in range(calls):
            out = function(arrays)
        jax.block_until_ready(out)
        return time.perf_counter() - start

    return {"forward": functools.partial(timer, forward), "backward": functools.partial(timer, backward)}


def _fla(call: dict, function: str, python: str, folder: Path) -> dict[str, Callable]:
    """fla's function in a process of its own; raises UserError if it cannot run."""
    if jax.default_backend() != "gpu":
        raise UserError("its kernels need a GPU")
    path = folder / f"{function}.npz"
    np.savez(path, **{name: np.asarray(x, np.float32) for name, x in call.items()})
    script = Path(__file__).with_name("torchrecurrence.py")
    worker = workers.Worker([python, str(script)], folder / f"{function}.log")
    worker.ask("start", path=str(path), function=function)
    return {
        which: lambda calls, which=which: worker.ask("seconds", which=which, calls=calls)["seconds"]
        for which in ("forward", "backward")
    }


def _record(report: Report, feature: str, which: str, seconds: dict[str, list[float]]) -> None:
    row = f"recurrence, {feature}, {'forward' if which == 'forward' else 'forward + backward'}"
    print(tables.line(row, seconds), flush=True)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    for name, median in medians.items():
        over_best = median / min(medians.values())
        report.rows.setdefault(row, {})[name] = f"{1e3 * median:.3f} ({over_best:.2f} × the best)"
        report.figures[f"ms_recurrence_{feature}_{which}_{name}".replace(" ", "_")] = 1e3 * median
