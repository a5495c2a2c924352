"""Plans: what the command prints, writes and refuses, for this machine and for other hardware."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from unittest import mock

import jax
import pytest

import attnlab
from attnlab import plan
from attnlab.config import completed, default
from attnlab.nn import GPT
from attnlab.planning import plans, topologies
from attnlab.planning.programs import Program
from attnlab.support.errors import UserError
from attnlab.training import flops

TINY = {"model.num_layers": 1, "model.width": 64, "model.num_heads": 2, "model.context": 32}
TINY |= {"batch_size": 8, "data.tokenizer": "byte"}


def config(**changes):
    """A config of a tiny model, with changes: `model__width=32`."""
    options = default()
    options.update_from_flattened_dict(TINY | {field.replace("__", "."): value for field, value in changes.items()})
    return completed(options)


def run(capsys, *options, topology="here", changes=()):
    """Exit code, standard output and standard error of the command in this process."""
    fields = [f"--config.{field}={value}" for field, value in {**TINY, **dict(changes)}.items()]
    code = plan.main(["plan", "--config=quickstart", f"--topology={topology}", *fields, *options])
    out, err = capsys.readouterr()
    return code, out, err


def test_plan_of_this_machine_is_printed_and_written(capsys, tmp_path):
    file = tmp_path / "plan.json"
    code, out, _ = run(capsys, f"--json={file}")
    assert code == 0
    assert out.startswith("quickstart on here: compiled on this machine for 4 devices of kind cpu\n")
    assert "fits             unknown: this device does not report its memory\n" in out
    written = json.loads(file.read_text())
    assert written["mesh"] == {"data": 4, "fsdp": 1, "context": 1, "tensor": 1} and written["devices"] == 4
    assert written["attention"] == {"block_0": "dense"}
    assert written["fits"] is written["device_gib"] is None
    assert 0 < written["training"]["arguments_gib"] < written["training"]["peak_gib"]
    assert 0 < written["evaluation"]["peak_gib"] < written["training"]["peak_gib"]
    # The gradients of all parameters are summed over the devices.
    assert written["collectives"]["all-reduce"][1] >= 4 * written["parameters"]


def compiled(step, lower, parallel, topology):
    """Replaces compiling: a program whose peak is one MiB."""
    return Program(2**18, 2**18, 2**20, 0.0, {}, 0, {}, {}, "")


def training_only(step, *arguments, real=plans._compiled):
    """Replaces compiling, except for the training step."""
    return (real if step == "training" else compiled)(step, *arguments)


def test_work_is_shown_with_its_floor(monkeypatch):
    done = compiled("training", None, None, None)._replace(launches=1234, moved=6 * 10**9)
    monkeypatch.setattr(plans, "_compiled", lambda *_: done)
    topology = topologies.find("here")
    planned = plans.plan(config(model__attention__impl="dense"), topology._replace(tflops=100.0, bandwidth=3.0))
    model = GPT.of(vocab_size=256, num_layers=1, width=64, num_heads=2, context=32)
    assert planned.flops == flops.per_token(model, 32) * 8 * 32 / 4  # on each of four devices
    assert planned.floor == pytest.approx((planned.flops / 100e9, 2.0))
    table = plan.table(planned)
    assert re.search(r"^work +1,234 launches, 6 GB moved, .*\nfloor +2 ms at 3 TB/s, ", table, re.M)


@pytest.mark.slow
def test_split_state_has_smaller_arguments_than_replicated(monkeypatch):
    monkeypatch.setattr(plans, "_compiled", training_only)
    configs = (config(parallel__mesh__fsdp=n) for n in (1, 4))
    whole, split = (plans.plan(each, topologies.find("here")) for each in configs)
    assert split.training.arguments < whole.training.arguments / 2
    # Two moments of the parameters, and a few counters.
    assert whole.optimizer_bytes == pytest.approx(2 * 4 * whole.parameters, abs=64)
    assert split.optimizer_bytes < whole.optimizer_bytes / 2
    assert split.mesh["fsdp"] == 4 and "all-gather" in split.training.collectives


@pytest.mark.parametrize("mib, code, verdict", [(1.5, 0, "yes"), (1.1, 1, "no")])
def test_exit_code_says_whether_run_and_optimizer_fit(capsys, monkeypatch, mib, code, verdict):
    here = topologies.find("here")
    monkeypatch.setattr(topologies, "find", lambda name: here._replace(usable_gib=mib / 1024))
    monkeypatch.setattr(plans, "_compiled", compiled)
    exit_code, out, _ = run(capsys, changes={"model.width": 32})  # moments of 0.16 MiB
    assert (exit_code, re.search(r"^fits +(\w+)$", out, re.M)[1]) == (code, verdict)


def failing(monkeypatch, message):
    """Makes compiling fail."""
    monkeypatch.setattr(jax.stages.Lowered, "compile", mock.Mock(side_effect=jax.errors.JaxRuntimeError(message)))


def test_out_of_memory_still_gives_a_table_and_other_failures_one_line(monkeypatch):
    small = config()
    failing(monkeypatch, "RESOURCE_EXHAUSTED: Ran out of memory: Used 17.5G of 15.75G hbm.")
    planned = plans.plan(small, topologies.find("here"))
    assert planned.fits is False and planned.as_dict()["training"]["peak_gib"] == 17.5
    assert "note: the compiler refuses the training step: Ran out of memory: Used 17.5G of" in plan.table(planned)
    failing(monkeypatch, "\nINTERNAL: Mosaic failed.\nmore")
    with pytest.raises(UserError, match=r"^the training step does not compile for here: INTERNAL: Mosaic failed\.$"):
        plans.plan(small, topologies.find("here"))


@pytest.mark.parametrize(
    "changes, given, size, noted",
    [
        ({}, None, 256, False),
        ({"data__tokenizer": "char"}, None, 128, True),
        ({"data__tokenizer": "bpe", "data__vocab_size": 500}, None, 500, True),
    ],
    ids=str,
)
def test_vocabulary_is_what_the_config_promises(changes, given, size, noted):
    _, vocab_size, notes = plans.vocabulary(config(**changes), given)
    assert (vocab_size, bool(notes)) == (size, noted)


@pytest.mark.parametrize(
    "changes, platform, expected",
    [
        ({}, "tpu", ["dense", "dense"]),
        ({"context": 256}, "tpu", ["splash", "splash"]),
        ({"context": 256, "positions": "alibi", "attention": {"soft_cap": 50.0}}, "tpu", ["blockwise", "blockwise"]),
        ({"context": 256, "dtype": "bfloat16", "attention": {"window": 64}}, "gpu", ["cudnn", "cudnn"]),
        ({"layers": "gru attention", "num_layers": 3}, "cpu", ["gru", "dense", "gru"]),
        ({"layers": "gru"}, "cpu", ["gru", "gru"]),
    ],
    ids=str,
)
def test_attention_is_what_the_operator_would_choose(changes, platform, expected):
    """Layers without attention are listed with their kind instead of a backend."""
    model = GPT.of(**{"vocab_size": 10, "num_layers": 2, "num_heads": 2, "width": 128, "context": 32} | changes)
    topology = topologies.find("here")._replace(platform=platform)
    layers, rejected = plans.attention_of(model, topology, batch=4)
    assert layers == {f"block_{n}": name for n, name in enumerate(expected)}
    others = {*attnlab.implementations()} - {*expected}
    assert {*rejected} == (set() if expected == ["gru", "gru"] else others)


@pytest.mark.parametrize(
    "options, message",
    [
        ([], "--topology is missing"),
        (["--topology=here", "--json=none/x.json"], "--json=none/x.json: the folder none is missing"),
        (["--topology=here", "--json=text"], "--json=text exists: give a new file"),
        (["--topology=here", "--vocab_size=0"], "--vocab_size=0"),
    ],
    ids=str,
)
def test_invalid_option_prints_one_line_and_overwrites_nothing(mistake, monkeypatch, tmp_path, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("mine")
    assert re.match(f"error: {message}", mistake(plan.main, "--config=quickstart", *options))
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"text": "mine"}


def elsewhere(topology, file, *options, **changes):
    """The plan for other hardware, from a subprocess, and what the subprocess printed."""
    fields = [f"--config.{field.replace('__', '.')}={value}" for field, value in changes.items()]
    fields += [f"--config.{field}={value}" for field, value in TINY.items() if field.replace(".", "__") not in changes]
    command = [sys.executable, "-m", "attnlab.plan", "--config=quickstart", f"--topology={topology}"]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [*command, f"--json={file}", *fields, *options], capture_output=True, text=True, env=environment, timeout=580
    )
    assert done.returncode in (0, 1), done.stderr
    return json.loads(file.read_text()), done.stdout


def requires(package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


BIG = {"model__num_layers": 2, "model__context": 256, "model__width": 128, "precision": "bfloat16"}


@pytest.mark.hardware
def test_plan_for_tpus_counts_splash_attention_in_each_loop_iteration(tmp_path):
    requires("libtpu")
    planned, out = elsewhere("v5e:2x2", tmp_path / "plan.json", **BIG | {"model__num_layers": 5, "model__scan": True})
    assert planned["fits"] is True and planned["devices"] == 4
    assert "on v5e:2x2: compiled, but not run, for 4 device" in out
    assert set(planned["attention"].values()) == {"splash"}
    assert planned["unknown_loops"] == 0 and planned["kernels"]["splash_mha_fwd_residuals"] == 5
    # The gradients are bfloat16 or float32.
    assert planned["collectives"]["all-reduce"][1] >= 2 * planned["parameters"]


@pytest.mark.hardware
def test_training_beyond_the_memory_of_a_tpu_is_refused(tmp_path):
    requires("libtpu")
    planned, out = elsewhere("v5e:2x2", tmp_path / "plan.json", **BIG | {"model__context": 1024, "batch_size": 8192})
    assert planned["fits"] is False and planned["device_gib"] == 15.75 and planned["training"]["peak_gib"] > 15.75
    assert re.search(r"^fits +no$", out, re.M) and "note: the compiler refuses the training step: " in out


@pytest.mark.hardware
def test_plan_for_h100s_uses_cudnn_attention(tmp_path):
    requires("jax_plugins")
    if jax.__version_info__ < (0, 12):
        pytest.skip("the CUDA plugin describes H100s since JAX 0.12")
    planned, _ = elsewhere("h100:2", tmp_path / "plan.json", **BIG)
    assert planned["fits"] is True and planned["devices"] == 2
    assert set(planned["attention"].values()) == {"cudnn"}
    assert planned["kernels"]["cudnn_fmhaSoftmax"] == 2
    assert planned["collectives"]["all-reduce"][1] >= 2 * planned["parameters"]
