"""Benchmark a GPU: is the operator correct, how fast is it, and how fast does GPT-2 (124M) train?

    python -m attnlab.bench gpu [--seconds=300] [--record=docs/benchmarks] [--peer_path=nanoGPT]

1. Correctness: every backend against the specification in float64, outputs and gradients. A failure is WRONG in the
   table, and the exit code is 1.
2. Training in bfloat16, against nanoGPT by its own recipe for GPUs (compiled). The tokens are random, because the time
   does not depend on the text.
3. The operator in bfloat16, against jax.nn and torch (SDPA, FlexAttention).

Ratios above 1 in the figures mean that attnlab is faster. Only necessary FLOPs count. For the operator, these are two
matrix products forward and five more backward over the visible pairs, as usual for flash attention. For training, each
token takes 6 per parameter and 12·layers·width·context, as nanoGPT counts. Without a GPU all sizes are small.
"""

import contextlib
import datetime
import functools
import importlib.util
import itertools
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from absl import flags

from attnlab.support.errors import UserError

from .harness import gpu_operator, options, recording, tables, workers
from .harness.gpu_operator import Report

MASKS = ("causal", "window", "documents", "soft cap", "alibi")
CAPTION = (
    "checks: largest error over the allowed one; operator: ms a call (× attnlab's default backend), TFLOP/s; "
    "training: ms a step, tokens/s"
)

# Sizes, and the defaults of flags. A benchmark of the operator has `tokens` tokens in all its sequences and `width`
# features in all its heads, as in the papers on flash attention; the window mask keeps `window` keys before each query;
# a timed block of the operator lasts `block` seconds, one of training `train_block`.
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


def define(values, argv) -> None:
    """Define the flags."""
    lists = {"lengths": "sequence lengths", "head_dims": "features per head"}
    for name, meaning in lists.items():
        default = f"default on a GPU: {','.join(_GPU['flags'][name])}"
        flags.DEFINE_list(name, None, f"{meaning} ({default})", flag_values=values)
    options.define_choices(values, "masks", MASKS, "masks")
    integers = {"rounds": "timed blocks of each contender", "batch": "batch size of training"}
    options.define_integers(
        values, {name: (None, f"{text} (default on a GPU: {_GPU['flags'][name]})") for name, text in integers.items()}
    )
    flags.DEFINE_bool("train", True, "benchmark training as well", flag_values=values)
    options.define_peer(values, python=None)
    flags.DEFINE_float("peak_tflops", None, "the device's peak in bfloat16, to print the MFU", flag_values=values)
    flags.DEFINE_float("seconds", 300.0, "time limit; what is not timed by then is left out", flag_values=values)
    options.define_json(values)
    recording.define(values)


def main(values) -> int:
    """Check, benchmark, and print the table; 1 if a result is wrong."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # otherwise JAX takes the memory that peers need
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # one GPU for all
    deadline = time.monotonic() + values.seconds
    setup = _GPU if jax.default_backend() == "gpu" else _CPU
    lengths, head_dims = _checked(values, setup)
    device, date = jax.devices()[0].device_kind, datetime.date.today().isoformat()
    report = Report({}, {"device": device, "date": date, "jax": jax.__version__, "rounds": values.rounds}, [])
    print(f"{device}, JAX {jax.__version__}")
    if setup is _CPU:
        print("no GPU found: lengths, batch and model are small, and nanoGPT is not compiled")
    with tempfile.TemporaryDirectory(prefix="attnlab-gpu-") as folder, _torch(values, folder, report) as torch:
        try:
            gpu_operator.check(report, values.masks, head_dims, setup["check_length"], setup["window"])
            if values.train:  # before the operator: JAX does not return memory, which the peers need
                _train(report, values, setup)
            shape = [setup[name] for name in ("tokens", "width", "window")]
            sizes = [gpu_operator.Sizes(*size, *shape) for size in itertools.product(head_dims, lengths)]
            gpu_operator.race(report, values.masks, sizes, values.rounds, setup["block"], torch, folder, deadline)
        finally:
            options.keep(values.json, report.figures | {"wrong": report.wrong})
            recording.add(values, "gpu", _cases(report.figures))
    tables.table(f"{device}, {date}, JAX {jax.__version__}", report.rows, CAPTION)
    for line in report.wrong:
        print(f"WRONG: {line}")
    return int(bool(report.wrong))


def _cases(figures: dict) -> dict[str, dict]:
    """The figures as recorded: those of the checks, and the others."""
    is_check = {name: name.startswith(("check_", "error_")) for name in figures}
    return {
        case: {name: x for name, x in figures.items() if is_check[name] == (case == "checks")}
        for case in ("checks", "times")
    }


def _checked(values, setup) -> tuple[list[int], list[int]]:
    """The lengths and head sizes; sets the defaults of this device."""
    for name, default in setup["flags"].items():
        if values[name].value is None:
            values[name].value = default
    lengths, head_dims = (options.whole_numbers(values, name) for name in ("lengths", "head_dims"))
    options.check_positive(values, "rounds", "batch", "seconds")
    options.check_known("masks", values.masks, MASKS)
    if values.peak_tflops is not None and not 0 < values.peak_tflops < float("inf"):
        raise UserError(f"--peak_tflops={values.peak_tflops}: expected more than 0, e.g. 989")
    options.check_peer(values)
    options.check_new(values, "json")
    recording.check(values)
    return lengths, head_dims


@contextlib.contextmanager
def _torch(values, folder, report):
    """Start torch in its own process, with its own CUDA libraries; yield None if torch is not installed."""
    if not values.peer_python and not importlib.util.find_spec("torch"):
        print("torch is not installed, so torch and nanoGPT are left out: give a Python that has it with --peer_python")
        yield None
        return
    command = [values.peer_python or sys.executable, str(Path(__file__).parent / "harness" / "torchattention.py")]
    with contextlib.ExitStack() as running:

        def start(log: Path) -> workers.Worker:
            worker = running.enter_context(contextlib.closing(workers.Worker(command, log)))
            worker.ask("start", device="cuda" if jax.default_backend() == "gpu" else "cpu")
            return worker

        with contextlib.closing(start(Path(folder) / "torch.log")) as worker:
            versions = worker.ask("versions")
        print(f"torch {versions['torch']} on {versions['device']}")
        report.figures["torch"] = versions["torch"]
        yield start


def _train(report, values, setup) -> None:
    """Benchmark training; nanoGPT is left out if it fails."""
    name, vocab_size = setup["train"], setup["vocab_size"]
    size = setup["size"] | {"batch_size": values.batch}
    alone = {"attnlab": {"peer": False, "precision": "bfloat16"}}
    # nanoGPT's recipe for GPUs compiles, and logs the loss every tenth step.
    device = "cuda" if setup is _GPU else "cpu"
    peer = {"peer": True, "compiled": setup is _GPU, "device": device, "bfloat16": True, "log_every": 10}
    if not values.peer_path:
        print("nanoGPT is left out: give a checkout with --peer_path")
    tokens = np.random.default_rng(0).integers(vocab_size, size=2**20)
    python = values.peer_python or sys.executable
    for contenders in [alone | {"nanoGPT": peer}, alone] if values.peer_path else [alone]:
        try:
            started = workers.started(contenders, f"train {name}", size, values.peer_path, python, tokens, vocab_size)
            with started as running:
                timers = {name: functools.partial(_seconds_of_training, worker) for name, worker in running.items()}
                seconds = gpu_operator.alternate(timers, values.rounds, setup["train_block"])
            break
        except UserError as error:
            print(f"training of {' and '.join(contenders)} failed: {error}", flush=True)
    else:
        report.fail(f"training {name} failed")
        return
    print(tables.line(f"train {name}", seconds), flush=True)
    _record(report, values, name, size, vocab_size, seconds)


def _seconds_of_training(worker, steps) -> float:
    return worker.ask("train", steps=steps)["seconds"]


def _record(report, values, name, size, vocab_size, seconds) -> None:
    """Add the row and the figures of training."""
    depth, width, context = size["num_layers"], size["width"], size["context"]
    flops = 6 * (12 * depth * width**2 + vocab_size * width) + 12 * depth * width * context  # a token
    row = report.rows[f"train {name}, bfloat16, B = {values.batch}"] = {}
    for contender, taken in seconds.items():
        key, median = f"train_{name}_bfloat16_{contender.lower()}", statistics.median(taken)
        rate = values.batch * context / median
        report.figures.update({f"ms_{key}": 1e3 * median, f"tokens_per_second_{key}": rate})
        row[contender] = f"{1e3 * median:.1f} ({tables.ratio(seconds, contender, 'attnlab'):.2f}) {rate:,.0f}/s"
        if values.peak_tflops:
            mfu = rate * flops / (1e12 * values.peak_tflops)
            report.figures[f"mfu_{key}"] = mfu
            row[contender] += f" {100 * mfu:.1f} %"
    if "nanoGPT" in seconds:
        report.figures[f"ratio_train_{name}_bfloat16"] = tables.ratio(seconds, "nanoGPT", "attnlab")
