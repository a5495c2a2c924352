"""`python -m attnlab.bench`: every benchmark at tiny sizes, and flags that are wrong. No test asserts a time."""

import doctest

import jax.numpy as jnp
import numpy as np
import pytest

from attnlab._benchmarks import decoding
from attnlab.bench import main
from attnlab.support import shipped

SMALL = ["--rounds=1", "--batch=1", "--heads=2", "--head_dim=4"]
TINY_MODEL = {"num_layers": 1, "num_heads": 2, "width": 8, "context": 16}
START = ["model.num_layers=1", "model.width=16", "model.context=16", "batch_size=4", "log.tensorboard=False"]
# By benchmark: flags, some of the figures, and a word of the tables.
SMOKE = {
    "attention": (
        [*SMALL, "--masks=window", "--window=3", "--lengths=12", "--peers=jax.nn"],
        {"title", "seconds", "ratio", "peak_mib"},
        "peak memory, MiB",
    ),
    "decoding": (["--sizes=tiny", "--rounds=1"], {"tokens_per_second_tiny_eight", "ratio_tiny"}, "tokens/s"),
    "gpu": (
        ["--lengths=24", "--head_dims=8", "--rounds=1", "--notrain", "--masks=documents"],
        {"check_blockwise_documents_d8_bfloat16", "ratio_documents_t24_d8_backward_vs_jax_nn", "wrong"},
        "attnlab cudnn is not available: it needs a gpu",
    ),
    "loss": (["--recipes={recipe}", "--path={text}", "--rounds=3"], {"loss_{recipe}", "seconds_{recipe}"}, "nats"),
    "products": (
        ["--sizes=tiny", "--precisions=float32", "--rounds=1"],
        {"floor_ms_tiny_float32", "gflop_tiny_float32"},
        "x·y, x [32, 8], y [8, 8]",
    ),
    "recurrence": ([*SMALL, "--lengths=16", "--members=gated_delta"], {"seconds", "us_a_token"}, "softmax"),
    "start": (
        [*(f"--config.{field}" for field in START), "--rounds=1"],
        {"import_attnlab_s", "start_warm_s", "first_character_cold_s"},
        "from the command",
    ),
    "train": (
        ["--sizes=tiny", "--precisions=float32", "--rounds=1", "--seconds=1"],
        {"step_ms_tiny_attnlab_float32", "step_over_floor_tiny_attnlab_float32", "peak_mib_tiny_attnlab_float32"},
        "× floor",
    ),
}
SLOW = {"loss", "products", "recurrence", "start"}  # they start processes, or compile most


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in SMOKE])
def test_benchmark_prints_a_table_and_writes_its_figures(
    request, monkeypatch, tiny, recipe, text, figures_of, capsys, name
):
    monkeypatch.setitem(decoding.SIZES, "tiny", ({"vocab_size": 9, **TINY_MODEL}, 6, 8))
    if name == "train":
        request.getfixturevalue("in_process")
    flags, expected, word = SMOKE[name]
    paths = {"recipe": recipe(), "text": text}
    figures = figures_of(name, *(flag.format(**paths) for flag in flags))
    assert {key.format(**paths) for key in expected} <= set(figures) and word in capsys.readouterr().out
    assert all(value > 0 for value in figures.values() if isinstance(value, float))
    assert not any(key.startswith("ratio") for key in figures) or name not in ("loss", "train")  # without a peer


def test_every_benchmark_is_listed_and_has_a_smoke_test(capsys):
    assert main(["bench"]) == 0
    out = capsys.readouterr().out
    assert set(shipped.files("benchmarks")) == set(SMOKE) and all(f"  {name} " in out for name in SMOKE)
    assert main(["bench", "products", "--help"]) == 0
    assert "--rounds: timed blocks of each library (default: 7)" in capsys.readouterr().out


INVALID = [
    line.format(file=__file__).split(" | ")
    for line in """
atention | unknown benchmark 'atention' (did you mean attention?): use one of attention, decoding
attention --round=3 | Unknown command line flag 'round'. Did you mean: rounds ?
attention --lengths=a | --lengths=a
attention --masks=casual | --masks: 'casual' is unknown (did you mean causal?)
attention --peers= | --peers is empty
attention --json=/nowhere/x.json | --json=/nowhere/x.json: there is no folder /nowhere
gpu --peak_tflops=-1 | --peak_tflops=-1.0
gpu --peer_python=/nowhere | /nowhere cannot be started (No such file or directory)
loss --recipes=speedrun:slow | speedrun:slow is unknown
loss --recipes=quickstart --rounds=2000 | quickstart has 2000 steps
loss --path=nowhere.txt | nowhere.txt
recurrence --members=mamba | 'mamba' is unknown
start --config.batch_size=0 | config.batch_size = 0
train --sizes=smal | --sizes: 'smal' is unknown (did you mean small?)
train --rounds=0 | --rounds=0
train --peer_path=/nowhere | --peer_path=/nowhere has no model.py
train --json={file} | {file} exists
""".strip().splitlines()
]


@pytest.mark.parametrize("command, message", INVALID)
def test_invalid_flag_is_one_line(error_line, command, message):
    assert message in error_line(*command.split(" "))


@pytest.mark.parametrize("name", ["memory", "matrix_products", "peers", "recording"])
def test_examples_of_the_harness_run(name):
    names = {"jnp": jnp, "np": np}
    module = shipped.module("benchmarks", f"harness.{name}")
    assert doctest.testmod(module, extraglobs=names).failed == 0


@pytest.mark.parametrize("name", sorted(SMOKE.keys() - {"gpu"}))
def test_record_in_a_missing_folder_is_one_line(error_line, tmp_path, name):
    assert f"--record={tmp_path}/none is not a folder" in error_line(name, f"--record={tmp_path}/none")


def test_peer_python_without_torch_is_one_line(error_line, peer):
    checkout, python = peer(has_torch=False)
    assert "has no torch" in error_line("train", checkout, python)
    assert "--peer_python=/no/python cannot be started" in error_line("train", checkout, "--peer_python=/no/python")


def test_loss_of_a_recipe_that_packs_documents_is_refused(recipe, error_line):
    message = "the race is with config.data.packing='stream'"
    assert message in error_line("loss", f"--recipes={recipe('documents')}")


@pytest.mark.slow
@pytest.mark.parametrize("reached", [False, True], ids=["missed", "reached"])
def test_loss_is_timed_where_the_peers_loss_is_reached(recipe, text, peer, figures_of, capsys, reached):
    """The stand-ins' loss is out of reach of nine steps, or above any."""
    name, loss = recipe(), 9 if reached else 1
    figures = figures_of("loss", f"--recipes={name}", *peer(loss=loss), f"--path={text}", "--steps=20", "--rounds=3")
    assert figures["tokens_nanoGPT compiled"] == 20 * 12 * 64 and figures[f"tokens_{name}"] == 9 * 4 * 8
    seconds = figures["seconds_nanoGPT compiled"], figures["seconds_nanoGPT autocast compiled"]
    assert seconds == (19, 19 / 4) and 1 < figures[f"loss_{name}"] < 5  # ln 20 letters is 3
    ratios = [figures.get(f"ratio_{name}"), figures.get(f"ratio_{name}_over_autocast")]
    assert ratios == ([pytest.approx(each / figures[f"seconds_{name}"]) for each in seconds] if reached else [None] * 2)
    assert ("not reached" in capsys.readouterr().out.replace("\n", " ")) != reached


def test_train_compares_each_precision_with_the_faster_nanogpt_of_its_own(in_process, peer, figures_of):
    """The peer's stand-in is twice as fast compiled, and four times as fast under autocast."""
    figures = figures_of("train", in_process, *peer(), "--rounds=1", "--seconds=1")
    milliseconds = figures["step_ms_tiny_attnlab_bfloat16"]
    assert figures["step_ms_tiny_nanoGPT"] == 2000 and figures["tokens_per_second_tiny_nanoGPT"] == 4 * 8 / 2
    assert figures["ratio_tiny_bfloat16"] == pytest.approx(1000 / milliseconds)
    assert figures["ratio_tiny_bfloat16_over_autocast"] == pytest.approx(250 / milliseconds)
    assert figures["ratio_tiny_float32"] == pytest.approx(1000 / figures["step_ms_tiny_attnlab_float32"])
    assert "ratio_tiny_float32_over_autocast" not in figures


def test_train_peer_that_fails_is_one_line(in_process, peer, error_line):
    error = error_line("train", in_process, *peer(dies_of="train"), "--precisions=float32", "--nocompiled")
    assert "nanogpt.py" in error and error.endswith("ended: RuntimeError: no more\n")
