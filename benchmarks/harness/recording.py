"""Figures on file, one file for each machine: `--record=docs/benchmarks`.

A file has the `machine` and, in `benchmarks`, the cases of each benchmark, such as a size, a text, or a mask with a
length. A case is replaced as a whole; the others stay. A case has the `date`, the `versions` of JAX and of the
installed peers, the `figures`, and whether the machine was `idle`: less than a twentieth of its cores was busy in the
second before the benchmark (`busy_cores_before`), and other virtual machines took less than that while it ran
(`stolen_cores`, a mean). All three are None where the system does not report them.
"""

import contextlib
import datetime
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import time
from pathlib import Path

import jax
from absl import flags

from attnlab.support import paths
from attnlab.support.errors import UserError

INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
PACKAGES = ("jax", "torch", "tokamax", "attnax")
VENDORS = {"AuthenticAMD": "amd", "GenuineIntel": "intel"}
BUSY = 0.05  # a machine with this share of its cores busy is not idle


def define(values) -> None:
    """Define --record."""
    meaning = "a folder: write the figures to its file for this machine, replacing the same cases"
    flags.DEFINE_string("record", None, meaning, flag_values=values)


def check(values) -> None:
    """Raise UserError when --record cannot take the figures; measure whether the machine is idle."""
    if values.record is None:
        return
    if not os.path.isdir(values.record) or not os.access(values.record, os.W_OK):
        raise UserError(f"--record={values.record} is not a writable folder: create it, or give another")
    _load(Path(values.record))
    with contextlib.suppress(OSError):
        _before()


def add(values, benchmark: str, cases: dict[str, dict]) -> None:
    """Put the figures of some cases into the file of this machine, if --record names its folder."""
    if values.record is None:
        return
    about = {"date": datetime.date.today().isoformat(), "versions": _versions(values), **_idle()}
    file, record = _load(Path(values.record))
    merged = record["benchmarks"].get(benchmark, {})
    merged |= {case: about | {"figures": _rounded(figures)} for case, figures in cases.items()}
    record["benchmarks"][benchmark] = merged
    paths.write_text(file, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    print(f"recorded: {file}")


def machine() -> dict:
    """The CPU's vendor, family, model and name, the cores that this process may use, and instruction sets.

    Where JAX runs on a GPU, also its name and compute capability.

    >>> sorted(machine())
    ['cores', 'family', 'instruction_sets', 'model', 'name', 'vendor']
    """
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]
    except OSError:
        first = ""
    cpuinfo = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
    device = jax.local_devices()[0]
    gpu = {"gpu": device.device_kind, "compute_capability": str(getattr(device, "compute_capability", ""))}
    return (gpu if device.platform == "gpu" else {}) | {
        "vendor": cpuinfo.get("vendor_id", platform.machine()),
        "family": cpuinfo.get("cpu family"),
        "model": cpuinfo.get("model"),
        "name": cpuinfo.get("model name", platform.processor()),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "instruction_sets": [each for each in INSTRUCTION_SETS if each in cpuinfo.get("flags", "").split()],
    }


def file_name(machine: dict) -> str:
    """The name of a machine's file.

    >>> file_name({"vendor": "AuthenticAMD", "family": "25", "model": "17"})
    'amd-family-25-model-17.json'
    """
    if "gpu" in machine:
        return re.sub(r"\W+", "-", machine["gpu"].lower()) + ".json"
    vendor = VENDORS.get(machine["vendor"], re.sub(r"\W+", "-", machine["vendor"].lower()))
    return "-".join([vendor, *(f"{key}-{machine[key]}" for key in ("family", "model") if machine[key])]) + ".json"


def _load(folder: Path) -> tuple[Path, dict]:
    """The file of this machine, and its content so far."""
    here = machine()
    file = folder / file_name(here)
    if not file.exists():
        return file, {"machine": here, "benchmarks": {}}
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        recorded, _ = record["machine"], record["benchmarks"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--record: {file} is not a record of benchmarks ({error!r}): move it away") from error
    if recorded != here:
        key = next(key for key in here if recorded.get(key) != here[key])
        why = f"its {key} is {recorded.get(key)}, not {here[key]}"
        raise UserError(f"--record: {file} belongs to another machine ({why}): give another folder")
    return file, record


def _versions(values) -> dict[str, str]:
    """Versions of JAX and of the installed peers; torch's is from --peer_python if nanoGPT ran there."""
    versions = {name: importlib.metadata.version(name) for name in PACKAGES if importlib.util.find_spec(name)}
    if "peer_path" in values and values.peer_path and values.peer_python:
        program = "import importlib.metadata; print(importlib.metadata.version('torch'))"
        answer = subprocess.run([values.peer_python, "-c", program], capture_output=True, text=True)
        versions["torch"] = answer.stdout.strip()
    return versions


def _idle() -> dict:
    """Whether the machine was idle, with the measurements."""
    try:
        busy, stolen, start = _before()
        stolen = (_cpu_seconds()[1] - stolen) / (time.monotonic() - start)
    except OSError:
        return {"idle": None, "busy_cores_before": None, "stolen_cores": None}
    idle = max(busy, stolen) < BUSY * os.cpu_count()
    return {"idle": idle, "busy_cores_before": round(busy, 2), "stolen_cores": round(stolen, 2)}


@functools.cache
def _before() -> tuple[float, float, float]:
    """Cores busy during one second; stolen CPU seconds and the time at its end. Measured once, by the first call."""
    busy, _ = _cpu_seconds()
    time.sleep(1)
    later, stolen = _cpu_seconds()
    return later - busy, stolen, time.monotonic()


def _cpu_seconds() -> tuple[float, float]:
    """(Busy, stolen) CPU seconds of all cores since the system started; busy seconds include stolen ones."""
    words = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:9]
    user, nice, system, _, _, irq, softirq, steal = (int(word) / os.sysconf("SC_CLK_TCK") for word in words)
    return user + nice + system + irq + softirq + steal, steal


def _rounded(value):
    """Round numbers to six digits, in dictionaries too."""
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value
