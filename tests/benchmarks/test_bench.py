"""`python -m attnlab.bench`: every benchmark at tiny sizes, and invalid flags. No test asserts a time."""

import doctest
import json
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from attnlab._benchmarks import decoding
from attnlab._benchmarks.harness import peers, recording, workers
from attnlab.bench import main
from attnlab.support import shipped

TINY = {"num_layers": 1, "num_heads": 2, "width": 8, "context": 8, "batch_size": 4}
# A stand-in for nanoGPT that answers every request at once.
PEER = """#!{python}
import json, sys

if sys.argv[1] != "-c":  # asked whether torch is installed
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "start":
            speed = (1 + request["compiled"]) * (4 if request.get("bfloat16") else 1)
        seconds = 2.0 * request.get("steps", 1) / speed
        print(json.dumps({{"seconds": seconds, "parameters": 1, "loss": 9}}), flush=True)
"""
RECIPE = """
from attnlab.config import default


def get_config(variant=""):
    config = default()
    config.steps, config.batch_size = 9, 4
    config.model.update(num_layers=1, num_heads=2, width=8, context=8)
    config.optimizer.ema = 0.5
    return config
"""
SMALL = "--rounds=1 --batch=2 --heads=2 --head_dim=4 --masks=window --window=3 --lengths=12"
START = ("model.num_layers=1", "model.width=16", "model.context=16", "batch_size=4", "log.tensorboard=False")
# By benchmark: flags, some of its figures, and a word of its tables.
SMOKE = {
    "attention": (f"{SMALL} --peers=jax.nn", {"title", "seconds", "ratio", "peak_mib"}, "peak memory, MiB"),
    "decoding": ("--sizes=tiny --rounds=1", {"tokens_per_second_tiny_eight", "ratio_tiny"}, "tokens/s"),
    "gpu": (
        "--lengths=24 --head_dims=8 --rounds=1 --masks=documents --only=operator,populations,recurrence",
        {"check_blockwise_documents_d8_bfloat16", "ratio_documents_t24_d8_backward_vs_jax_nn", "wrong"}
        | {"check_recurrence_parallel_resets", "ms_recurrence_decay_backward_attnlab_parallel"}
        | {"tokens_per_second_populations_2", "over_best_documents_t24_d8_forward"},
        "attnlab cudnn is not available: it needs a gpu",
    ),
    "loss": ("--recipes={recipe} {peer} --path={text} --steps=20 --rounds=3", {"ratio_{recipe}"}, "nats"),
    "products": (
        "--sizes=tiny --precisions=float32 --rounds=1",
        {"floor_ms_tiny_float32", "gflop_tiny_float32"},
        "x·y, x [32, 8], y [8, 8]",
    ),
    "recurrence": (
        "--rounds=1 --batch=1 --heads=2 --head_dim=4 --lengths=16 --members=gated_delta",
        {"seconds", "us_a_token"},
        "softmax",
    ),
    "start": (
        " ".join(f"--config.{field}" for field in START) + " --rounds=1",
        {"device", "import_attnlab_s", "start_warm_s", "first_character_cold_s"},
        "from the command, on cpu, JAX",
    ),
    "train": (
        "--sizes=tiny {peer} --precisions=float32 --rounds=1 --seconds=1",
        {"step_ms_tiny_attnlab_float32", "step_over_floor_tiny_attnlab_float32", "ratio_tiny_float32"},
        "× floor",
    ),
}
FAST = ("attention", "decoding")  # the others start processes or compile more


@pytest.fixture
def places(monkeypatch, tmp_path):
    """Adds a tiny size; returns values for the names in flags: a recipe, a text, and flags of a peer."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the GPU benchmark sets it
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setitem(workers.SIZES, "tiny", TINY)
    shape = {"vocab_size": 9, "num_layers": 1, "num_heads": 2, "width": 8, "context": 16}
    monkeypatch.setitem(decoding.SIZES, "tiny", (shape, 6, 8))
    (tmp_path / "mine.py").write_text(RECIPE)
    (tmp_path / "text.txt").write_text("Tell me, O muse, of that ingenious hero. " * 200)
    (tmp_path / "nanoGPT").mkdir()
    (tmp_path / "nanoGPT" / "model.py").touch()
    (tmp_path / "python").write_text(PEER.format(python=sys.executable))
    (tmp_path / "python").chmod(0o755)
    peer = f"--peer_path={tmp_path}/nanoGPT --peer_python={tmp_path}/python"
    return {"recipe": f"{tmp_path}/mine.py", "text": f"{tmp_path}/text.txt", "peer": peer}


def figures_of(folder, *arguments: str) -> dict:
    """The figures that a benchmark writes."""
    assert main(["bench", *arguments, f"--json={folder}/figures.json"]) == 0
    return json.loads((folder / "figures.json").read_text())


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in SMOKE])
def test_benchmark_prints_a_table_and_writes_its_figures(places, tmp_path, capsys, name):
    flags, expected, word = SMOKE[name]
    figures = figures_of(tmp_path, name, *flags.format(**places).split())
    assert {key.format(**places) for key in expected} <= set(figures) and word in capsys.readouterr().out
    assert all(value > 0 for value in figures.values() if isinstance(value, float))
    if name == "train":  # the faster of two stand-ins needs a second for a step
        milliseconds = figures["step_ms_tiny_attnlab_float32"]
        assert figures["ratio_tiny_float32"] == pytest.approx(1000 / milliseconds)


def test_every_benchmark_is_listed_and_has_a_smoke_test(capsys):
    assert main(["bench"]) == 0
    out = capsys.readouterr().out
    assert set(shipped.files("benchmarks")) == set(SMOKE) and all(f"  {name} " in out for name in SMOKE)
    assert main(["bench", "products", "--help"]) == 0
    assert "--rounds: timed blocks of each library (default: 7)" in capsys.readouterr().out


def test_attention_excludes_a_peer_with_another_mask(capsys, monkeypatch, tmp_path):
    """The peer's window is one key too wide, so its outputs differ by more than rounding."""

    def wider(task):
        return peers.ours("dense", task._replace(window=task.window + 1))

    monkeypatch.setitem(peers.PEERS, "jax.nn", ("jax", wider))
    options = ["--dtype=bfloat16", "--peers=jax.nn,attnlab dense", f"--record={tmp_path}"]
    figures = figures_of(tmp_path, "attention", *SMALL.split(), *options)
    assert "jax.nn is left out of window, T = 12: its output differs by" in capsys.readouterr().out
    assert all(set(row) == {"attnlab", "attnlab dense"} and row["attnlab"] == 1 for row in figures["ratio"].values())
    recorded = json.loads((tmp_path / recording.file_name(recording.machine())).read_text())["benchmarks"]["attention"]
    sizes = "window of 3, bfloat16, B = 2, H = 2, D = 4"
    assert list(recorded) == [f"window, T = 12, {which}, {sizes}" for which in ("forward", "forward + backward")]


INVALID = [
    line.format(file=__file__).split(" | ")
    for line in """
atention | unknown benchmark 'atention' (did you mean attention?): use one of attention, decoding
attention --masks=casual | --masks: 'casual' is unknown (did you mean causal?)
gpu --only=operators | --only: 'operators' is unknown (did you mean operator?)
gpu --peer_python=/nowhere | /nowhere cannot be started (No such file or directory)
loss --recipes=quickstart --rounds=2000 | quickstart has 2000 steps
loss --path=nowhere.txt | nowhere.txt
products --record=/nowhere | --record=/nowhere is not a writable folder
recurrence --members=mamba | 'mamba' is unknown
start --config.batch_size=0 | config.batch_size = 0
train --rounds=0 | --rounds=0
train --json={file} | {file} exists
""".strip().splitlines()
]


@pytest.mark.parametrize("command, message", INVALID)
def test_invalid_flag_prints_one_line(capsys, command, message):
    assert main(["bench", *command.split(" ")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1


def test_examples_of_the_harness_run():
    for name in ("memory", "matrix_products", "peers", "recording"):
        module = shipped.module("benchmarks", f"harness.{name}")
        assert doctest.testmod(module, extraglobs={"jnp": jnp, "np": np}).failed == 0
