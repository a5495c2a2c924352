"""Benchmark a GPU: is the operator correct, how fast is it, and how fast does GPT-2 (124M) train?

    python -m attnlab.bench gpu [--only=operator] [--seconds=300] [--record=docs/benchmarks] [--peer_path=nanoGPT]

1. Correctness: every backend of the operator and of the linear recurrence against the specification in float64, outputs
   and gradients. A failure is WRONG in the table, and the exit code is 1.
2. Training in bfloat16, against nanoGPT by its own recipe for GPUs (compiled). The tokens are random, because the time
   does not depend on the text.
3. Populations: several runs of the quickstart in one program.
4. The recurrence in bfloat16, against fla (flash-linear-attention).
5. The operator in bfloat16, against jax.nn and torch (SDPA, FlexAttention).

--only=operator,recurrence,populations,training chooses among them.

Ratios above 1 in the figures mean that attnlab is faster. Only necessary FLOPs count. For the operator, these are two
matrix products forward and five more backward over the visible pairs, as usual for flash attention. For training, each
token takes 6 FLOPs per parameter plus 12·layers·width·context, as nanoGPT counts. Without a GPU all sizes are small.
"""

import contextlib
import datetime
import importlib.util
import itertools
import os
import sys
import tempfile
import time
from pathlib import Path

import jax
from absl import flags

from attnlab.support.errors import UserError

from .harness import gpu_operator, gpu_recurrence, gpu_training, options, recording, tables, workers
from .harness.gpu_operator import Report

PARTS = ("operator", "training", "populations", "recurrence")
MASKS = ("causal", "window", "documents", "soft cap", "alibi")
CAPTION = (
    "checks: largest error over the allowed one; operator: ms a call (× attnlab's default backend), TFLOP/s; "
    "training, populations: ms a step, tokens/s"
)

# Sizes, and the defaults of flags. A benchmark of the operator has `tokens` tokens in all its sequences and `width`
# features in all its heads, as in the papers on flash attention; the window mask keeps `window` keys before each query;
# a timed block lasts `block` seconds, but `train_block` in training.
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
    "populations": [1, 10, 20, 40, 80],
    "recurrence": gpu_recurrence.Sizes(batch=2, length=8192, heads=16, features=128, checked=(130, 65, 63, 1)),
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
    "populations": [2],
    "recurrence": gpu_recurrence.Sizes(batch=1, length=128, heads=2, features=64, checked=(9,)),
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
    options.define_choices(values, "only", PARTS, "what to benchmark")
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
    _check(values, setup)
    device, date = jax.devices()[0].device_kind, datetime.date.today().isoformat()
    about = {"device": device, "date": date, "jax": jax.__version__, "rounds": values.rounds}
    reports = {part: Report({}, {}, []) for part in PARTS if part in values.only}
    print(f"{device}, JAX {jax.__version__}")
    if setup is _CPU:
        print("no GPU found: lengths, batch and model are small, and nanoGPT is not compiled")
    with tempfile.TemporaryDirectory(prefix="attnlab-gpu-") as folder, _torch(values, folder, about) as torch:
        try:
            _run(reports, values, setup, torch, Path(folder), deadline)
        finally:
            figures = {name: x for report in reports.values() for name, x in report.figures.items()}
            wrong = [line for report in reports.values() for line in report.wrong]
            options.keep(values.json, about | figures | {"wrong": wrong})
            recording.add(values, "gpu", _cases(reports))
    rows = {name: row for report in reports.values() for name, row in report.rows.items()}
    tables.table(f"{device}, {date}, JAX {jax.__version__}", rows, CAPTION)
    for line in wrong:
        print(f"WRONG: {line}")
    return int(bool(wrong))


def _run(reports, values, setup, torch, folder, deadline) -> None:
    """Run the chosen parts, all checks first, and time the operator last: JAX keeps memory that peers need."""
    lengths, head_dims = (options.whole_numbers(values, name) for name in ("lengths", "head_dims"))
    recurrence, timing = setup["recurrence"], (values.rounds, setup["block"])
    operator = reports.get("operator")
    if operator:
        gpu_operator.check(operator, values.masks, head_dims, setup["check_length"], setup["window"])
    if report := reports.get("recurrence"):
        gpu_recurrence.check(report, recurrence)
    if report := reports.get("training"):
        gpu_training.gpt2(report, values, setup)
    if report := reports.get("populations"):
        gpu_training.populations(report, setup["populations"], *timing)
    if report := reports.get("recurrence"):
        python = values.peer_python or sys.executable
        gpu_recurrence.race(report, recurrence, *timing, python, folder, deadline)
    if operator:
        shape = [setup[name] for name in ("tokens", "width", "window")]
        sizes = [gpu_operator.Sizes(*size, *shape) for size in itertools.product(head_dims, lengths)]
        gpu_operator.race(operator, values.masks, sizes, *timing, torch, folder, deadline)


def _cases(reports: dict[str, Report]) -> dict[str, dict]:
    """The figures by case, for the record: checks and times, of the operator and of each other part."""
    cases = {}
    for part, report in reports.items():
        prefix = "" if part == "operator" else f"{part} "
        for name, x in report.figures.items():
            case = "checks" if name.startswith(("check_", "error_")) else "times"
            cases.setdefault(prefix + case, {})[name] = x
    return cases


def _check(values, setup) -> None:
    """Set the defaults of this device, and raise UserError for a wrong value."""
    for name, default in setup["flags"].items():
        if values[name].value is None:
            values[name].value = default
    for name in ("lengths", "head_dims"):
        options.whole_numbers(values, name)
    options.check_known("only", values.only, PARTS)
    options.check_positive(values, "rounds", "batch", "seconds")
    options.check_known("masks", values.masks, MASKS)
    if values.peak_tflops is not None and not 0 < values.peak_tflops < float("inf"):
        raise UserError(f"--peak_tflops={values.peak_tflops}: expected more than 0, e.g. 989")
    options.check_peer(values)
    options.check_new(values, "json")
    recording.check(values)


@contextlib.contextmanager
def _torch(values, folder, about):
    """Yield a function that starts torch in its own process; None if torch is not needed or not installed."""
    if "operator" not in values.only:
        yield None
        return
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
        about["torch"] = versions["torch"]
        yield start
