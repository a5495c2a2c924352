"""Starting: the import, the training command to its first finished step, the sampling command to its first character.

python -m attnlab.bench start [--config=configs/sancho.py:small] [--rounds=5] [--json=start.json]

Whole processes, from the moment they are started until what is waited for stands in their output. Cold: no program was
compiled before (an empty JAX_COMPILATION_CACHE_DIR); warm: the command again, on what the cold one has left there. Both
find their files in the system's cache. Without --config, configs/quickstart.py starts. With --peer_path nanoGPT's
train.py starts on the same text and sizes, eager; it validates before its first step, here on one batch of each text.
Figures, medians of seconds: import_flax_s (`import jax, flax`), import_attnlab_s (these and attnlab), start_cold_s,
start_warm_s, start_nanogpt_s, first_character_cold_s and first_character_warm_s.
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
from absl import flags
from ml_collections import config_flags

from attnlab import commands
from attnlab import config as configs
from attnlab.bench import options, timing, workers
from attnlab.data import corpora, tokenizers
from attnlab.errors import UserError

QUICKSTART = "configs/quickstart.py"
IMPORTS = {"flax": "import jax, flax", "attnlab": "import jax, flax, attnlab"}
IMPORTED = rb"imported"
FIRST_STEP = rb"(?m)^first step finished"
FIRST_CHARACTER = rb"(?s)."
FIRST_STEP_OF_PEER = rb"(?m)^iter 0:"


def define(values, argv) -> None:
    """The flags."""
    if not any(word.lstrip("-").partition("=")[0] == "config" for word in argv[1:]):
        argv.insert(1, f"--config={QUICKSTART}")
    commands.define_config(values, argv)
    options.define_peer(values)
    flags.DEFINE_integer("rounds", 5, "starts of each kind", flag_values=values)
    options.define_json(values)


def main(values) -> int:
    """Measures and prints the table."""
    options.check_positive(values, "rounds")
    options.check_new(values, "json")
    options.check_peer(values)
    config = configs.completed(commands.config_of(values)[0])
    overrides = config_flags.get_override_values(values["config"])
    arguments = [f"--config={config_flags.get_config_filename(values['config'])}"]
    arguments += [f"--config.{field}={value}" for field, value in overrides.items()]
    arguments += ["--config.checkpoint.dir="]  # each run's in its own workdir
    with tempfile.TemporaryDirectory(prefix="attnlab-start-") as name:
        seconds = _starts(values, config, arguments, Path(name))
    medians = {what: {kind: statistics.median(s) for kind, s in row.items()} for what, row in seconds.items()}
    cells = {what: {kind: f"{s:.2f} s" for kind, s in row.items()} for what, row in medians.items()}
    timing.table("from the command", cells, caption="medians")
    figures = {f"{what.replace(' ', '_')}_{kind}_s": s for what, row in medians.items() for kind, s in row.items()}
    options.keep(values.json, figures)
    return 0


def _starts(values, config, arguments, folder: Path) -> dict[str, dict[str, list[float]]]:
    train, sample = ([sys.executable, "-m", f"attnlab.{name}"] for name in ("train", "sample"))
    short = ["--config.steps=2", "--config.eval.windows=1", "--config.sample.length=1"]
    trained = folder / "trained"
    _finish([*train, *arguments, *short, f"--workdir={trained}"], folder)
    seconds = {"import": {name: [] for name in IMPORTS}}
    seconds |= {what: {"cold": [], "warm": []} for what in ("start", "first character")}
    peer = None
    if values.peer_path:
        peer = _peer(values, config, folder / "peer")
        seconds["start"]["nanogpt"] = []
    for number in range(values.rounds):
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
    """Seconds from starting a process until its output matches; it is killed then.

    Args:
      sign: a regular expression.
      command: of the process.
      folder: what it says on stderr is kept there.
      environment: added to ours.
      cwd: where it runs; here when None.

    Raises:
      UserError: it ended before.
    """
    environment = os.environ | {"PYTHONUNBUFFERED": "1"} | (environment or {})
    log = folder / "stderr"
    with log.open("w") as errors:
        start = time.perf_counter()
        process = subprocess.Popen(command, bufsize=0, stdout=subprocess.PIPE, stderr=errors, env=environment, cwd=cwd)
        with process:
            try:
                said = b""
                while not re.search(sign, said):
                    byte = process.stdout.read(1)
                    if not byte:
                        raise UserError(f"{' '.join(command)} ended: {workers.last_line(log)}")
                    said += byte
                return time.perf_counter() - start
            finally:
                process.kill()


def _finish(command, folder) -> None:
    log = folder / "stderr"
    with log.open("w") as errors:
        if subprocess.run(command, stdout=subprocess.DEVNULL, stderr=errors).returncode:
            raise UserError(f"{' '.join(command)} ended: {workers.last_line(log)}")


def _peer(values, config, folder: Path) -> list[str]:
    """The command that starts nanoGPT's training in a folder, which gets the text as it expects it."""
    checkout, data, model = Path(values.peer_path).absolute(), config.data, config.model
    corpus = corpora.load(data.name, path=data.path, feature=data.feature, validation_fraction=data.validation_fraction)
    tokenizer = tokenizers.make(data.tokenizer, corpus.text, data.vocab_size)
    (folder / "data" / "text").mkdir(parents=True)
    for split, text in (("train", corpus.train), ("val", corpus.validation)):
        tokenizer.encode(text).astype(np.uint16).tofile(folder / "data" / "text" / f"{split}.bin")
    with (folder / "data" / "text" / "meta.pkl").open("wb") as file:
        pickle.dump({"vocab_size": tokenizer.vocab_size}, file)
    (folder / "configurator.py").symlink_to(checkout / "configurator.py")  # it is looked for where the command runs
    sizes = {"n_layer": model.num_layers, "n_head": model.num_heads, "n_embd": model.width, "block_size": model.context}
    sizes |= {"batch_size": config.batch_size, "gradient_accumulation_steps": 1, "eval_iters": 1}
    python = values.peer_python
    python = str(Path(python).absolute()) if os.sep in python else python
    recipe = ["--device=cpu", "--compile=False", "--dataset=text", *(f"--{name}={n}" for name, n in sizes.items())]
    return [python, str(checkout / "train.py"), *recipe]
