"""Shared by the tests of the benchmarks: a tiny model size, stand-ins for workers, and commands that run or fail."""

import json
import sys

import numpy as np
import pytest

from attnlab._benchmarks.harness import workers
from attnlab._benchmarks.harness.contender import Contender
from attnlab.bench import main

TINY = {"num_layers": 1, "num_heads": 2, "width": 8, "context": 8, "batch_size": 4}
PEER = """#!{python}
import json, sys

if sys.argv[1] == "-c":  # asked whether torch is installed
    sys.exit(not {has_torch})
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == {dies_of!r}:
        raise RuntimeError("no more")
    if request["do"] == "start":
        speed = (1 + request["compiled"]) * (4 if request.get("bfloat16") else 1)
    seconds = 2.0 * request.get("steps", 1) / speed
    print(json.dumps({{"seconds": seconds, "parameters": 1, "loss": {loss}}}), flush=True)
"""


RECIPE = """
from attnlab.config import default


def get_config(variant=""):
    config = default()
    config.steps, config.batch_size = 9, 4
    config.model.update(num_layers=1, num_heads=2, width=8, context=8)
    config.optimizer.ema = 0.5
    config.data.packing = {packing!r}
    return config
"""


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    """Restores the environment variables that the GPU's benchmark sets."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def recipe(tmp_path):
    """Writes a config for the race to a loss; returns its path."""

    def write(packing="stream"):
        (tmp_path / "mine.py").write_text(RECIPE.format(packing=packing))
        return str(tmp_path / "mine.py")

    return write


@pytest.fixture
def text(tmp_path):
    """The path of a short text."""
    path = tmp_path / "text.txt"
    path.write_text("Tell me, O muse, of that ingenious hero. " * 200)
    return path


@pytest.fixture
def tiny(monkeypatch):
    """Adds a model size that compiles and runs quickly; returns the flag that selects it."""
    monkeypatch.setitem(workers.SIZES, "tiny", TINY)
    return "--sizes=tiny"


@pytest.fixture
def peer(tmp_path):
    """Creates a stand-in for nanoGPT, which answers every request at once; returns the flags that select it."""

    def flags(has_torch: bool = True, dies_of: str = "", loss: float = 1.0) -> list[str]:
        checkout, python = tmp_path / "nanoGPT", tmp_path / "python"
        checkout.mkdir()
        (checkout / "model.py").touch()
        python.write_text(PEER.format(python=sys.executable, has_torch=has_torch, dies_of=dies_of, loss=loss))
        python.chmod(0o755)
        return [f"--peer_path={checkout}", f"--peer_python={python}"]

    return flags


@pytest.fixture(scope="session")
def contender(tmp_path_factory):
    """attnlab's contender of the tiny size, compiled once for all tests."""
    tokens = tmp_path_factory.mktemp("contender") / "tokens.npy"
    np.save(tokens, np.arange(1000) % 50)
    return Contender(tokens, vocab_size=50, **TINY)


@pytest.fixture
def in_process(monkeypatch, tiny, contender):
    """Runs attnlab's contender in this process; the flag of its size. Peers have a process of their own as ever."""
    process = workers.Worker

    class InProcess(process):
        peak_mib = None

        def __init__(self):
            pass

        def ask(self, what, **request):
            return {} if what == "start" else getattr(contender, what)(**request)

        def close(self):
            pass

    def start(command, log):
        return InProcess() if "harness.contender" in command else process(command, log)

    monkeypatch.setattr(workers, "Worker", start)
    return tiny


@pytest.fixture
def figures_of(tmp_path):
    """Runs a benchmark that ends with an exit code; returns the figures in its JSON file."""

    def run(*arguments: str, code: int = 0) -> dict:
        path = tmp_path / "figures.json"
        assert main(["bench", *arguments, f"--json={path}"]) == code
        return json.loads(path.read_text())

    return run


@pytest.fixture
def error_line(capsys):
    """Runs a benchmark that must end with exit code 2 and one line on stderr; returns the line."""

    def run(*arguments: str) -> str:
        assert main(["bench", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
        return error

    return run
