"""Short training runs: their config, a finished run, runs that crash, and comparisons of two runs."""

import atexit
import contextlib
import functools
import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import flax.linen as nn
import orbax.checkpoint as ocp
import pytest

from attnlab import config as configs
from attnlab import train
from attnlab.support import workers
from attnlab.training import program
from attnlab.training.checkpoints import Checkpoints, sha256

REPOSITORY = Path(__file__).parents[1]
FIELDS = {
    "steps": 12, "precision": "float32", "batch_size": 8, "parallel.mesh.data": 1, "optimizer.warmup_steps": 4,
    "model.num_layers": 1, "model.num_heads": 2, "model.width": 16, "model.context": 16, "model.dropout": 0.1,
    "eval.every": 5, "eval.windows": 8, "checkpoint.every": 4, "sample.every": 0, "sample.length": 2,
    "log.every": 2, "log.tensorboard": False, "log.peak_tflops": 1.0,
}  # fmt: skip
TIMING = re.compile("time|second|mfu|flops|wall|eta|rss|memory")


def flags(fields):
    return [f"--config.{name}={value}" for name, value in fields.items()]


CONFIG = f"--config={REPOSITORY}/configs/quickstart.py"
SMALL = [CONFIG, *flags(FIELDS)]
WITHOUT_DROPOUT = [CONFIG, *flags({name: value for name, value in FIELDS.items() if name != "model.dropout"})]


def quick(**changes):
    """The config of a short run on one device."""
    config = configs.default()
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    config.update_from_flattened_dict(FIELDS | changes)
    return config


class Bigram(nn.Module):
    """A user-defined model that compiles in a tenth of a GPT's time: next-token logits from the last token."""

    vocab_size: int = 256

    @nn.compact
    def __call__(self, tokens, deterministic=True, dropout_key=None):
        assert deterministic == (dropout_key is None) and (dropout_key is None or len(dropout_key) == len(tokens))
        return nn.Dense(self.vocab_size)(nn.Embed(self.vocab_size, 8)(tokens))


# --- commands


def run(workdir, *options):
    return train.main(["train", *SMALL, f"--workdir={workdir}", *options])


def workdir_alone(workdir, *options):
    return train.main(["train", f"--workdir={workdir}", *options])


def process(workdir, *options, program=("-m", "attnlab.train")):
    """Start the training command in a subprocess, which compiles with the same flags as this one."""
    command = [sys.executable, *program, *SMALL, f"--workdir={workdir}", *options]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=REPOSITORY, env=os.environ | {"PYTHONUNBUFFERED": "1"}, **output)


def wait_for(running, pattern):
    """Read lines until one matches; fail if the process ends first."""
    seen = []
    for line in running.stdout:
        seen.append(line)
        if re.search(pattern, line):
            return
    pytest.fail(f"{pattern!r} was not printed: {''.join(seen)}")


def finetuning(source, text, **changes):
    """Options for four steps on a text, starting from the weights in a folder ("" for none)."""
    fields = {
        "data.path": text, "steps": 4, "batch_size": 8, "optimizer.accumulation": 1, "optimizer.warmup_steps": 0,
        "eval.windows": 4, "sample.length": 0, "model.context": 32, "log.tensorboard": False, "parallel.mesh.data": 1,
        "log.peak_tflops": 1,  # otherwise it is measured
    }  # fmt: skip
    fields |= {"init_from": source} if source else {}
    fields |= {name.replace("__", "."): value for name, value in changes.items()}
    return [f"--config={REPOSITORY}/configs/gpt2_finetune.py", *flags(fields)]


def finetune(source, text, workdir, **changes):
    return train.main(["train", *finetuning(source, text, **changes), f"--workdir={workdir}"])


class Here(subprocess.Popen):
    """Replaces `subprocess.Popen`: runs the worker in this process."""

    def __init__(self, words, stdout, **_):
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            self.returncode = importlib.import_module(words[4]).main(words[4:])
        stdout.write(said.getvalue().encode())

    def poll(self):
        return self.returncode


@contextlib.contextmanager
def workers_here():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "subprocess", SimpleNamespace(Popen=Here, DEVNULL=None, STDOUT=None))
        yield


class CrashError(Exception):
    """Ends a run in the middle, as a kill would."""


def crash_at(step):
    def on_step(now, metrics):
        if now == step:
            raise CrashError

    return on_step


# --- runs that share their programs

# Tracing takes most of a start. Tests with subprocesses cover what a new process does.
sharing = functools.partial(program.shared_programs, {})


@functools.cache
def finished():
    """(Folder of a finished run, its output): shared by all tests of this process, so tests may only read it."""
    folder = Path(tempfile.mkdtemp(prefix="attnlab-run-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "finished").mkdir()  # an empty folder may become the workdir
    with sharing(), contextlib.redirect_stdout(io.StringIO()) as printed:
        assert run(folder / "finished") == 0
    return folder / "finished", printed.getvalue()


def unfinished(folder, workdir=None):
    """A copy of a finished run without its final record."""
    shutil.copytree(workdir or finished()[0], folder)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:-1]))
    return folder


# --- what a run left


def records(workdir):
    """The records, without the fields that may differ between runs with the same seed."""
    lines = (Path(workdir) / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if not TIMING.search(key)} for line in lines]


def kept(workdir):
    return Checkpoints(workdir / "checkpoints").steps()


def contents(folder):
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def digests(workdir, step):
    """sha256 digests of a checkpoint's parameters, its optimizer state, and its average if there is one."""
    folder = workdir / "checkpoints" / str(step)
    names = [name for name in ("params", "opt_state", "average") if (folder / name).exists()]
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        items = reader.restore(
            folder.absolute(), ocp.args.Composite(**dict.fromkeys(names, ocp.args.StandardRestore()))
        )
    return {name: sha256(items[name]) for name in names}


def same_checkpoints(*workdirs):
    """Whether two runs have checkpoints at the same steps with the same bits."""
    first, second = ({step: digests(workdir, step) for step in kept(workdir)} for workdir in workdirs)
    return first == second
