"""Benchmark the data pipeline: how fast batches come; with --size, how a large text is tokenised and trained on.

    python -m attnlab.bench data [--sizes=small,large] [--json=data.json]
    python -m attnlab.bench data --size=4GB [--folder=FOLDER] [--json=data.json]

Sizes as in `bench train`. Each round trains for --seconds, then draws --batches batches without training on them.

Figures: ratio_data_SIZE, batches a second over steps a second; data_wait_share_SIZE, the share of the training loop's
time spent waiting for the next batch; step_ms_SIZE and batch_ms_SIZE.

With --size a text of that size is made from the Python language reference, by repetition, with one letter in a hundred
replaced. It is tokenised by bytes and by BPE, the store is opened by a second process, and the quickstart's model is
trained on it for --steps steps, and on the reference itself for comparison. FOLDER needs about twice the size; without
one it is a temporary folder. Figures, KIND being byte or bpe: read_mb_s; KIND_mb_s_core, megabytes of text a second and
core; KIND_mb_s_cpu, the same for a second of processor time, which other processes disturb less; KIND_first_s and
KIND_open_s, seconds until the first and the second process have the store, without imports; KIND_peak_mib;
train_peak_mib and train_small_peak_mib.
"""

import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from absl import flags

from attnlab.config import find
from attnlab.data import corpora
from attnlab.support import timing
from attnlab.support.errors import UserError

from .harness import options, tokenising, workers

COUNTS = {
    "rounds": (5, "rounds of each size"),
    "seconds": (3, "seconds of training a round, about"),
    "batches": (2000, "batches drawn without training, a round"),
    "steps": (200, "with --size, training steps"),
}
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def define(values, argv) -> None:
    """Define the flags."""
    options.define_common(values, workers.SIZES, COUNTS)
    flags.DEFINE_string("size", None, "measure a text of this size, e.g. 200MB or 4GB", flag_values=values)
    flags.DEFINE_string("folder", None, "with --size, a new folder to work in", flag_values=values)


def main(values) -> int:
    """Measure, and print the table."""
    options.check_common(values, workers.SIZES, COUNTS)
    if values.size is None:
        figures = _batches(values)
    else:
        options.check_new(values, "folder", what="folder")
        with _folder(values.folder) as folder:
            figures = _large_text(bytes_of(values.size), folder, values.steps)
    options.keep_cases(values, "data", {values.size or "batches": figures})
    return 0


def _batches(values) -> dict[str, float]:
    figures, rows = {}, {}
    for size in values.sizes:
        seconds, shares = _measure(values, size)
        ratio, share = timing.ratio(seconds, "step", "batch"), statistics.median(shares)
        step, batch = (1e3 * statistics.median(seconds[name]) for name in ("step", "batch"))
        figures |= {f"ratio_data_{size}": ratio, f"data_wait_share_{size}": share}
        figures |= {f"step_ms_{size}": step, f"batch_ms_{size}": batch}
        rows[size] = {
            "ms a step": f"{step:.2f}",
            "ms a batch": f"{batch:.3f}",
            "× faster": f"{ratio:.0f}",
            "waiting": f"{100 * share:.2f} %",
        }
    timing.table("data", rows, caption="medians; waiting: share of the loop's time spent waiting for a batch")
    return figures


def _measure(values, size: str) -> tuple[dict[str, list[float]], list[float]]:
    """Seconds a step and a batch, and the share of the loop's time spent waiting, by round."""
    seconds, shares = {"step": [], "batch": []}, []
    with workers.started({"attnlab": {"peer": False}}, size, workers.SIZES[size]) as running:
        worker = running["attnlab"]
        steps = workers.calibrate(running, values.seconds)
        for _ in timing.rounds(size, values.rounds):
            trained = worker.ask("train", steps=steps)
            drawn = worker.ask("batches_alone", count=values.batches)
            seconds["step"].append(trained["seconds"] / steps)
            seconds["batch"].append(drawn["seconds"] / values.batches)
            shares.append(trained["waited"] / trained["seconds"])
    return seconds, shares


def bytes_of(size: str) -> int:
    """The number of bytes in a size.

    Raises:
      UserError: it is not a number and a unit.

    >>> bytes_of("1.5MB")
    1500000
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]B)", size)
    if not found or not (count := int(float(found[1]) * UNITS[found[2]])):
        raise UserError(f"--size={size}: expected a number and a unit, e.g. 200MB or 4GB")
    return count


@contextlib.contextmanager
def _folder(given: str | None):
    if given:
        Path(given).mkdir()
        yield Path(given)
    else:
        with tempfile.TemporaryDirectory(prefix="attnlab-data-") as name:
            yield Path(name)


def _large_text(size: int, folder: Path, steps: int) -> dict[str, float]:
    """Make a text, tokenise it, train on it; returns the figures and prints them."""
    text = folder / "text.txt"
    tokenising.write_text(text, corpora.read_text("python_docs").text, size)
    os.utime(text, (0, 0))  # a file that has just been written is not remembered
    print(f"{text}: {size / 1e6:,.0f} MB", flush=True)
    cores, figures, rows = len(os.sched_getaffinity(0)), {}, {}
    for kind in ("byte", "bpe"):
        command = workers.command("harness.tokenising", str(text), kind, str(folder / "stores"))
        (folder / "stores").mkdir(exist_ok=True)
        first, second = (json.loads(_finished(command, folder)[0].splitlines()[-1]) for _ in range(2))
        rate = size / 1e6 / first["store_s"] / cores
        opened = second["read_s"] + second["tokenizer_s"] + second["store_s"]
        if kind == "byte":
            figures["read_mb_s"] = size / 1e6 / first["read_s"]
        figures |= {f"{kind}_mb_s_core": rate, f"{kind}_mb_s_cpu": size / 1e6 / first["cpu_s"]}
        figures[f"{kind}_first_s"] = first["read_s"] + first["tokenizer_s"] + first["store_s"]
        figures |= {f"{kind}_open_s": opened, f"{kind}_peak_mib": first["peak_mib"]}
        rows[kind] = {
            "MB/s a core": f"{rate:.1f}",
            "tokens": f"{first['tokens']:,}",
            "peak MiB": timing.mib(first["peak_mib"]),
            "opened again in": f"{opened:.2f} s",
        }
    timing.table(f"{size / 1e6:,.0f} MB on {cores} cores, read at {figures['read_mb_s']:.0f} MB/s", rows)
    for name, path in (("train", text), ("train_small", "")):
        figures[f"{name}_peak_mib"] = _training_peak(path, folder, f"{name}-run", steps)
        print(f"{name}: peak {figures[f'{name}_peak_mib']:,.0f} MiB", flush=True)
    return figures


def _training_peak(path: Path | str, folder: Path, run: str, steps: int) -> float:
    """Peak resident MiB of a training process."""
    fields = {"steps": steps, "data.path": path, "data.tokenizer": "byte", "data.store": folder / "stores"}
    fields |= {"sample.length": 16, "log.tensorboard": False}
    arguments = [f"--config.{name}={value}" for name, value in fields.items()]
    command = [sys.executable, "-m", "attnlab.train", f"--config={find('quickstart')}", *arguments]
    return _finished([*command, f"--workdir={folder / run}"], folder)[1]


def _finished(command: list[str], folder: Path) -> tuple[str, float]:
    """The output of a process and its peak resident memory in MiB; `folder` is its cache folder."""
    log = folder / "log"
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise UserError(f"{' '.join(command)} ended: {workers.last_line(log)}")
    return log.read_text(), usage.ru_maxrss / 1024
