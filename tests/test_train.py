"""Training runs: files, resuming after signals and kills, extending, and user-defined models."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import attnlab
from attnlab import config as configs
from attnlab import train
from attnlab.data import tokenizers
from attnlab.errors import UserError
from attnlab.training import metrics
from attnlab.training import state as states
from attnlab.training.checkpoints import Checkpoints, sha256

REPOSITORY = Path(__file__).parents[1]
SMALL = [
    f"--config={REPOSITORY}/configs/quickstart.py",
    "--config.steps=40",
    "--config.precision=float32",
    "--config.batch_size=8",
    "--config.model.num_layers=2",
    "--config.model.width=32",
    "--config.model.context=32",
    "--config.model.dropout=0.1",
    "--config.eval.every=10",
    "--config.eval.windows=16",
    "--config.checkpoint.every=8",
    "--config.log.every=2",
    "--config.log.tensorboard=False",
    "--config.sample.every=0",
    "--config.sample.length=8",
]
TIMING = re.compile("time|second|mfu|flops|wall|eta|rss|memory")


def run(workdir, *options):
    return train.main(["train", *SMALL, f"--workdir={workdir}", *options])


def process(workdir, *options, program=("-m", "attnlab.train"), before=()):
    """Start the training command in a process, on one device."""
    command = [*before, sys.executable, *program, *SMALL, f"--workdir={workdir}", *options]
    environment = os.environ | {"XLA_FLAGS": "", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def wait_for(running, pattern):
    """Read lines until one matches; fails when the process ends first."""
    seen = []
    for line in running.stdout:
        seen.append(line)
        if re.search(pattern, line):
            return
    pytest.fail(f"{pattern!r} was not printed: {''.join(seen)}")


def wait_until(condition, within=60):
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def records(workdir):
    """The records without fields that differ between runs with the same seed."""
    lines = (Path(workdir) / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if not TIMING.search(key)} for line in lines]


def kept(workdir):
    return Checkpoints(workdir / "checkpoints").steps()


def contents(folder):
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A finished run in a separate process, and its output."""
    workdir = tmp_path_factory.mktemp("runs") / "undisturbed"
    running = process(workdir)
    out, _ = running.communicate(timeout=300)
    assert running.returncode == 0, out
    return workdir, out


def test_run_prints_summary_and_writes_its_files(undisturbed):
    workdir, out = undisturbed
    assert {path.name for path in workdir.iterdir()} == {
        "config.json",
        "metrics.jsonl",
        "tokenizer.json",
        "checkpoints",
    }
    assert "training tokens" in out and "--- sample at step 40:" in out
    assert re.search(r"done: validation loss \d\.\d{4} \(\d\.\d{3} bits per character, \d\.\d{3} per byte\)", out)
    assert f"python -m attnlab.sample --workdir={workdir}" in out
    saved = json.loads((workdir / "config.json").read_text())
    assert saved["steps"] == 40 and saved["corpus"]["name"] == "python_docs"
    assert len(saved["corpus"]["sha256"]) == 64


def test_metrics_hold_every_record_once(undisturbed):
    found = records(undisturbed[0])
    assert [r["step"] for r in found if r["split"] == "train"] == list(range(2, 41, 2))
    assert [r["step"] for r in found if r["split"] == "val"] == [10, 20, 30, 40]
    assert [r["step"] for r in found if r["split"] == "final"] == [40]
    first, last = found[0], found[-1]
    assert {"loss", "grad_norm", "learning_rate", "bits_per_character", "tokens"} <= first.keys()
    np.testing.assert_allclose(first["bits_per_character"], first["loss"] / np.log(2))  # one token a character
    assert last["loss"] == [r for r in found if r["split"] == "val"][-1]["loss"]
    losses = [r["loss"] for r in found if r["split"] == "val"]
    assert losses[-1] < losses[0] < 6
    assert "tokens_per_second" in json.loads((undisturbed[0] / "metrics.jsonl").read_text().splitlines()[0])


def test_load_finished_run_matches_recorded_digest(undisturbed):
    workdir, _ = undisturbed
    model, params, tokenizer, config = attnlab.load(workdir)
    assert sha256(params["params"]) == records(workdir)[-1]["params_sha256"]
    assert config.model.width == model.width == 32
    logits = model.apply(params, tokenizer.encode("The ")[None])
    assert logits.shape == (1, 4, tokenizer.vocab_size)


def test_best_checkpoint_is_kept_beside_the_newest(undisturbed):
    workdir, _ = undisturbed
    kept = sorted(int(path.name) for path in (workdir / "checkpoints").glob("[0-9]*"))
    assert kept == [32, 40]
    best = min((r for r in records(workdir) if r["split"] == "val" and r["step"] in kept), key=lambda r: r["loss"])
    assert sha256(attnlab.load(workdir, "best").params) == sha256(attnlab.load(workdir, best["step"]).params)


def test_finished_run_started_again_writes_nothing(undisturbed, capsys):
    workdir, _ = undisturbed
    before = contents(workdir)
    assert run(workdir) == 0
    assert "is finished (40 steps): nothing to do" in capsys.readouterr().out
    assert contents(workdir) == before


def test_eval_only_repeats_last_validation_and_writes_nothing(undisturbed, capsys):
    workdir, _ = undisturbed
    before = contents(workdir)
    assert run(workdir, "--eval_only") == 0
    loss = float(re.search(r"validation loss (\d\.\d+)", capsys.readouterr().out)[1])
    np.testing.assert_allclose(loss, records(workdir)[-1]["loss"], atol=5e-5)  # printed to four decimals
    assert contents(workdir) == before


def test_run_killed_and_stopped_repeatedly_is_bit_exact(undisturbed, tmp_path):
    """Killed before the first regular checkpoint and after some, stopped by both signals in between."""
    history = "--config.checkpoint.history=6"  # which the undisturbed run has not
    for number, pattern in (
        (signal.SIGKILL, r"^step 2/"),
        (signal.SIGINT, r"^step 4/"),
        (signal.SIGTERM, r"^step (1[2-9]|2\d)/"),  # a signal may come a few steps late
        (signal.SIGKILL, r"^step 3[4-8]/"),
    ):
        running = process(tmp_path / "run", history)
        wait_for(running, pattern)
        running.send_signal(number)
        out, _ = running.communicate(timeout=60)
        if number != signal.SIGKILL:
            assert running.returncode == 128 + number, out
            assert re.search(r"stopped: step \d+ is saved in .*checkpoints; the same command resumes from there", out)
    newest = max(int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.isdecimal())
    assert newest >= 24
    running = process(tmp_path / "run", history)
    out, _ = running.communicate(timeout=120)
    assert running.returncode == 0 and f"resumed from step {newest}\n" in out, out
    assert records(tmp_path / "run") == records(undisturbed[0])
    assert {0, 1, 3, 7, 17, 40} <= set(kept(tmp_path / "run"))


def test_second_interrupt_during_save_exits_at_once(tmp_path):
    """The first signal's save takes a minute; the previous checkpoint survives."""
    slow = """
import sys, time
from attnlab import train
from attnlab.training.checkpoints import Checkpoints
save = Checkpoints.save
Checkpoints.save = lambda self, state, **metadata: (time.sleep(60 * (state.step > 8)), save(self, state, **metadata))
sys.exit(train.main())"""
    running = process(tmp_path / "run", "--config.steps=100000", "--config.eval.windows=2000000", program=["-c", slow])
    wait_for(running, r"^step 10/")  # the evaluation that follows takes a while
    wait_until(lambda: (tmp_path / "run" / "checkpoints" / "8").exists())
    running.send_signal(signal.SIGINT)
    time.sleep(0.5)
    running.send_signal(signal.SIGINT)
    out, _ = running.communicate(timeout=30)
    assert running.returncode == 130 and "Traceback" not in out and "is saved" not in out, out
    assert Checkpoints(tmp_path / "run" / "checkpoints").newest_intact() == (8, {})


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM], ids=lambda number: number.name
)
def test_signal_while_compiling_exits_without_saving(tmp_path, number):
    """Python's own handlers would wait until XLA has compiled."""
    running = process(tmp_path / "run", "--config.model.num_layers=12")
    wait_for(running, "parameters on 1 cpu device")
    start = time.monotonic()
    running.send_signal(number)
    out, _ = running.communicate(timeout=60)
    assert running.returncode == 128 + number and "stopped before the first step: nothing to save" in out, out
    assert time.monotonic() - start < 10 and not any((tmp_path / "run" / "checkpoints").glob("[0-9]*"))


def stopped_at_40(undisturbed, folder):
    """A copy of the finished run without its final record."""
    shutil.copytree(undisturbed[0], folder)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:-1]))
    return folder


ONE_DEVICE = "--config.parallel.mesh.data=1"


def test_damaged_checkpoint_is_set_aside_and_previous_resumed(undisturbed, tmp_path, capsys):
    workdir = stopped_at_40(undisturbed, tmp_path / "run")
    largest = max((workdir / "checkpoints" / "40").rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 16
    largest.write_bytes(content)
    with pytest.raises(ValueError, match=r"checkpoint 40 in .* is damaged \(.* differs from what was written\)"):
        attnlab.load(workdir)
    assert run(workdir, ONE_DEVICE) == 0
    out = capsys.readouterr().out
    assert re.search(r"checkpoint 40 is damaged \(.* differs from what was written\): set aside as 40.damaged\n", out)
    assert "resumed from step 32" in out
    found, expected = records(workdir), records(undisturbed[0])
    assert [(r["step"], r["split"]) for r in found] == [(r["step"], r["split"]) for r in expected]
    np.testing.assert_allclose([r["loss"] for r in found], [r["loss"] for r in expected], rtol=1e-5)
    assert (workdir / "checkpoints" / "40.damaged").exists()


def test_all_checkpoints_damaged_is_an_error_and_nothing_changes(undisturbed, tmp_path, capsys):
    workdir = stopped_at_40(undisturbed, tmp_path / "run")
    for manifest in workdir.rglob("manifest.json"):
        manifest.unlink()
    before = contents(workdir)
    assert run(workdir, ONE_DEVICE) == 2
    assert re.search("error: every checkpoint in .* is damaged", capsys.readouterr().err)
    assert contents(workdir) == before


def test_missing_checkpoints_are_an_error(undisturbed, tmp_path, capsys):
    workdir = stopped_at_40(undisturbed, tmp_path / "run")
    shutil.rmtree(workdir / "checkpoints")
    assert run(workdir, ONE_DEVICE) == 2
    assert "holds no checkpoint, but the run had reached step 40: restore them" in capsys.readouterr().err


def test_changed_metrics_are_refused_and_missing_ones_reported(undisturbed, tmp_path, capsys):
    workdir = stopped_at_40(undisturbed, tmp_path / "run")
    log = workdir / "metrics.jsonl"
    whole = log.read_text()
    log.write_text(whole.replace("9", "8", 1))
    assert run(workdir, ONE_DEVICE) == 2
    assert "metrics.jsonl is not what it was when step 40 was saved" in capsys.readouterr().err
    log.unlink()
    assert run(workdir, ONE_DEVICE) == 0
    assert "metrics.jsonl is missing: the records up to step 40 are lost" in capsys.readouterr().out
    last, expected = records(workdir)[-1], records(undisturbed[0])[-1]
    assert (last["split"], last["params_sha256"]) == ("final", expected["params_sha256"])
    np.testing.assert_allclose(last["loss"], expected["loss"], rtol=1e-5)  # compiled differently, hence not bit-exact


def test_nonfinite_parameters_end_the_run_unsaved_despite_skip(tmp_path, capsys):
    explosive = ["--config.optimizer.learning_rate=1e20", "--config.on_nonfinite=skip", ONE_DEVICE]
    assert run(tmp_path / "run", *explosive) == 2  # the parameters themselves are not finite
    assert "param_norm is inf at step 1; no checkpoint was saved yet" in capsys.readouterr().err
    assert not any((tmp_path / "run" / "checkpoints").glob("[0-9]*"))


@pytest.fixture
def not_finite_at_13(monkeypatch):
    """Makes the gradient of step 13, and of no other step, NaN."""
    gradients = states.gradients

    def poisoned(model, params, batch, step_key, *args):
        loss, gradient = gradients(model, params, batch, step_key, *args)
        key_13 = jax.random.fold_in(jax.random.key(configs.default().seed), 12)
        poison = jnp.where((jax.random.key_data(step_key) == jax.random.key_data(key_13)).all(), jnp.nan, 0)
        return loss, jax.tree.map(lambda g: g + poison, gradient)

    monkeypatch.setattr(states, "gradients", poisoned)


def test_nonfinite_step_is_skipped_reported_and_counted(not_finite_at_13, tmp_path, capsys):
    options = ["--config.on_nonfinite=skip", "--config.log.every=1", ONE_DEVICE]
    assert run(tmp_path / "run", *options) == 0
    assert "step 13 is skipped: grad_norm is nan (1 skipped in total)" in capsys.readouterr().out
    found = {r["step"]: r for r in records(tmp_path / "run") if r["split"] == "train"}
    assert [found[step]["skipped"] for step in (1, 12, 13, 14, 40)] == [0, 0, 1, 1, 1]
    assert found[13]["grad_norm"] is None and found[13]["param_norm"] == found[12]["param_norm"]
    assert found[14]["param_norm"] != found[13]["param_norm"] and np.isfinite(found[40]["loss"])


def test_nonfinite_step_ends_the_run_at_last_good_checkpoint(not_finite_at_13, tmp_path, capsys):
    for _ in range(2):
        assert run(tmp_path / "run", ONE_DEVICE) == 2
        err = capsys.readouterr().err
        assert re.search("error: grad_norm is nan at step 13; the last good checkpoint is step 8 in .*: lower", err)
        assert Checkpoints(tmp_path / "run" / "checkpoints").newest_intact() == (8, {})


def obeys_permissions():
    """Command prefix that makes file permissions apply to root too."""
    if os.getuid():
        return []
    if not shutil.which("setpriv"):
        pytest.skip("root ignores permissions, and setpriv is not installed (Debian: util-linux)")
    return ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"]


SEVERAL_STARTS = """
import sys
from attnlab import train
print([train.main(["train", *sys.argv[2:], f"--workdir={workdir}"]) for workdir in sys.argv[1].split(",")])"""


def test_unwritable_workdir_is_one_line_unless_finished(undisturbed, tmp_path):
    stopped, finished = stopped_at_40(undisturbed, tmp_path / "stopped"), tmp_path / "finished"
    shutil.copytree(undisturbed[0], finished)
    (tmp_path / "read-only").mkdir()
    everything = [tmp_path, *tmp_path.rglob("*")]
    for path in everything:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = contents(tmp_path)
    workdirs = f"{stopped},{finished},{tmp_path}/read-only/new"
    command = [*obeys_permissions(), sys.executable, "-c", SEVERAL_STARTS, workdirs, *SMALL]
    done = subprocess.run(command, cwd=REPOSITORY, env=os.environ | {"XLA_FLAGS": ""}, capture_output=True, text=True)
    for path in everything:
        path.chmod(0o755)
    first, second = done.stderr.splitlines()
    assert first.startswith(f"error: {stopped}/tokenizer.json cannot be opened for writing (Permission denied)")
    assert second.startswith(f"error: --workdir={tmp_path}/read-only/new cannot be written")
    assert done.stdout.splitlines() == [f"{finished} is finished (40 steps): nothing to do", "[2, 0, 2]"]
    assert contents(tmp_path) == before


def test_two_starts_in_one_workdir_one_trains(tmp_path):
    both = [process(tmp_path / "run", "--config.steps=4") for _ in range(2)]
    outputs = [running.communicate(timeout=120)[0] for running in both]
    codes = [running.returncode for running in both]
    assert 0 in codes and set(codes) <= {0, 2}, outputs
    for code, out in zip(codes, outputs):
        assert code == 0 or (out.count("\n") == 1 and "another process trains there" in out), out
    assert records(tmp_path / "run")[-1]["split"] == "final"


def test_closed_output_pipe_does_not_stop_training(undisturbed, tmp_path):
    """As with `| tee`, which Ctrl-C ends before the run."""
    running = process(tmp_path / "run")
    wait_for(running, r"^step 4/")
    running.stdout.close()
    assert running.wait(timeout=120) == 0
    assert records(tmp_path / "run") == records(undisturbed[0])


@pytest.mark.slow
def test_full_disk_is_one_line_and_the_run_resumes_later(undisturbed, tmp_path):
    """A limit of 10 KiB per file simulates the full disk: the optimizer's metadata alone takes 18.

    Limits near the size of parameter files would not do: that size varies between saves."""
    limited = f"ulimit -f 10; exec {sys.executable} -m attnlab.train {' '.join(SMALL)} --workdir={tmp_path}/run"
    done = subprocess.run(
        ["bash", "-c", limited], cwd=REPOSITORY, env=os.environ | {"XLA_FLAGS": ""}, capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: a checkpoint cannot be written to") and done.stderr.count("\n") == 1
    out, _ = process(tmp_path / "run").communicate(timeout=120)
    assert "no checkpoint was saved yet: starting from the beginning" in out
    assert records(tmp_path / "run") == records(undisturbed[0])


@pytest.fixture(scope="module")
def stopped_at_12(tmp_path_factory):
    """A run on one device, stopped by SIGINT after step 12."""
    workdir = tmp_path_factory.mktemp("runs") / "stopped"
    running = process(workdir)
    wait_for(running, r"^step 12/")
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=60)
    assert running.returncode == 130
    return workdir


@pytest.mark.parametrize(
    "options",
    [
        ["parallel.strategy=pmap", "model.scan=True"],
        ["parallel.mesh.fsdp=4", "model.remat=attention"],
        pytest.param(["parallel.strategy=mesh"], marks=pytest.mark.slow),
        pytest.param(["parallel.mesh.data=2"], marks=pytest.mark.slow),
        pytest.param(["parallel.mesh.fsdp=2", "parallel.mesh.tensor=2"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_run_resumed_on_other_devices_or_with_stacked_layers_has_the_same_losses(
    undisturbed, stopped_at_12, tmp_path, options
):
    """To rounding."""
    shutil.copytree(stopped_at_12, tmp_path / "run")
    assert run(tmp_path / "run", *(f"--config.{option}" for option in options)) == 0
    found, expected = records(tmp_path / "run"), records(undisturbed[0])
    assert [(r["step"], r["split"]) for r in found] == [(r["step"], r["split"]) for r in expected]
    np.testing.assert_allclose([r["loss"] for r in found], [r["loss"] for r in expected], rtol=1e-5)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "options",
    [
        ["precision=bfloat16", "data.tokenizer=bpe", "data.vocab_size=300", "model.positions=alibi", "model.window=8"],
        ["parallel.strategy=pmap", "model.kv_heads=2"],
        ["steps=1"],
        pytest.param(["data.tokenizer=byte", "optimizer.accumulation=2"], marks=SLOW),
        pytest.param(["data.tokenizer=word", "model.positions=learned"], marks=SLOW),
        pytest.param(["data.tokenizer=wordpiece", "model.positions=none"], marks=SLOW),
    ],
    ids=" ".join,
)
def test_options_train_and_sample(tmp_path, options, capsys):
    short = ["--config.steps=10", "--config.sample.every=6"]
    assert run(tmp_path / "run", *short, *(f"--config.{option}" for option in options)) == 0
    sampled = re.findall(r"--- sample at step (\d+):", capsys.readouterr().out)
    assert sampled == (["1"] if "steps=1" in options else ["6", "10"])
    found = metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert found[-1]["split"] == "final" and np.isfinite([r["loss"] for r in found]).all()


@pytest.mark.slow
def test_accumulation_leaves_losses_unchanged(tmp_path):
    assert run(tmp_path / "one", "--config.steps=10") == 0
    assert run(tmp_path / "two", "--config.steps=10", "--config.optimizer.accumulation=2") == 0
    one, two = ([r["loss"] for r in records(tmp_path / name)] for name in ("one", "two"))
    np.testing.assert_allclose(one, two, rtol=1e-5)


def test_failed_run_releases_its_lock(tmp_path, capsys):
    explosive = ["--config.optimizer.learning_rate=1e20", "--config.parallel.mesh.data=1"]
    for _ in range(2):
        assert run(tmp_path / "run", *explosive) == 2
        assert "another process" not in capsys.readouterr().err


SENTENCE = "lo que escribí yo mismo, otra vez y una vez más… 👩‍👧\n"


@pytest.fixture(scope="module")
def own_text_run(tmp_path_factory):
    """A finished run on a text file, with byte-level BPE: its workdir, text and options."""
    folder = tmp_path_factory.mktemp("own-text")
    (folder / "mine.txt").write_text(SENTENCE * 200)
    options = ["--config.data.tokenizer=bpe", "--config.data.vocab_size=280", "--config.steps=3", ONE_DEVICE]
    assert run(folder / "run", f"--config.data.path={folder}/mine.txt", *options) == 0
    return folder / "run", folder / "mine.txt", options


@pytest.fixture
def unfinished_own_text_run(own_text_run, tmp_path):
    """A copy of that run without its final record, and of its text."""
    workdir, text, options = own_text_run
    shutil.copytree(workdir, tmp_path / "run")
    shutil.copy(text, tmp_path / "mine.txt")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    return tmp_path / "run", tmp_path / "mine.txt", options


def test_data_path_alone_selects_that_text(own_text_run):
    workdir = own_text_run[0]
    saved = json.loads((workdir / "config.json").read_text())
    assert saved["data"]["name"] == "text" and saved["corpus"]["characters"] == len(SENTENCE) * 200
    written = (workdir / "tokenizer.json").read_bytes()
    assert saved["vocab_size"] == 280 and saved["tokenizer_sha256"] == hashlib.sha256(written).hexdigest()


def test_changed_text_is_refused_unless_the_run_is_finished(own_text_run, unfinished_own_text_run, capsys):
    workdir, path, options = unfinished_own_text_run
    path.write_text(SENTENCE.replace(",", "!") * 200)
    assert run(own_text_run[0], f"--config.data.path={path}", *options) == 0
    assert run(workdir, f"--config.data.path={path}", *options) == 2
    assert "was trained on a different text" in capsys.readouterr().err


def test_run_resumes_with_its_own_tokenizer_when_its_text_moved(unfinished_own_text_run, monkeypatch):
    workdir, path, options = unfinished_own_text_run
    saved = json.loads((workdir / "config.json").read_text())
    monkeypatch.setattr(tokenizers, "make", None)
    assert run(workdir, f"--config.data.path={path}", *options) == 0
    resumed = json.loads((workdir / "config.json").read_text())
    assert resumed | {"data": resumed["data"] | {"path": saved["data"]["path"]}} == saved
    model, params, tokenizer, _ = attnlab.load(workdir)
    prompt = tokenizer.encode("otra vez 👩‍👧")
    assert tokenizer.decode(prompt) == "otra vez 👩‍👧"
    assert model.apply(params, prompt[None]).shape == (1, len(prompt), 280)


def test_data_path_overrides_data_name(tmp_path):
    config = configs.default()
    config.data.name, config.data.path = "quijote", f"{tmp_path}/mine.txt"
    assert configs.completed(config).data.name == "text" and config.data.name == "quijote"


def test_load_takes_a_step_by_name_or_number(undisturbed):
    workdir, _ = undisturbed
    steps = [attnlab.load(workdir, step).params for step in ("latest", 40, "40")]
    assert len({sha256(params) for params in steps}) == 1
    with pytest.raises(ValueError, match="no checkpoint 39: choose latest, best, or one of"):
        attnlab.load(workdir, 39)
    assert jax.tree.leaves(steps[0])[0].sharding.device_set == {jax.devices()[0]}


# A run's folder alone is enough to resume, evaluate and extend it.


def workdir_alone(workdir, *options):
    return train.main(["train", f"--workdir={workdir}", *options])


def test_workdir_alone_resumes_evaluates_and_leaves_a_finished_run(undisturbed, tmp_path, capsys):
    workdir = stopped_at_40(undisturbed, tmp_path / "run")
    assert workdir_alone(workdir, ONE_DEVICE) == 0
    assert "resumed from step 40" in capsys.readouterr().out
    found, expected = records(workdir)[-1], records(undisturbed[0])[-1]
    assert found["params_sha256"] == expected["params_sha256"]
    before = contents(workdir)
    assert workdir_alone(workdir) == 0
    assert "is finished (40 steps): nothing to do" in capsys.readouterr().out
    assert workdir_alone(workdir, "--eval_only") == 0
    assert "step 40  validation loss" in capsys.readouterr().out
    assert contents(workdir) == before


def test_workdir_alone_without_a_run_asks_for_a_config(tmp_path, capsys):
    for options in ([], ["--config.steps=60"], ["--eval_only"]):
        assert workdir_alone(tmp_path / "none", *options) == 2
        assert "--config is missing: name an experiment" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_workdir_alone_refuses_other_changes(undisturbed, capsys):
    before = contents(undisturbed[0])
    for change, message in (
        ("--config.model.width=64", "config.model.width = 64, there it was 32"),
        ("--config.steps=30", "holds a run of 40 steps, and config.steps = 30 is fewer"),
        ("--config.stpes=60", "has no such field (did you mean steps?)"),
    ):
        assert workdir_alone(undisturbed[0], change) == 2
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1, err
    assert workdir_alone(undisturbed[0], "--eval_only", "--config.steps=60") == 2
    assert "config.steps = 60, there it was 40" in capsys.readouterr().err
    assert contents(undisturbed[0]) == before


class CrashError(Exception):
    """Ends a run in the middle, as a kill would."""


def crash_at(step):
    def on_step(now, metrics):
        if now == step:
            raise CrashError

    return on_step


def quick(**changes):
    """The config of a short run on one device."""
    config = configs.default()
    fields = {"steps": 12, "batch_size": 8, "model.num_layers": 1, "model.width": 16, "model.context": 16}
    fields |= {"model.num_heads": 2, "model.dropout": 0.1, "optimizer.warmup_steps": 4, "parallel.mesh.data": 1}
    fields |= {"eval.every": 5, "eval.windows": 8, "checkpoint.every": 4, "log.every": 2, "log.tensorboard": False}
    fields |= {"sample.every": 0, "sample.length": 2, "log.peak_tflops": 1.0} | changes
    config.update_from_flattened_dict({name.replace("__", "."): value for name, value in fields.items()})
    return config


def best(workdir):
    return min((r for r in records(workdir) if r["split"] == "val"), key=lambda r: r["loss"])["step"]


def test_history_stays_beside_newest_and_best_and_changes_no_bit(tmp_path):
    assert train.train(quick(), tmp_path / "plain") == 0
    assert train.train(quick(checkpoint__history=5), tmp_path / "history") == 0
    assert records(tmp_path / "history") == records(tmp_path / "plain")
    assert set(kept(tmp_path / "history")) == {0, 1, 2, 5, 12} | set(kept(tmp_path / "plain"))


def test_history_begins_with_the_untrained_model(tmp_path):
    assert train.train(quick(checkpoint__history=3), tmp_path / "run") == 0
    first = attnlab.load(tmp_path / "run", step=0).params
    train.train(quick(steps=2), tmp_path / "still", optimizer=optax.sgd(0.0))  # parameters as they were drawn
    assert sha256(first["params"]) == sha256(attnlab.load(tmp_path / "still").params["params"])
    assert len({sha256(attnlab.load(tmp_path / "run", step=step).params["params"]) for step in (0, 1, 12)}) == 3


@pytest.mark.parametrize("crashes", [[1], [6], [3, 9]])
def test_history_of_a_crashed_run_is_the_same(tmp_path, crashes):
    """Before the second checkpoint, and after some; the first attempt may leave step 0 alone."""
    assert train.train(quick(checkpoint__history=5), tmp_path / "whole") == 0
    for step in crashes:
        with pytest.raises(CrashError):
            train.train(quick(checkpoint__history=5), tmp_path / "run", on_step=crash_at(step))
    assert workdir_alone(tmp_path / "run") == 0
    assert records(tmp_path / "run") == records(tmp_path / "whole") and kept(tmp_path / "run") == kept(
        tmp_path / "whole"
    )
    for step in kept(tmp_path / "run"):
        found, expected = (Checkpoints(tmp_path / run / "checkpoints").digests(step) for run in ("run", "whole"))
        assert found == expected


def test_history_outlives_later_starts_without_it_and_extensions(tmp_path):
    with pytest.raises(CrashError):
        train.train(quick(checkpoint__history=5), tmp_path / "run", on_step=crash_at(7))
    assert train.train(quick(checkpoint__history=0, steps=20, checkpoint__keep=1), tmp_path / "run") == 0
    assert set(kept(tmp_path / "run")) == {0, 1, 2, 5, 20} | {best(tmp_path / "run")}


def test_checkpoint_of_step_0_alone_is_no_checkpoint_to_resume_from(tmp_path, capsys):
    assert train.train(quick(checkpoint__history=2), tmp_path / "run") == 0
    log = tmp_path / "run" / "metrics.jsonl"
    log.write_text("".join(line for line in log.read_text().splitlines(True) if '"final"' not in line))
    for step in kept(tmp_path / "run"):
        if step:
            shutil.rmtree(tmp_path / "run" / "checkpoints" / str(step))
    assert workdir_alone(tmp_path / "run") == 2
    assert "holds no checkpoint after step 0, but the run had reached step 12: restore" in capsys.readouterr().err


def test_checkpoint_folder_with_step_0_of_another_run_is_refused(tmp_path):
    folder = str(tmp_path / "checkpoints")
    with pytest.raises(CrashError):
        train.train(quick(checkpoint__history=2, checkpoint__dir=folder), tmp_path / "run", on_step=crash_at(2))
    assert Checkpoints(folder).steps() == [0]
    with pytest.raises(UserError, match="holds checkpoints of another run: choose a new folder"):
        train.train(quick(checkpoint__dir=folder), tmp_path / "other")


@pytest.mark.parametrize(
    ("history", "message"),
    [
        (-1, r"config.checkpoint.history = -1: expected 0 or more"),
        (14, r"config.checkpoint.history = 14: expected at most config.steps \+ 1 = 13, as step 0 counts"),
    ],
)
def test_history_out_of_range_is_one_line(tmp_path, history, message):
    with pytest.raises(UserError, match=message):
        train.train(quick(checkpoint__history=history), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_finished_run_extended_and_crashed_is_bit_exact(tmp_path, capsys):
    """From step 12 to 20, after the learning rate had decayed to 0."""
    whole, crashed = tmp_path / "whole", tmp_path / "crashed"
    assert train.train(quick(), whole) == 0
    shutil.copytree(whole, crashed)
    first = records(whole)
    assert workdir_alone(whole, "--config.steps=20") == 0
    assert re.search(r"extended from 12 to 20 steps: the learning rate was .*, and is", capsys.readouterr().out)
    found = records(whole)
    assert found[: len(first)] == first and first[-1]["split"] == "final"
    assert [r["step"] for r in found if r["split"] == "final"] == [12, 20]
    rates = {r["step"]: r["learning_rate"] for r in found if r["split"] == "train"}
    assert rates[14] > rates[12] and rates[20] < rates[14]
    saved = json.loads((whole / "config.json").read_text())
    assert saved["steps"] == 20 and saved["extensions"] == [{"at_step": 12, "from_steps": 12, "to_steps": 20}]
    assert sha256(attnlab.load(whole).params["params"]) == found[-1]["params_sha256"]

    for step in (14, 18):  # before and after the first checkpoint of the extension
        with pytest.raises(CrashError):
            train.train(quick(steps=20), crashed, on_step=crash_at(step))
    assert workdir_alone(crashed) == 0
    assert records(crashed) == found and json.loads((crashed / "config.json").read_text()) == saved
    before = contents(crashed)
    assert workdir_alone(crashed) == 0 and contents(crashed) == before


def test_run_extended_during_warmup_equals_the_longer_run(tmp_path):
    with pytest.raises(CrashError):
        train.train(quick(), tmp_path / "extended", on_step=crash_at(5))
    assert train.train(quick(steps=20), tmp_path / "extended") == 0
    assert train.train(quick(steps=20), tmp_path / "whole") == 0
    assert records(tmp_path / "extended") == records(tmp_path / "whole")


class Bigram(nn.Module):
    """Logits of the next token by the last one."""

    vocab_size: int = 256

    @nn.compact
    def __call__(self, tokens, deterministic=True, dropout_key=None):
        assert deterministic == (dropout_key is None) and (dropout_key is None or len(dropout_key) == len(tokens))
        return nn.Dense(self.vocab_size)(nn.Embed(self.vocab_size, 8)(tokens))


def test_own_model_optimizer_and_callback_train_and_resume(tmp_path, capsys):
    config = quick(data__tokenizer="byte")
    own = {"model": Bigram(), "optimizer": optax.adam(1e-2)}
    seen = []

    def on_step(step, metrics):
        seen.append(step)
        assert {"loss", "grad_norm", "param_norm"} == set(metrics)
        assert all(value.shape == () and value.dtype == jnp.float32 for value in metrics.values())

    assert train.train(config, tmp_path / "whole", on_step=on_step, **own) == 0
    assert seen == list(range(1, 13)) and "Bigram of 4,352 parameters" in capsys.readouterr().out
    found = records(tmp_path / "whole")
    assert found[-1]["loss"] < found[0]["loss"] and "learning_rate" not in found[0]
    with pytest.raises(CrashError):
        train.train(config, tmp_path / "run", on_step=crash_at(6), **own)
    assert train.train(config, tmp_path / "run", **own) == 0
    assert records(tmp_path / "run") == found

    with pytest.raises(UserError, match="holds a run whose model is Bigram and whose optimizer is user-defined"):
        train.train(config, tmp_path / "run")
    with pytest.raises(
        UserError, match=r"holds a run of a Bigram, and model= gives none: pass its Bigram, load\(…, model=…\)"
    ):
        attnlab.load(tmp_path / "run")
    model, params, tokenizer, _ = attnlab.load(tmp_path / "run", model=Bigram())
    assert sha256(params["params"]) == found[-1]["params_sha256"]
    assert model.apply(params, tokenizer.encode("The ")[None]).shape == (1, 4, 256)


def test_terminal_bar_says_compiling_during_the_first_step(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes the output for a terminal
    shown = []

    def on_step(step, metrics):
        shown.append("compiling" in capsys.readouterr().out)

    assert train.train(quick(steps=2), tmp_path / "run", on_step=on_step) == 0
    assert shown == [True, False]
