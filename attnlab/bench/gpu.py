"""All that a GPU is asked: is the operator right there, how fast is it, and how fast does GPT-2 (124M) train.

python -m attnlab.bench gpu [--peer_path=nanoGPT] [--peer_python=torch/bin/python] [--json=gpu.json] [--peak_tflops=989]

Checks come first: every backend against the specification in float64, outputs and gradients; one that fails is WRONG
in the table, and the exit code is 1. Then training against nanoGPT by its own recipe for GPUs (compiled, bfloat16), on
random tokens, as time does not depend on the text; last the operator in bfloat16, against jax.nn and torch (SDPA,
FlexAttention). A ratio above 1 in the figures says that attnlab is the faster.

FLOPs are those that have to be done: of the visible pairs, two products forward and five more backward, as is usual
for flash attention; of training, 6 a parameter and 12·layers·width·context a token, as nanoGPT counts them.
On a CPU everything is small, and shows that it works. torch is taken from --peer_python, or from this Python.
"""

import contextlib
import datetime
import functools
import importlib.util
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import attnlab
from attnlab import commands
from attnlab.bench import peers, timing, workers
from attnlab.config import nearest
from attnlab.errors import UserError

MASKS = ("causal", "window", "documents")
UNIT = {"bfloat16": 2.0**-8, "float32": 2.0**-24}  # of a value, what rounding takes from it at most
BACKENDS = ("dense", "blockwise", "cudnn")  # the specification first
DOCUMENTS = 12  # in a row, whose ends are not those of tiles
CAPTION = (
    "checks: largest error over what is allowed; operator: ms a call (× what attnlab chooses by itself), TFLOP/s; "
    "training: ms a step, tokens/s"
)

# What is raced where a flag says nothing. Each length has `tokens` in all, and heads of `width` features in all, as in
# the papers on flash attention; a `window` is of so many keys before a query; `block` is the seconds of a turn.
_GPU = {
    "flags": {"lengths": ["1024", "4096", "16384"], "head_dims": ["64", "128"], "rounds": 7, "batch": 16},
    "tokens": 16384,
    "window": 256,
    "width": 2048,
    "block": 0.05,
    "check_length": 1024,
    "train": "gpt2",
    "size": {"num_layers": 12, "num_heads": 12, "width": 768, "context": 1024},
    "vocab_size": 50304,
    "train_block": 3.0,
}
_CPU = {
    "flags": {"lengths": ["64", "256"], "head_dims": ["64", "128"], "rounds": 2, "batch": 4},
    "tokens": 256,
    "window": 40,
    "width": 128,
    "block": 0.0,
    "check_length": 192,
    "train": "tiny",
    "size": {"num_layers": 2, "num_heads": 2, "width": 64, "context": 64},
    "vocab_size": 256,
    "train_block": 0.2,
}
_TORCH = {"torch SDPA": "sdpa", "torch FlexAttention": "flex"}
_KEYS = {"jax.nn": "jax_nn"} | _TORCH  # how figures call the peers


class Report(NamedTuple):
    """What has been found.

    Attributes:
      rows: the table, cells by row and column.
      figures: for JSON, flat.
      wrong: a line for each of attnlab's answers that is not what it should be.
    """

    rows: dict[str, dict[str, str]]
    figures: dict
    wrong: list[str]

    def fail(self, line: str) -> None:
        """Notes and prints what is wrong."""
        self.wrong.append(line)
        print(f"WRONG: {line}", flush=True)


def define(values, argv) -> None:
    """The flags."""
    whole = {"lengths": "sequence lengths", "head_dims": "features a head"}
    for name, meaning in whole.items():
        flags.DEFINE_list(name, None, f"{meaning}; on a GPU {','.join(_GPU['flags'][name])}", flag_values=values)
    flags.DEFINE_list("masks", list(MASKS), "of " + ", ".join(MASKS), flag_values=values)
    whole = {"rounds": "counted blocks of each contender", "batch": "sequences a step of training"}
    for name, meaning in whole.items():
        flags.DEFINE_integer(name, None, f"{meaning}; on a GPU {_GPU['flags'][name]}", flag_values=values)
    flags.DEFINE_bool("train", True, "race training as well", flag_values=values)
    flags.DEFINE_string("peer_path", None, "a checkout of nanoGPT; without it attnlab trains alone", flag_values=values)
    flags.DEFINE_string("peer_python", None, "a Python that has torch; this one when left out", flag_values=values)
    flags.DEFINE_float("peak_tflops", None, "of the device in bfloat16, for the share of it used", flag_values=values)
    flags.DEFINE_string("json", None, "a new file for the figures", flag_values=values)


def main(values) -> int:
    """Checks, races, prints the table; 1 if an answer is wrong."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else JAX takes the memory that peers need
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # one for each
    here = _GPU if jax.default_backend() == "gpu" else _CPU
    lengths, head_dims = _checked(values, here)
    device = jax.devices()[0].device_kind
    facts = {"device": device, "date": datetime.date.today().isoformat(), "jax": jax.__version__}
    report, python = Report({}, facts | {"rounds": values.rounds}, []), values.peer_python or sys.executable
    print(f"{device}, JAX {jax.__version__}")
    if here is _CPU:
        print("no GPU is here: lengths, batch and GPT are small, and nanoGPT is not compiled")
    with tempfile.TemporaryDirectory(prefix="attnlab-gpu-") as folder, _torch(values, folder, report, python) as torch:
        try:
            _check(report, values.masks, head_dims, here["check_length"], here["window"])
            if values.train:  # before the operator's race: what memory JAX has once taken it keeps
                _train(report, values, here, python)
            for head_dim, length in itertools.product(head_dims, lengths):
                _race(report, values, here, torch, folder, head_dim, length)
        finally:
            if values.json:
                with open(values.json, "x", encoding="utf-8") as file:
                    file.write(json.dumps(report.figures | {"wrong": report.wrong}, indent=1) + "\n")
    timing.table(f"{device}, {facts['date']}, JAX {jax.__version__}", report.rows, CAPTION)
    for line in report.wrong:
        print(f"WRONG: {line}")
    return int(bool(report.wrong))


def _checked(values, here) -> tuple[list[int], list[int]]:
    for name, default in here["flags"].items():
        if values[name].value is None:
            values[name].value = default
    whole = {}
    for name in ("lengths", "head_dims"):
        given = values[name].value
        if not given or not all(n.isdecimal() and int(n) >= 1 for n in given):
            raise UserError(f"--{name}={','.join(given)}: expected whole numbers of 1 or more, e.g. 64,128")
        whole[name] = [int(n) for n in given]
    for name in ("rounds", "batch"):
        if values[name].value < 1:
            raise UserError(f"--{name}={values[name].value}: expected 1 or more")
    for name in values.masks or [""]:
        if name not in MASKS:
            raise UserError(f"--masks: {name!r} is unknown{nearest(name, MASKS)}: use {', '.join(MASKS)}")
    if values.peak_tflops is not None and not 0 < values.peak_tflops < float("inf"):
        raise UserError(f"--peak_tflops={values.peak_tflops}: expected more than 0, e.g. 989")
    if values.peer_path and not (Path(values.peer_path) / "model.py").is_file():
        raise UserError(f"--peer_path={values.peer_path} holds no model.py: name a checkout of nanoGPT")
    if values.peer_path and not values.peer_python and not importlib.util.find_spec("torch"):
        raise UserError(f"--peer_path={values.peer_path} needs torch: name a Python that has it by --peer_python")
    path = values.json and Path(values.json)
    if path and (path.exists() or not path.parent.is_dir()):
        raise UserError(
            f"--json={path} {'is there already' if path.exists() else 'lies in no folder'}: name a new file"
        )
    return whole["lengths"], whole["head_dims"]


@contextlib.contextmanager
def _torch(values, folder, report, python):
    """torch in a process of its own, whose libraries of CUDA are its own; None where there is none."""
    if not values.peer_python and not importlib.util.find_spec("torch"):
        print("not here: torch, nanoGPT: torch is not installed; --peer_python names a Python that has it")
        yield None
        return
    worker = workers.Worker([python, str(Path(__file__).with_name("torchattention.py"))], Path(folder) / "torch.log")
    with contextlib.closing(worker):
        try:
            found = _asked(worker, "start", device="cuda" if jax.default_backend() == "gpu" else "cpu")
        except RuntimeError as error:
            raise UserError(f"{python}: {error}: name a Python by --peer_python whose torch does") from error
        print(f"torch {found['torch']} on {found['device']}")
        report.figures["torch"] = found["torch"]
        yield worker


def _asked(worker, what, **request):
    answer = worker.ask(what, **request)
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer


# --- Checks ----------------------------------------------------------------------------------------------------------


def _check(report, masks, head_dims, length, window):
    """Each backend against the specification in float64, on the same inputs.

    The error of an array is that of the whole, ‖x − x*‖ / ‖x*‖. On the way from the inputs to a gradient a value is
    rounded at most eight times (q·scale, s, p, o, do·v, δ, ds, and the result), each time by u of its size at most,
    and as scores are of the size of 1 none of it is amplified: the specification itself, in the type of the inputs,
    may be off by 8u, and by √T·2⁻²⁴ for the sums, whose float32 roundings are T at most and add up as their squares
    do. Whatever else has the same type rounds no more often, in another order and at other places: it is allowed
    three times what the specification was off by. Products of float32 are of float32 here: TF32, by which GPUs multiply
    it unless told otherwise, would hide what is to be seen.
    """
    for mask, head_dim, dtype in itertools.product(masks, head_dims, ("bfloat16", "float32")):
        label = f"check {mask}, D = {head_dim}, {dtype}"
        task = _task(mask, 2, length, 4, head_dim, dtype, window)
        with jax.enable_x64(True):
            wide = [np.asarray(x, np.float64) for x in (task.q, task.k, task.v, task.d_out)]
            right = [np.asarray(x) for x in _answers(peers.ours("dense", task._replace(**_named(wide))))]
        allowed = np.full(4, 8 * UNIT[dtype] + length**0.5 * UNIT["float32"])
        row = report.rows.setdefault(label, {})
        for name in BACKENDS:
            key = f"check_{name}_{mask}_d{head_dim}_{dtype}"
            if reason := _reason_against(name, task):
                print(f"{label}: attnlab {name} is not here: {reason}")
                row[f"attnlab {name}"], report.figures[key] = "not here", f"not here: {reason}"
                continue
            try:
                with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
                    answers = _answers(peers.ours(name, task))
                errors = np.array([_error(np.asarray(x), y) for x, y in zip(answers, right)])
            except Exception as error:  # a check that fails is a finding, whatever it fails with
                report.fail(f"{label}: attnlab {name} failed ({type(error).__name__}: {commands.one_line(error)})")
                row[f"attnlab {name}"] = report.figures[key] = "WRONG"
                continue
            share = float((errors / allowed).max())  # NaN if one of them is
            told = ", ".join(f"{what} {error:.1e}" for what, error in zip(("out", "dq", "dk", "dv"), errors))
            told = f"{label}: attnlab {name} is off by {told}; allowed {allowed.min():.1e}"
            if share <= 1:
                print(told, flush=True)
                row[f"attnlab {name}"], report.figures[key] = f"{share:.2f} ok", "ok"
            else:
                report.fail(told)
                row[f"attnlab {name}"], report.figures[key] = f"{share:.2g} WRONG", "WRONG"
            report.figures[f"error_{key.removeprefix('check_')}"] = float(errors.max())
            if name == "dense" and share <= 1:
                allowed = 3 * errors


def _error(x, right) -> float:
    """‖x − x*‖ / ‖x*‖, in the type of x*."""
    off = x.astype(right.dtype) - right
    return float(((off * off).sum() / (right * right).sum()) ** 0.5)


def _answers(contender) -> list:
    return [contender.forward(), *contender.backward()]


def _reason_against(name, task) -> str | None:
    arguments = task.q, task.k, task.v, peers.mask_of(task, task.ids)
    try:
        attnlab.explain(*arguments, impl=name)
    except ValueError:
        return attnlab.explain(*arguments).rejected[name]
    return None


def _task(mask, batch, length, heads, head_dim, dtype, window) -> peers.Task:
    arrays = jax.random.normal(jax.random.key(0), (4, batch, length, heads, head_dim)).astype(dtype)
    ids = jnp.broadcast_to(jnp.arange(length) * DOCUMENTS // length, (batch, length))
    return peers.Task(mask, *arrays, window, ids.astype(jnp.int32))


def _named(arrays) -> dict:
    return dict(zip(("q", "k", "v", "d_out"), arrays))


# --- Training --------------------------------------------------------------------------------------------------------


def _train(report, values, here, python):
    """Steps of the same model, in turns; nanoGPT, where it cannot start or go on, is left out."""
    name, size, vocab_size = here["train"], here["size"] | {"batch_size": values.batch}, here["vocab_size"]
    device = "cuda" if here is _GPU else "cpu"
    alone = {"attnlab": {"peer": False, "precision": "bfloat16"}}
    # nanoGPT's recipe for GPUs compiles, and logs the loss every tenth step.
    peer = {"peer": True, "compiled": here is _GPU, "device": device, "bfloat16": True, "log_every": 10}
    if not values.peer_path:
        print("not here: nanoGPT: --peer_path names a checkout of it")
    tokens = np.random.default_rng(0).integers(vocab_size, size=2**20)
    for contenders in [alone | {"nanoGPT": peer}, alone] if values.peer_path else [alone]:
        try:
            with workers.started(contenders, size, values.peer_path, python, tokens, vocab_size) as racing:
                timers = {name: functools.partial(_seconds_of_training, worker) for name, worker in racing.items()}
                seconds = _alternate(timers, values.rounds, here["train_block"])
            break
        except UserError as error:
            print(f"training of {' and '.join(contenders)} failed: {error}", flush=True)
    else:
        report.fail(f"training {name} failed")
        return
    print(timing.line(f"train {name}", seconds), flush=True)
    depth, width, context = size["num_layers"], size["width"], size["context"]
    flops = 6 * (12 * depth * width**2 + vocab_size * width) + 12 * depth * width * context
    row = report.rows[f"train {name}, bfloat16, B = {values.batch}"] = {}
    for contender, taken in seconds.items():
        key, rate = f"train_{name}_bfloat16_{contender.lower()}", values.batch * context / statistics.median(taken)
        report.figures[f"ms_{key}"], report.figures[f"tokens_per_second_{key}"] = 1e3 * statistics.median(taken), rate
        row[contender] = f"{1e3 * statistics.median(taken):.1f} ({timing.ratio(seconds, contender, 'attnlab'):.2f})"
        row[contender] += f" {rate:,.0f}/s"
        if values.peak_tflops:
            report.figures[f"mfu_{key}"] = rate * flops / (1e12 * values.peak_tflops)
            row[contender] += f" {100 * report.figures[f'mfu_{key}']:.1f} %"
    if "nanoGPT" in seconds:
        report.figures[f"ratio_train_{name}_bfloat16"] = timing.ratio(seconds, "nanoGPT", "attnlab")


def _seconds_of_training(worker, steps):
    return worker.ask("train", steps=steps)["seconds"]


# --- The operator ----------------------------------------------------------------------------------------------------


def _race(report, values, here, torch, folder, head_dim, length):
    """All masks of a length: forward, and forward with backward, of all who give the right answer."""
    batch, heads = max(1, here["tokens"] // length), max(1, here["width"] // head_dim)
    for mask in values.masks:
        label = f"{mask}, T = {length:,}, D = {head_dim}"
        try:
            task = _task(mask, batch, length, heads, head_dim, "bfloat16", here["window"])
            for what, timers in _entered(report, label, task, torch, folder).items():
                seconds = _alternate(timers, values.rounds, here["block"])
                row = f"{label}, {'forward' if what == 'forward' else 'forward + backward'}"
                print(timing.line(row, seconds), flush=True)
                _note(report, task, row, what, seconds)
        except Exception as error:  # the other races are to go on, whatever it is
            report.fail(f"{label} failed ({type(error).__name__}: {commands.one_line(error)})")


def _entered(report, label, task, torch, folder) -> dict:
    """By "forward" and "backward", then by name, what tells the seconds of so many calls."""
    timers, right = {"forward": {}, "backward": {}}, _right(task)
    for name, enter in _entering(label, task, torch, folder).items():
        try:
            answers, seconds = enter()
            error = max(_error(jnp.asarray(x), y) for x, y in zip(answers, right))
            if not error <= 8 * UNIT["bfloat16"]:  # eight roundings, as in `_check`; of 257 keys one more is 0.06
                raise ValueError(f"its answer is off by {error:.1e}")
        except Exception as error:  # whatever a peer fails with
            why = f"{name} is left out of {label}: {commands.one_line(error)}"
            if name.startswith("attnlab") and "RESOURCE_EXHAUSTED" not in str(error):
                report.fail(why)
            else:
                print(why, flush=True)
            continue
        timers["forward"][name] = functools.partial(seconds, "forward")
        if len(answers) == len(right):
            timers["backward"][name] = functools.partial(seconds, "backward")
    return timers


def _note(report, task, label, what, seconds):
    """Into the table's row and the figures."""
    _, length, _, head_dim = task.q.shape
    ours = f"attnlab {attnlab.explain(task.q, task.k, task.v, peers.mask_of(task, task.ids)).backend}"
    row, flops = report.rows.setdefault(label, {}), _flops(task, what)
    for name, taken in seconds.items():
        ratio = timing.ratio(seconds, name, ours) if ours in seconds else None
        median, called = statistics.median(taken), _KEYS.get(name, name.replace(" ", "_"))
        row[name] = f"{1e3 * median:.3f}" + (f" ({ratio:.2f})" if ratio else "") + f" {flops / median / 1e12:.3g}"
        key = f"{task.mask}_t{length}_d{head_dim}_{what}"
        report.figures.update({f"ms_{key}_{called}": 1e3 * median, f"tflops_{key}_{called}": flops / median / 1e12})
        if name in _KEYS and ratio:
            report.figures[f"ratio_{key}_vs_{called}"] = ratio


def _right(task):
    """The answers in float32, by the specification where its scores fit."""
    exact = task._replace(**{name: getattr(task, name).astype(jnp.float32) for name in ("q", "k", "v", "d_out")})
    with jax.default_matmul_precision("highest"):
        return _answers(peers.ours("dense" if _dense_fits(task) else "blockwise", exact))


def _dense_fits(task) -> bool:
    """Whether some six arrays of float32 scores do: those that the specification and its gradient hold at once."""
    batch, length, heads, _ = task.q.shape
    memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 2**32)
    return 6 * 4 * batch * heads * length**2 <= memory


def _entering(label, task, torch, folder) -> dict:
    """By name what returns (answers, seconds): float arrays `[B, T, H, D]`, the output and the gradients of q, k and v
    where there are any; and `seconds(what, calls)` of so many calls of "forward" or "backward"."""
    able = [name for name in BACKENDS if not _reason_against(name, task)]
    if not _dense_fits(task):
        able.remove("dense")
    entering = {f"attnlab {name}": functools.partial(_ready, peers.ours, name, task) for name in able}
    if jax.default_backend() == "gpu":
        attend = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
        entering["jax.nn"] = functools.partial(_ready, peers.jax_nn, task, attend)
    else:
        entering["jax.nn"] = functools.partial(_ready, peers.jax_nn, task)
    if torch:
        for name in ("q", "k", "v", "d_out"):
            np.save(Path(folder) / f"{name}.npy", np.asarray(getattr(task, name).astype(jnp.float32)))
        np.save(Path(folder) / "ids.npy", np.asarray(task.ids))
        try:
            _asked(torch, "take", folder=folder, mask=task.mask, window=task.window, dtype="bfloat16")
            entering |= {name: functools.partial(_ready_in_torch, torch, name, folder) for name in _TORCH}
        except (RuntimeError, UserError) as error:
            print(f"torch is left out of {label}: {commands.one_line(error)}", flush=True)
    return entering


def _ready(make, *arguments):
    contender = make(*arguments)

    def seconds(what, calls):
        call = getattr(contender, what)
        start = time.perf_counter()
        for _ in range(calls):
            out = call()
        jax.block_until_ready(out)  # a device computes in the order in which it was asked
        return time.perf_counter() - start

    return _answers(contender), seconds


def _ready_in_torch(worker, name, folder):
    count = _asked(worker, "enter", name=name, folder=folder)["answers"]

    def seconds(what, calls):
        return _asked(worker, "seconds", name=name, which=what, calls=calls)["seconds"]

    return [np.load(Path(folder) / f"{at}.npy") for at in range(count)], seconds


def _alternate(timers, rounds, block) -> dict[str, list[float]]:
    """Seconds a call, A B C A B C …; `timers` tell those of so many calls, and each turn takes about `block` seconds.

    On a GPU a call may take less than looking at the clock and waiting does: hence many calls a turn.
    """
    calls, seconds = {}, {name: [] for name in timers}
    for name, timer in timers.items():
        timer(3)  # compiles, where that is still to be done
        calls[name] = min(1000, max(1, round(3 * block / timer(3))))
    for _ in range(rounds):
        for name, timer in timers.items():
            seconds[name].append(timer(calls[name]) / calls[name])
    return seconds


def _flops(task, what) -> float:
    """Of the visible pairs: q·k and p·v forward; backward these scores again, do·v, and dq, dk and dv."""
    batch, length, heads, head_dim = task.q.shape
    row, ids = np.arange(length), np.asarray(task.ids[0])
    first = {"causal": 0, "window": np.maximum(0, row - task.window), "documents": np.searchsorted(ids, ids)}
    pairs = int((row - first[task.mask] + 1).sum())
    return 2.0 * head_dim * batch * heads * pairs * (2 if what == "forward" else 7)
