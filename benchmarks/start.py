"""Benchmark start-up: seconds to import, to the first training step, and to the first sampled character.

    python -m attnlab.bench start [--config=sancho:small] [--rounds=5] [--json=start.json]

Each time runs from the start of a process until its output shows the event. Cold: with an empty compilation cache
(JAX_COMPILATION_CACHE_DIR); warm: the same command again, with the cache that the cold one has filled. Files are in the
system's cache in both cases. The default --config is quickstart. The table names the device of the processes, a GPU or
a CPU. With --record this process uses the device as well, so no process reserves most of a GPU's memory.

Figures: the device, and medians of seconds: import_flax_s (`import jax, flax`), import_attnlab_s (also
`from attnlab import *`), start_cold_s, start_warm_s, first_character_cold_s and first_character_warm_s.
"""

import importlib.metadata
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from attnlab import commands
from attnlab.support.errors import UserError

from .harness import options, tables, workers

IMPORTS = {"flax": "import jax, flax", "attnlab": "import jax, flax; from attnlab import *"}
COUNTS = {"rounds": (5, "starts of each kind")}
DEVICE = "import jax; print(jax.devices()[0].device_kind)"
IMPORTED = rb"imported"
FIRST_STEP = rb"(?m)^first step finished"
FIRST_CHARACTER = rb"(?s)."


def define(values, argv) -> None:
    """Define the flags."""
    if not commands.given(argv, "config"):
        argv.insert(1, "--config=quickstart")
    commands.define_config(values, argv)
    options.define_common(values, COUNTS)


def main(values) -> int:
    """Measure, and print the table."""
    if values.record:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    options.check_common(values, COUNTS)
    config, changes = commands.config_of(values)[0], commands.changes(values)
    arguments = [f"--config={values['config'].experiment}", *(f"--config.{field}={x}" for field, x in changes.items())]
    if config.checkpoint.dir:
        raise UserError("--config.checkpoint.dir: each run of this benchmark saves in its own workdir; remove it")
    with tempfile.TemporaryDirectory(prefix="attnlab-start-") as name:
        device = _finish([sys.executable, "-c", DEVICE], Path(name)).strip()
        seconds = _starts(values.rounds, arguments, Path(name))
    medians = {what: {kind: statistics.median(s) for kind, s in row.items()} for what, row in seconds.items()}
    cells = {what: {kind: f"{s:.2f} s" for kind, s in row.items()} for what, row in medians.items()}
    title = f"from the command, on {device}, JAX {importlib.metadata.version('jax')}"
    tables.table(title, cells, caption="medians; cold: with an empty compilation cache, warm: with a filled one")
    figures = {"device": device}
    figures |= {f"{what.replace(' ', '_')}_{kind}_s": s for what, row in medians.items() for kind, s in row.items()}
    options.keep_cases(values, "start", {" ".join([Path(arguments[0]).name, *arguments[1:]]): figures})
    return 0


def _starts(rounds, arguments, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Seconds of each start, {what: {kind: one for each round}}."""
    train, sample = ([sys.executable, "-m", f"attnlab.{name}"] for name in ("train", "sample"))
    print("training the run to sample from", flush=True)
    short = ["--config.steps=2", "--config.eval.windows=1", "--config.sample.length=1"]
    trained = folder / "trained"
    _finish([*train, *arguments, *short, f"--workdir={trained}"], folder)
    seconds = {"import": {name: [] for name in IMPORTS}}
    seconds |= {what: {"cold": [], "warm": []} for what in ("start", "first character")}
    for number in tables.rounds("starts", rounds):
        for name, program in IMPORTS.items():
            command = [sys.executable, "-c", f"{program}; print('imported')"]
            seconds["import"][name].append(seconds_until(IMPORTED, command, folder))
        for kind in ("cold", "warm"):
            cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / f"cache-{number}")}
            command = [*train, *arguments, f"--workdir={folder}/{kind}-{number}"]
            seconds["start"][kind].append(seconds_until(FIRST_STEP, command, folder, cache))
        for kind in ("cold", "warm"):
            cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / f"sampling-cache-{number}")}
            command = [*sample, f"--workdir={trained}"]
            seconds["first character"][kind].append(seconds_until(FIRST_CHARACTER, command, folder, cache))
    return seconds


def seconds_until(sign: bytes, command: list[str], folder: Path, environment: dict[str, str] | None = None) -> float:
    """Seconds from starting a process until its output matches; the process is then killed.

    Args:
      sign: a regular expression, searched for in stdout.
      command: the command line.
      folder: gets a file `stderr` with the process' errors.
      environment: added to this process' environment.

    Raises:
      UserError: the process ended before its output matched.
    """
    environment = os.environ | {"PYTHONUNBUFFERED": "1"} | (environment or {})
    log = folder / "stderr"
    with log.open("w") as errors:
        start = time.perf_counter()
        process = subprocess.Popen(command, bufsize=0, stdout=subprocess.PIPE, stderr=errors, env=environment)
        with process:
            try:
                output = b""
                while not re.search(sign, output):
                    byte = process.stdout.read(1)
                    if not byte:
                        raise UserError(f"{' '.join(command)} ended: {workers.last_line(log)}")
                    output += byte
                return time.perf_counter() - start
            finally:
                process.kill()


def _finish(command, folder) -> str:
    """Run a command to its end; returns its output."""
    log = folder / "stderr"
    with log.open("w") as errors:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    if done.returncode:
        raise UserError(f"{' '.join(command)} ended: {workers.last_line(log)}")
    return done.stdout
