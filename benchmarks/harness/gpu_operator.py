"""The operator on the device of `bench gpu`: correctness against the specification, speed against jax.nn and torch."""

import concurrent.futures
import contextlib
import functools
import itertools
import os
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

from . import peers, tables
from .peers import UNIT

BACKENDS = ("dense", "blockwise", "cudnn", "mosaic", "fa4")  # the specification first
DOCUMENTS = 12  # per sequence; their ends do not coincide with the ends of tiles
PASSES = {"forward": "forward", "backward": "forward + backward"}
_TORCH = {"torch SDPA": "sdpa", "torch FlexAttention": "flex"}
_KEYS = {"jax.nn": "jax_nn"} | _TORCH  # the peers' names in figures


class Report(NamedTuple):
    """Results so far.

    Attributes:
      rows: the table, {row: {column: cell}}.
      figures: for JSON, flat.
      wrong: one line for each wrong result of attnlab.
    """

    rows: dict[str, dict[str, str]]
    figures: dict
    wrong: list[str]

    def fail(self, line: str) -> None:
        """Add and print a wrong result."""
        self.wrong.append(line)
        print(f"WRONG: {line}", flush=True)


def make_task(mask: str, batch: int, length: int, heads: int, head_dim: int, dtype: str, window: int) -> peers.Task:
    """Random inputs for a mask."""
    arrays = jax.random.normal(jax.random.key(0), (4, batch, length, heads, head_dim)).astype(dtype)
    return peers.task(mask, arrays, window, DOCUMENTS)


def alternate(timers: dict[str, Callable], rounds: int, block: float) -> dict[str, list[float]]:
    """Time contenders in alternation: A B C A B C …

    On a GPU a call may take less time than reading the clock and waiting for the device: hence blocks of calls.

    Args:
      timers: functions that take a number of calls, make them, and return the seconds that they took.
      rounds: number of timed blocks per contender.
      block: approximate seconds per block.

    Returns:
      For each contender, the seconds per call in each round.
    """
    calls, seconds = {}, {name: [] for name in timers}
    for name, timer in timers.items():
        timer(3)  # compiles, if necessary
        calls[name] = min(1000, max(1, round(3 * block / timer(3))))
    for _ in range(rounds):
        for name, timer in timers.items():
            seconds[name].append(timer(calls[name]) / calls[name])
    return seconds


# --- Correctness -----------------------------------------------------------------------------------------------------


def in_parallel(compilers: list[Callable]) -> None:
    """Run functions that compile, as many at a time as there are cores; a later call raises their errors again."""

    def run(compiler):
        with contextlib.suppress(Exception):
            compiler()

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(run, compilers))


def check(report: Report, masks, head_dims, length: int, window: int) -> None:
    """Compare every backend with the specification in float64 on the same inputs: outputs and gradients.

    The error of an array is ‖x − x*‖ / ‖x*‖. Between the inputs and a gradient a value is rounded at most eight times
    (q·scale, s, p, o, do·v, δ, ds, and the result), each time with a relative error of at most u. Scores are of
    order 1, so nothing amplifies these errors. So the dense backend in the inputs' type may have an error of 8u, plus
    √T·2⁻²⁴ for the sums, whose at most T float32 roundings add up in quadrature. Another backend of the same type
    rounds no more often, but in another order and in other places: its error may be three times the dense backend's.
    Products of float32 are computed in float32: TF32, the default on GPUs, would hide what is to be checked.
    """
    checked, compilers = {}, []
    for mask, head_dim, dtype in itertools.product(masks, head_dims, ("bfloat16", "float32")):
        task = make_task(mask, 2, length, 4, head_dim, dtype, window)
        names = {name: _reason_against(name, task) for name in BACKENDS}
        contenders = {name: why or peers.ours(name, task) for name, why in names.items()}
        with jax.enable_x64(True):
            wide = {name: np.asarray(getattr(task, name), np.float64) for name in ("q", "k", "v", "d_out")}
            exact = peers.ours("dense", task._replace(**wide))
        checked[mask, head_dim, dtype] = exact, contenders
        compilers.append(functools.partial(_compiled, exact, "float64"))
        compilers += [functools.partial(_compiled, x, dtype) for x in contenders.values() if not isinstance(x, str)]
    in_parallel(compilers)
    for (mask, head_dim, dtype), (exact, contenders) in checked.items():
        label = f"check {mask}, D = {head_dim}, {dtype}"
        with jax.enable_x64(True):
            expected = [np.asarray(x) for x in _answers(exact)]
        allowed = np.full(4, 8 * UNIT[dtype] + length**0.5 * UNIT["float32"])
        row = report.rows.setdefault(label, {})
        for name, contender in contenders.items():
            key = f"{name}_{mask}_d{head_dim}_{dtype}".replace(" ", "_")
            verdict, errors = _check_backend(report, label, name, contender, dtype, expected, allowed)
            report.figures[f"check_{key}"] = verdict
            row[f"attnlab {name}"] = verdict.partition(":")[0]
            if errors is not None:
                report.figures[f"error_{key}"] = float(errors.max())
                row[f"attnlab {name}"] = f"{float((errors / allowed).max()):.2g} {verdict}"
            if name == "dense" and verdict == "ok":
                allowed = 3 * errors


def _compiled(contender, dtype: str) -> None:
    with jax.enable_x64(dtype == "float64"), _precision(dtype):
        contender.compile()


def _precision(dtype: str):
    return jax.default_matmul_precision("default" if dtype == "bfloat16" else "highest")


def _check_backend(report, label, name, contender, dtype, expected, allowed) -> tuple[str, np.ndarray | None]:
    """("ok", "WRONG" or "not available: REASON"), and the errors of out, dq, dk and dv, if it has answers."""
    if isinstance(contender, str):
        print(f"{label}: attnlab {name} is not available: {contender}")
        return f"not available: {contender}", None
    try:
        with _precision(dtype):
            answers = _answers(contender)
        errors = np.array([peers.relative_error(np.asarray(x), y) for x, y in zip(answers, expected)])
    except Exception as error:  # a check that raises is a result too
        report.fail(f"{label}: attnlab {name} failed ({type(error).__name__}: {commands.one_line(error)})")
        return "WRONG", None
    listed = ", ".join(f"{what} {error:.1e}" for what, error in zip(("out", "dq", "dk", "dv"), errors))
    line = f"{label}: attnlab {name} has errors {listed}; allowed {allowed.min():.1e}"
    if (errors <= allowed).all():  # False if an error is NaN
        print(line, flush=True)
        return "ok", errors
    report.fail(line)
    return "WRONG", errors


def _answers(contender) -> list:
    return [contender.forward(), *contender.backward()]


def _reason_against(name, task) -> str | None:
    arguments = task.q, task.k, task.v, peers.mask_of(task, task.ids), peers.mod_of(task)
    try:
        attnlab.explain(*arguments, impl=name)
    except ValueError:
        return attnlab.explain(*arguments).rejected[name]
    return None


# --- Speed -----------------------------------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """Sizes of a benchmark of the operator.

    Attributes:
      head_dim: features per head.
      length: tokens in a sequence.
      tokens: number of tokens in all sequences; sets the batch size.
      width: number of features in all heads; sets the number of heads.
      window: how many keys before each query are visible with the window mask.
    """

    head_dim: int
    length: int
    tokens: int
    width: int
    window: int


def race(
    report: Report,
    masks,
    sizes: list[Sizes],
    rounds: int,
    block: float,
    torch: Callable | None,
    folder,
    deadline: float,
) -> None:
    """Time every contender with the right answer, under each mask: forward, and forward + backward.

    All compile first, in parallel; then they are timed one at a time. Contenders that are not compiled in half
    of the remaining time, or not timed by the deadline, are left out.

    Args:
      report: gets rows and figures.
      masks: names of masks.
      sizes: sizes of the inputs.
      rounds: number of timed blocks per contender.
      block: approximate seconds per block.
      torch: starts a process of `torchattention.py`; None without torch.
      folder: for the arrays exchanged with these processes.
      deadline: on the clock `time.monotonic()`.
    """
    tasks, entered = {}, {}
    pool = concurrent.futures.ThreadPoolExecutor(2 * os.cpu_count())
    for size, mask in itertools.product(sizes, masks):
        batch, heads = max(1, size.tokens // size.length), max(1, size.width // size.head_dim)
        task = make_task(mask, batch, size.length, heads, size.head_dim, "bfloat16", size.window)
        label = f"{mask}, T = {size.length:,}, D = {size.head_dim}"
        contenders = _contenders(label, task, torch, Path(folder))
        tasks[label], entered[label] = task, {name: pool.submit(prepare) for name, prepare in contenders.items()}
    futures = [future for row in entered.values() for future in row.values()]
    concurrent.futures.wait(futures, max(0, deadline - time.monotonic()) / 2)
    pool.shutdown(wait=False, cancel_futures=True)
    print(f"{sum(map(_is_ready, futures))} of {len(futures)} contenders compiled in time", flush=True)
    for label, task in tasks.items():
        if time.monotonic() > deadline:
            print(f"{label} is left out: the time is over", flush=True)
            continue
        try:
            for which, timers in _entered(report, label, task, entered[label]).items():
                row = f"{label}, {PASSES[which]}"
                if not timers:
                    print(f"{row} is left out: no contender has the correct answer", flush=True)
                    continue
                seconds = alternate(timers, rounds, block)
                print(tables.line(row, seconds), flush=True)
                _record(report, task, row, which, seconds)
        except Exception as error:  # the other benchmarks must go on
            report.fail(f"{label} failed ({type(error).__name__}: {commands.one_line(error)})")


def _is_ready(future) -> bool:
    return future.done() and not future.cancelled()


def _entered(report, label, task, futures) -> dict[str, dict[str, Callable]]:
    """The timers of all contenders with the right answer, {"forward" or "backward": {name: timer}}."""
    timers, expected = {"forward": {}, "backward": {}}, _expected(task)
    for name, future in futures.items():
        try:
            if not _is_ready(future):
                raise UserError("it was not compiled in time")
            answers, seconds = future.result()
            answers = answers() if callable(answers) else answers
            error = max(_error_of_part(jnp.asarray(x), y) for x, y in zip(answers, expected))
            if not error <= 8 * UNIT["bfloat16"]:  # eight roundings, as in `check`; one key too many of 257 gives 0.06
                raise ValueError(f"its answer has an error of {error:.1e}")
        except Exception as error:  # peers fail in their own ways
            why = f"{name} is left out of {label}: {commands.one_line(error)}"
            is_known = "RESOURCE_EXHAUSTED" in str(error) or isinstance(error, UserError)
            if name.startswith("attnlab") and not is_known:
                report.fail(why)
            else:
                print(why, flush=True)
            continue
        timers["forward"][name] = functools.partial(seconds, "forward")
        if len(answers) == len(expected):
            timers["backward"][name] = functools.partial(seconds, "backward")
    return timers


def _error_of_part(answer, expected) -> float:
    """The error of an answer for the first examples and heads."""
    return peers.relative_error(answer, expected[: answer.shape[0], :, : answer.shape[2]])


def _record(report, task, label, which, seconds) -> None:
    """Add a benchmark's row and figures."""
    _, length, _, head_dim = task.q.shape
    terms = peers.mask_of(task, task.ids), peers.mod_of(task)
    ours = f"attnlab {attnlab.explain(task.q, task.k, task.v, *terms).backend}"
    row, flops = report.rows.setdefault(label, {}), flops_of(task, which)
    key = f"{task.mask}_t{length}_d{head_dim}_{which}".replace(" ", "_")
    if ours in seconds:
        medians = {name: statistics.median(taken) for name, taken in seconds.items()}
        report.figures[f"over_best_{key}"] = medians[ours] / min(medians.values())
    for name, taken in seconds.items():
        ratio = tables.ratio(seconds, name, ours) if ours in seconds else None
        median, called = statistics.median(taken), _KEYS.get(name, name.replace(" ", "_"))
        row[name] = f"{1e3 * median:.3f}" + (f" ({ratio:.2f})" if ratio else "") + f" {flops / median / 1e12:.3g}"
        report.figures.update({f"ms_{key}_{called}": 1e3 * median, f"tflops_{key}_{called}": flops / median / 1e12})
        if len(taken) > 1:
            report.figures[f"spread_{key}_{called}"] = (max(taken) - min(taken)) / median
        if name in _KEYS and ratio:
            report.figures[f"ratio_{key}_vs_{called}"] = ratio


def _expected(task) -> list:
    """The answers in float32: from the specification, or for long sequences from "blockwise", which `check` tests."""
    exact = task._replace(**{name: getattr(task, name).astype(jnp.float32) for name in ("q", "k", "v", "d_out")})
    with jax.default_matmul_precision("highest"):
        return _answers(peers.ours("blockwise" if "dense" in _too_slow(task) else "dense", exact))


def _too_slow(task) -> list[str]:
    """The backends that are too slow, or take too much memory, at the task's length."""
    return [name for name, most in (("dense", 1024), ("blockwise", 4096)) if task.q.shape[1] > most]


def _contenders(label, task, torch, folder) -> dict[str, Callable]:
    """By name, functions that return (answers, seconds).

    answers: float arrays `[B, T, H, D]`: the output, and the gradients of q, k and v if there is a backward pass.
    seconds(which, calls): the time of this number of calls of "forward" or "backward".
    """
    available = [name for name in BACKENDS if not _reason_against(name, task)]
    available = [name for name in available if name not in _too_slow(task)]
    contenders = {f"attnlab {name}": functools.partial(_ready, peers.ours, name, task) for name in available}
    attend = jax.nn.dot_product_attention
    if jax.default_backend() == "gpu":
        attend = functools.partial(attend, implementation="cudnn")
    contenders["jax.nn"] = functools.partial(_ready, peers.jax_nn, task, attend)
    if torch:
        _save(task, folder)
        subdir = folder / label
        subdir.mkdir()
        contenders |= {name: functools.partial(_ready_in_torch, torch, name, task, folder, subdir) for name in _TORCH}
    return contenders


def _save(task, folder) -> None:
    """Save the inputs of a task, which all tasks share in different shapes, and its ids."""
    for name in ("q", "k", "v", "d_out"):
        if not (folder / f"{name}.npy").exists():
            np.save(folder / f"{name}.npy", np.asarray(getattr(task, name).astype(jnp.float32)))
    np.save(folder / f"{task.q.shape[1]}.npy", np.asarray(task.ids))


def _ready(make, *arguments):
    contender = make(*arguments)
    contender.compile()

    def seconds(which, calls):
        call = getattr(contender, which)

        def queued(calls):
            start = time.perf_counter()
            for _ in range(calls):
                out = call()
            jax.block_until_ready(out)  # a device runs calls in order
            return time.perf_counter() - start

        return _alone(queued, calls)

    return functools.partial(_answers, contender), seconds


def _alone(queued: Callable, calls: int) -> float:
    """The time of queued calls; on a GPU, without the time to start and to end a queue."""
    return queued(2 * calls) - queued(calls) if jax.default_backend() == "gpu" else queued(calls)


def _ready_in_torch(start, name, task, folder, subdir):
    worker = start(subdir / f"{name}.log")
    options = {"mask": task.mask, "window": task.window, "dtype": "bfloat16", "shape": task.q.shape}
    worker.ask("take", folder=str(folder), **options)
    (subdir / name).mkdir()
    count = worker.ask("enter", name=name, folder=str(subdir / name))["answers"]

    def seconds(which, calls):
        return _alone(lambda calls: worker.ask("seconds", name=name, which=which, calls=calls)["seconds"], calls)

    return [np.load(subdir / name / f"{at}.npy") for at in range(count)], seconds


def flops_of(task: peers.Task, which: str) -> float:
    """FLOPs of the visible pairs: q·k and p·v forward; "backward" adds the same scores again, do·v, dq, dk and dv."""
    batch, length, heads, head_dim = task.q.shape
    index, ids = np.arange(length), np.asarray(task.ids[0])
    first = {"window": np.maximum(0, index - task.window), "documents": np.searchsorted(ids, ids)}
    pairs = int((index - first.get(task.mask, 0) + 1).sum())
    return 2.0 * head_dim * batch * heads * pairs * (2 if which == "forward" else 7)
