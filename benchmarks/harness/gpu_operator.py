"""The operator on the device of `bench gpu`: correctness against the specification, speed against jax.nn and torch."""

import functools
import itertools
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

from . import peers, tables, workers
from .peers import UNIT

BACKENDS = ("dense", "blockwise", "cudnn")  # the specification first
DOCUMENTS = 12  # in a sequence; their ends do not coincide with those of tiles
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
    """Random inputs of a type."""
    arrays = jax.random.normal(jax.random.key(0), (4, batch, length, heads, head_dim)).astype(dtype)
    return peers.task(mask, arrays, window, DOCUMENTS)


def alternate(timers: dict[str, Callable], rounds: int, block: float) -> dict[str, list[float]]:
    """Time contenders in alternation: A B C A B C …

    On a GPU a call may take less time than reading the clock and waiting for the device: hence blocks of calls.

    Args:
      timers: functions of a number of calls; they return the seconds that these took.
      rounds: timed blocks of each.
      block: seconds a block, about.

    Returns:
      Seconds a call in each round, by contender.
    """
    calls, seconds = {}, {name: [] for name in timers}
    for name, timer in timers.items():
        timer(3)  # compiles, if that is still to be done
        calls[name] = min(1000, max(1, round(3 * block / timer(3))))
    for _ in range(rounds):
        for name, timer in timers.items():
            seconds[name].append(timer(calls[name]) / calls[name])
    return seconds


# --- Correctness -----------------------------------------------------------------------------------------------------


def check(report: Report, masks, head_dims, length: int, window: int) -> None:
    """Compare every backend with the specification in float64 on the same inputs: outputs and gradients.

    The error of an array is ‖x − x*‖ / ‖x*‖. Between the inputs and a gradient a value is rounded at most eight times
    (q·scale, s, p, o, do·v, δ, ds, and the result), each time with a relative error of at most u, and as scores are of
    order 1 nothing amplifies these errors. So the dense backend in the inputs' type may have an error of 8u, plus
    √T·2⁻²⁴ for the sums, whose at most T float32 roundings add up in quadrature. Another backend of the same type
    rounds no more often, but in another order and at other places: its error may be three times the dense backend's.
    Products of float32 are computed in float32: TF32, the default on GPUs, would hide what is to be checked.
    """
    for mask, head_dim, dtype in itertools.product(masks, head_dims, ("bfloat16", "float32")):
        label = f"check {mask}, D = {head_dim}, {dtype}"
        task = make_task(mask, 2, length, 4, head_dim, dtype, window)
        with jax.enable_x64(True):
            wide = {name: np.asarray(getattr(task, name), np.float64) for name in ("q", "k", "v", "d_out")}
            expected = [np.asarray(x) for x in _answers(peers.ours("dense", task._replace(**wide)))]
        allowed = np.full(4, 8 * UNIT[dtype] + length**0.5 * UNIT["float32"])
        row = report.rows.setdefault(label, {})
        for name in BACKENDS:
            key = f"{name}_{mask}_d{head_dim}_{dtype}"
            verdict, errors = _check_backend(report, label, name, task, expected, allowed)
            report.figures[f"check_{key}"] = verdict
            row[f"attnlab {name}"] = verdict.partition(":")[0]
            if errors is not None:
                report.figures[f"error_{key}"] = float(errors.max())
                row[f"attnlab {name}"] = f"{float((errors / allowed).max()):.2g} {verdict}"
            if name == "dense" and verdict == "ok":
                allowed = 3 * errors


def _check_backend(report, label, name, task, expected, allowed) -> tuple[str, np.ndarray | None]:
    """("ok", "WRONG" or "not available: REASON"), and the errors of out, dq, dk and dv, if it has answers."""
    if reason := _reason_against(name, task):
        print(f"{label}: attnlab {name} is not available: {reason}")
        return f"not available: {reason}", None
    try:
        with jax.default_matmul_precision("highest" if task.q.dtype == jnp.float32 else "default"):
            answers = _answers(peers.ours(name, task))
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
    arguments = task.q, task.k, task.v, peers.mask_of(task, task.ids)
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
      tokens: in all sequences; sets the batch size.
      width: features in all heads; sets the number of heads.
      window: keys before each query, for the window mask.
    """

    head_dim: int
    length: int
    tokens: int
    width: int
    window: int


def race(report: Report, masks, sizes: Sizes, rounds: int, block: float, torch: workers.Worker | None, folder) -> None:
    """Time every contender with the right answer, under each mask: forward, and forward + backward.

    Args:
      report: gets rows and figures.
      masks: names of masks.
      sizes: of the inputs.
      rounds: timed blocks of each contender.
      block: seconds a block, about.
      torch: a process of `torchattention.py`, or None.
      folder: for the arrays exchanged with it.
    """
    batch, heads = max(1, sizes.tokens // sizes.length), max(1, sizes.width // sizes.head_dim)
    for mask in masks:
        label = f"{mask}, T = {sizes.length:,}, D = {sizes.head_dim}"
        try:
            task = make_task(mask, batch, sizes.length, heads, sizes.head_dim, "bfloat16", sizes.window)
            for which, timers in _entered(report, label, task, torch, folder).items():
                seconds = alternate(timers, rounds, block)
                row = f"{label}, {PASSES[which]}"
                print(tables.line(row, seconds), flush=True)
                _record(report, task, row, which, seconds)
        except Exception as error:  # the other benchmarks must go on
            report.fail(f"{label} failed ({type(error).__name__}: {commands.one_line(error)})")


def _entered(report, label, task, torch, folder) -> dict[str, dict[str, Callable]]:
    """The timers of all contenders with the right answer, {"forward" or "backward": {name: timer}}."""
    timers, expected = {"forward": {}, "backward": {}}, _expected(task)
    for name, prepare in _contenders(label, task, torch, folder).items():
        try:
            answers, seconds = prepare()
            error = max(peers.relative_error(jnp.asarray(x), y) for x, y in zip(answers, expected))
            if not error <= 8 * UNIT["bfloat16"]:  # eight roundings, as in `check`; one key too many of 257 gives 0.06
                raise ValueError(f"its answer has an error of {error:.1e}")
        except Exception as error:  # peers fail in their own ways
            why = f"{name} is left out of {label}: {commands.one_line(error)}"
            if name.startswith("attnlab") and "RESOURCE_EXHAUSTED" not in str(error):
                report.fail(why)
            else:
                print(why, flush=True)
            continue
        timers["forward"][name] = functools.partial(seconds, "forward")
        if len(answers) == len(expected):
            timers["backward"][name] = functools.partial(seconds, "backward")
    return timers


def _record(report, task, label, which, seconds) -> None:
    """Add a benchmark's row and figures."""
    _, length, _, head_dim = task.q.shape
    ours = f"attnlab {attnlab.explain(task.q, task.k, task.v, peers.mask_of(task, task.ids)).backend}"
    row, flops = report.rows.setdefault(label, {}), flops_of(task, which)
    for name, taken in seconds.items():
        ratio = tables.ratio(seconds, name, ours) if ours in seconds else None
        median, called = statistics.median(taken), _KEYS.get(name, name.replace(" ", "_"))
        row[name] = f"{1e3 * median:.3f}" + (f" ({ratio:.2f})" if ratio else "") + f" {flops / median / 1e12:.3g}"
        key = f"{task.mask}_t{length}_d{head_dim}_{which}"
        report.figures.update({f"ms_{key}_{called}": 1e3 * median, f"tflops_{key}_{called}": flops / median / 1e12})
        if name in _KEYS and ratio:
            report.figures[f"ratio_{key}_vs_{called}"] = ratio


def _expected(task) -> list:
    """The answers in float32, by the specification if its scores fit into memory."""
    exact = task._replace(**{name: getattr(task, name).astype(jnp.float32) for name in ("q", "k", "v", "d_out")})
    with jax.default_matmul_precision("highest"):
        return _answers(peers.ours("dense" if _dense_fits(task) else "blockwise", exact))


def _dense_fits(task) -> bool:
    """Whether six arrays of float32 scores fit: about what the specification and its gradient hold at once."""
    batch, length, heads, _ = task.q.shape
    memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 2**32)
    return 6 * 4 * batch * heads * length**2 <= memory


def _contenders(label, task, torch, folder) -> dict[str, Callable]:
    """By name, functions that return (answers, seconds).

    answers: float arrays `[B, T, H, D]`: the output, and the gradients of q, k and v if there is a backward pass.
    seconds(which, calls): the time of so many calls of "forward" or "backward".
    """
    available = [name for name in BACKENDS if not _reason_against(name, task)]
    if not _dense_fits(task):
        available.remove("dense")
    contenders = {f"attnlab {name}": functools.partial(_ready, peers.ours, name, task) for name in available}
    attend = jax.nn.dot_product_attention
    if jax.default_backend() == "gpu":
        attend = functools.partial(attend, implementation="cudnn")
    contenders["jax.nn"] = functools.partial(_ready, peers.jax_nn, task, attend)
    if torch:
        for name in ("q", "k", "v", "d_out"):
            np.save(Path(folder) / f"{name}.npy", np.asarray(getattr(task, name).astype(jnp.float32)))
        np.save(Path(folder) / "ids.npy", np.asarray(task.ids))
        try:
            torch.ask("take", folder=folder, mask=task.mask, window=task.window, dtype="bfloat16")
            contenders |= {name: functools.partial(_ready_in_torch, torch, name, folder) for name in _TORCH}
        except UserError as error:
            print(f"torch is left out of {label}: {commands.one_line(error)}", flush=True)
    return contenders


def _ready(make, *arguments):
    contender = make(*arguments)

    def seconds(which, calls):
        call = getattr(contender, which)
        start = time.perf_counter()
        for _ in range(calls):
            out = call()
        jax.block_until_ready(out)  # a device runs calls in order
        return time.perf_counter() - start

    return _answers(contender), seconds


def _ready_in_torch(worker, name, folder):
    count = worker.ask("enter", name=name, folder=folder)["answers"]

    def seconds(which, calls):
        return worker.ask("seconds", name=name, which=which, calls=calls)["seconds"]

    return [np.load(Path(folder) / f"{at}.npy") for at in range(count)], seconds


def flops_of(task: peers.Task, which: str) -> float:
    """FLOPs of the visible pairs: q·k and p·v forward; "backward" adds the same scores again, do·v, dq, dk and dv."""
    batch, length, heads, head_dim = task.q.shape
    index, ids = np.arange(length), np.asarray(task.ids[0])
    first = {"causal": 0, "window": np.maximum(0, index - task.window), "documents": np.searchsorted(ids, ids)}
    pairs = int((index - first[task.mask] + 1).sum())
    return 2.0 * head_dim * batch * heads * pairs * (2 if which == "forward" else 7)
