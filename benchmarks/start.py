"""Benchmark start-up: seconds to import, to the first training step, and to the first sampled character.

    python -m attnlab.bench start [--config=sancho:small] [--rounds=5] [--json=start.json]

Each is a process, timed from its start until its output shows what is waited for. Cold: with an empty compilation cache
(JAX_COMPILATION_CACHE_DIR); warm: the same command again, with the cache that the cold one has filled. Files are in the
system's cache in both cases. The default --config is quickstart. With --peer_path nanoGPT's train.py starts
on the same text and sizes, eager; it validates before its first step, here on one batch of each split.

Figures, medians of seconds: import_flax_s (`import jax, flax`), import_attnlab_s (and `from attnlab import *`),
start_cold_s, start_warm_s, start_nanogpt_s, first_character_cold_s and first_character_warm_s.
"""

import os
import pickle
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from ml_collections import config_flags

from attnlab import commands
from attnlab import config as configs
from attnlab.data import corpora, tokenizers
from attnlab.support import timing
from attnlab.support.errors import UserError

from .harness import options, recording, workers

IMPORTS = {"flax": "import jax, flax", "attnlab": "import jax, flax; from attnlab import *"}
IMPORTED = rb"imported"
FIRST_STEP = rb"(?m)^first step finished"
FIRST_CHARACTER = rb"(?s)."
FIRST_STEP_OF_PEER = rb"(?m)^iter 0:"


def define(values, argv) -> None:
    """Define the flags."""
    if not commands.given(argv, "config"):
        argv.insert(1, "--config=quickstart")
    commands.define_config(values, argv)
    options.define_peer(values)
    options.define_integers(values, {"rounds": (5, "starts of each kind")})
    options.define_json(values)
    recording.define(values)


def main(values) -> int:
    """Measure, and print the table."""
    options.check_positive(values, "rounds")
    options.check_new(values, "json")
    recording.check(values)
    options.check_peer(values)
    config = configs.completed(commands.config_of(values)[0])
    overrides = config_flags.get_override_values(values["config"])
    arguments = [f"--config={config_flags.get_config_filename(values['config'])}"]
    arguments += [f"--config.{field}={value}" for field, value in overrides.items()]
    if config.checkpoint.dir:
        raise UserError("--config.checkpoint.dir: each run of this benchmark saves in its own workdir; leave it out")
    with tempfile.TemporaryDirectory(prefix="attnlab-start-") as name:
        seconds = _starts(values, config, arguments, Path(name))
    medians = {what: {kind: statistics.median(s) for kind, s in row.items()} for what, row in seconds.items()}
    cells = {what: {kind: f"{s:.2f} s" for kind, s in row.items()} for what, row in medians.items()}
    timing.table("from the command", cells, caption="medians")
    figures = {f"{what.replace(' ', '_')}_{kind}_s": s for what, row in medians.items() for kind, s in row.items()}
    options.keep_cases(values, "start", {" ".join([Path(arguments[0]).name, *arguments[1:]]): figures})
    return 0


def _starts(values, config, arguments, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Seconds of each start, {what: {kind: one for each round}}."""
    train, sample = ([sys.executable, "-m", f"attnlab.{name}"] for name in ("train", "sample"))
    print("training the run to sample from", flush=True)
    short = ["--config.steps=2", "--config.eval.windows=1", "--config.sample.length=1"]
    trained = folder / "trained"
    _finish([*train, *arguments, *short, f"--workdir={trained}"], folder)
    seconds = {"import": {name: [] for name in IMPORTS}}
    seconds |= {what: {"cold": [], "warm": []} for what in ("start", "first character")}
    peer = None
    if values.peer_path:
        peer = _peer(values, config, folder / "peer")
        seconds["start"]["nanogpt"] = []
    for number in timing.rounds("starts", values.rounds):
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
        if peer:
            seconds["start"]["nanogpt"].append(seconds_until(FIRST_STEP_OF_PEER, peer, folder, cwd=folder / "peer"))
    return seconds


def seconds_until(
    sign: bytes, command: list[str], folder: Path, environment: dict[str, str] | None = None, cwd: Path | None = None
) -> float:
    """Seconds from starting a process until its output matches; the process is then killed.

    Args:
      sign: a regular expression, searched for in stdout.
      command: the command line.
      folder: gets a file `stderr` with the process' errors.
      environment: added to this process' environment.
      cwd: the working directory; this process' if None.

    Raises:
      UserError: the process ended before its output matched.
    """
    environment = os.environ | {"PYTHONUNBUFFERED": "1"} | (environment or {})
    log = folder / "stderr"
    with log.open("w") as errors:
        start = time.perf_counter()
        process = subprocess.Popen(command, bufsize=0, stdout=subprocess.PIPE, stderr=errors, env=environment, cwd=cwd)
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


def _finish(command, folder) -> None:
    log = folder / "stderr"
    with log.open("w") as errors:
        if subprocess.run(command, stdout=subprocess.DEVNULL, stderr=errors).returncode:
            raise UserError(f"{' '.join(command)} ended: {workers.last_line(log)}")


def _peer(values, config, folder: Path) -> list[str]:
    """nanoGPT's training command, to be run in `folder`, which gets the text in nanoGPT's format."""
    checkout, data, model = Path(values.peer_path).absolute(), config.data, config.model
    options = {"path": data.path, "feature": data.feature, "validation_fraction": data.validation_fraction}
    corpus = corpora.read_text(data.name, **options)
    tokenizer = tokenizers.make(data.tokenizer, corpus.text, data.vocab_size)
    (folder / "data" / "text").mkdir(parents=True)
    for split, text in (("train", corpus.train), ("val", corpus.validation)):
        tokenizer.encode(text).astype(np.uint16).tofile(folder / "data" / "text" / f"{split}.bin")
    with (folder / "data" / "text" / "meta.pkl").open("wb") as file:
        pickle.dump({"vocab_size": tokenizer.vocab_size}, file)
    (folder / "configurator.py").symlink_to(checkout / "configurator.py")  # read from the working directory
    sizes = {"n_layer": model.num_layers, "n_head": model.num_heads, "n_embd": model.width, "block_size": model.context}
    sizes |= {"batch_size": config.batch_size, "gradient_accumulation_steps": 1, "eval_iters": 1}
    python = values.peer_python
    python = str(Path(python).absolute()) if os.sep in python else python
    recipe = ["--device=cpu", "--compile=False", "--dataset=text", *(f"--{name}={n}" for name, n in sizes.items())]
    return [python, str(checkout / "train.py"), *recipe]
