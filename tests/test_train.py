"""Training runs: their files, and resuming and extending them after crashes, signals, kills and damage."""

import contextlib
import gzip
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import attnlab
from attnlab import train
from attnlab.support.errors import UserError
from attnlab.training.checkpoints import sha256
from attnlab.training.program import TrainProgram
from attnlab.training.run import resolve
from tests import runs
from tests.nn.user_parts import SOURCE

pytestmark = pytest.mark.usefixtures("shared_programs")


@pytest.fixture
def undisturbed():
    return runs.finished()[0]


# --- what a run leaves


def test_run_prints_summary_and_writes_its_files():
    workdir, out = runs.finished()
    files = {"config.json", "metrics.jsonl", "tokenizer.json", "checkpoints"}
    assert {path.name for path in workdir.iterdir()} == files
    assert "training tokens" in out and "--- sample at step 12:" in out
    assert re.search(r"done: validation loss \d\.\d{4} \(\d\.\d{3} bits per character, \d\.\d{3} per byte\)", out)
    assert f"attnlab sample --workdir={workdir}" in out
    saved = json.loads((workdir / "config.json").read_text())
    assert saved["steps"] == 12 and saved["corpus"]["name"] == "python_docs"
    assert len(saved["corpus"]["sha256"]) == 64


def test_metrics_hold_every_record_once(undisturbed):
    records = runs.records(undisturbed)
    assert [r["step"] for r in records if r["split"] == "train"] == list(range(2, 13, 2))
    assert [r["step"] for r in records if r["split"] == "val"] == [5, 10, 12]
    assert [r["step"] for r in records if r["split"] == "final"] == [12]
    first, last = records[0], records[-1]
    assert {"loss", "grad_norm", "learning_rate", "bits_per_character", "tokens"} <= first.keys()
    np.testing.assert_allclose(first["bits_per_character"], first["loss"] / np.log(2))  # one token per character
    assert last["loss"] == [r for r in records if r["split"] == "val"][-1]["loss"]
    losses = [r["loss"] for r in records if r["split"] == "val"]
    assert losses[-1] < losses[0] < 6
    first_line = json.loads((undisturbed / "metrics.jsonl").read_text().splitlines()[0])
    assert first_line["tokens_per_second"] > 0 and first_line["host_peak_memory_bytes"] > 50_000_000


def test_load_takes_the_newest_the_best_or_a_numbered_checkpoint(undisturbed, tmp_path):
    model, params, tokenizer, config = attnlab.load(undisturbed)
    assert sha256(params["params"]) == runs.records(undisturbed)[-1]["params_sha256"]
    assert jax.tree.leaves(params)[0].sharding.device_set == {jax.devices()[0]}
    assert config.model.width == model.config.width == 16
    logits = jax.eval_shape(model.apply, params, tokenizer.encode("The ")[None])
    assert logits.shape == (1, 4, tokenizer.vocab_size)
    assert {sha256(attnlab.load(undisturbed, step).params) for step in (12, "12")} == {sha256(params)}
    with pytest.raises(ValueError, match="no checkpoint 11"):
        attnlab.load(undisturbed, 11)
    assert runs.kept(undisturbed) == [8, 12]
    assert sha256(attnlab.load(undisturbed, "best").params) == sha256(params)  # step 8 has no validation loss
    (runs.unfinished(tmp_path / "copy") / "metrics.jsonl").unlink()
    assert sha256(attnlab.load(tmp_path / "copy", "best").params) == sha256(params)


def test_finished_run_started_again_or_evaluated_writes_nothing(undisturbed, capsys):
    before = runs.contents(undisturbed)
    for start in (runs.run, runs.workdir_alone):
        assert start(undisturbed) == 0
        assert "is finished (12 steps): nothing to do" in capsys.readouterr().out
        assert start(undisturbed, "--eval_only") == 0
        loss = float(re.search(r"step 12  validation loss (\d\.\d+)", capsys.readouterr().out)[1])
        np.testing.assert_allclose(loss, runs.records(undisturbed)[-1]["loss"], atol=5e-5)  # printed to four decimals
    assert runs.contents(undisturbed) == before


@pytest.fixture(scope="module")
def with_history(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "history"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        train.train(runs.quick(checkpoint__history=5, log__profile="3:4", sample__every=8), workdir)
    assert re.findall(r"--- sample at step (\d+):", out.getvalue()) == ["8", "12"]
    return workdir


def test_profile_has_the_requested_steps(with_history):
    (trace,) = (with_history / "profile").glob("plugins/profile/*/*.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert {event["args"]["step_num"] for event in events if event.get("name") == "train"} == {"3", "4"}


def test_failing_sample_does_not_change_the_records(tmp_path, undisturbed, monkeypatch, capsys):
    monkeypatch.setattr("attnlab.training.members.generate", lambda *_, **__: (1 / 0 for _ in "a"))
    train.train(runs.quick(sample__every=8), tmp_path)
    assert "no sample at step 12 (division by zero)" in capsys.readouterr().out
    assert runs.records(tmp_path) == runs.records(undisturbed)


def test_history_begins_untrained_and_changes_no_bit(undisturbed, with_history):
    assert runs.records(with_history) == runs.records(undisturbed)
    assert set(runs.kept(with_history)) == {0, 1, 2, 5, 12} | set(runs.kept(undisturbed))
    first = attnlab.load(with_history, step=0)
    untrained = TrainProgram(resolve(runs.quick()).config, first.tokenizer.vocab_size).create_state()
    assert sha256(first.params["params"]) == sha256(untrained.params)
    assert len({sha256(attnlab.load(with_history, step=step).params["params"]) for step in (0, 1, 12)}) == 3


# --- resuming


@pytest.fixture(scope="module")
def stopped_at_6(tmp_path_factory):
    """A run with a history that crashed when only step 0 was saved, and was then stopped by SIGTERM after step 6."""
    workdir = tmp_path_factory.mktemp("runs") / "stopped"

    def on_step(step, metrics):
        if step == 6:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(runs.CrashError):
        train.train(runs.quick(checkpoint__history=5), workdir, on_step=runs.crash_at(1))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        stopped = train.train(runs.quick(checkpoint__history=5), workdir, on_step=on_step)
    assert (stopped.signal, stopped.loss, stopped.records[-1]["step"]) == (signal.SIGTERM, None, 6)
    said = r"stopped: step 6 is saved in .*checkpoints; the same command resumes from there"
    assert re.search(said, out.getvalue())
    return workdir


def test_run_stopped_by_a_signal_resumes_bit_for_bit(undisturbed, with_history, stopped_at_6, tmp_path, capsys):
    shutil.copytree(stopped_at_6, tmp_path / "run")
    assert runs.run(tmp_path / "run") == 0
    assert "resumed from step 6\n" in capsys.readouterr().out
    assert runs.records(tmp_path / "run") == runs.records(undisturbed)
    assert runs.same_checkpoints(tmp_path / "run", with_history)


def test_run_resumed_in_another_layout_has_the_same_losses(undisturbed, stopped_at_6, tmp_path):
    """The other layout has other devices and stacked layers; losses are equal up to rounding."""
    shutil.copytree(stopped_at_6, tmp_path / "run")
    options = runs.flags({"parallel.strategy": "pmap", "parallel.mesh.data": -1, "model.scan": True})
    assert runs.run(tmp_path / "run", *options) == 0
    actual, expected = runs.records(tmp_path / "run"), runs.records(undisturbed)
    assert [(r["step"], r["split"]) for r in actual] == [(r["step"], r["split"]) for r in expected]
    np.testing.assert_allclose([r["loss"] for r in actual], [r["loss"] for r in expected], rtol=1e-5)


def test_step_0_alone_and_checkpoints_of_another_run_are_not_resumed(with_history, tmp_path, capsys):
    workdir = runs.unfinished(tmp_path / "run", with_history)
    for step in runs.kept(workdir)[1:]:
        shutil.rmtree(workdir / "checkpoints" / str(step))
    assert runs.kept(workdir) == [0] and runs.workdir_alone(workdir) == 2
    assert "holds no checkpoint after step 0, but the run had reached step 12" in capsys.readouterr().err
    with pytest.raises(UserError, match="checkpoints of another run"):
        train.train(runs.quick(checkpoint__dir=f"{workdir}/checkpoints"), tmp_path / "other")


SIGNALS_ITSELF = """
import os, sys, time
from attnlab import train

number, at = int(sys.argv.pop(1)), int(sys.argv.pop(1))

def on_step(step, metrics):
    if step == at:
        time.sleep(0.5)  # the checkpoint before is on disk
        os.kill(os.getpid(), number)
        time.sleep(0.5)  # a thread receives it

sys.exit(train.main(on_step=on_step))"""


@pytest.mark.slow
def test_processes_stopped_and_killed_without_a_reader_are_bit_exact(undisturbed, with_history, tmp_path, capsys):
    """The process that reads the pipe ends first, like `tee` in `| tee`, which Ctrl-C ends before the run."""
    history = "--config.checkpoint.history=5"
    running = runs.process(tmp_path / "run", history, program=["-c", SIGNALS_ITSELF, f"{signal.SIGTERM:d}", "6"])
    out, _ = running.communicate(timeout=60)
    assert running.returncode == 128 + signal.SIGTERM, out
    running = runs.process(tmp_path / "run", program=["-c", SIGNALS_ITSELF, f"{signal.SIGKILL:d}", "11"])
    runs.wait_for(running, "^resumed from step 6$")
    running.stdout.close()
    assert running.wait(timeout=60) == -signal.SIGKILL
    newest = max(runs.kept(tmp_path / "run"))
    assert runs.records(tmp_path / "run")[-1]["step"] == 10 and newest in (6, 8)
    assert runs.run(tmp_path / "run") == 0
    assert f"resumed from step {newest}\n" in capsys.readouterr().out
    assert runs.records(tmp_path / "run") == runs.records(undisturbed)
    assert runs.same_checkpoints(tmp_path / "run", with_history)


@pytest.mark.slow
def test_killed_hybrid_with_a_custom_layer_is_bit_exact(tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE)
    hybrid = runs.flags({"model.num_layers": 3, "model.layers": "Average gated_delta attention"})
    hybrid.append(f"--import={tmp_path}/mine.py")
    for workdir, program, code in (
        ("whole", ["-m", "attnlab.train"], 0),
        ("run", ["-c", SIGNALS_ITSELF, f"{signal.SIGKILL:d}", "6"], -signal.SIGKILL),
        ("run", ["-m", "attnlab.train"], 0),
    ):
        running = runs.process(tmp_path / workdir, *hybrid, program=program)
        out, _ = running.communicate(timeout=300)
        assert running.returncode == code, out
    assert "resumed from step 4\n" in out
    assert runs.records(tmp_path / "run") == runs.records(tmp_path / "whole")
    assert runs.same_checkpoints(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
def test_signal_while_compiling_ends_the_process(tmp_path):
    """A signal handler in Python would run only after XLA has compiled."""
    running = runs.process(tmp_path / "run", "--config.model.num_layers=12")
    runs.wait_for(running, "parameters on 1 cpu device")
    start = time.monotonic()
    running.send_signal(signal.SIGINT)
    out, _ = running.communicate(timeout=60)
    assert running.returncode == -signal.SIGINT and "Traceback" not in out, out
    assert time.monotonic() - start < 10 and not any((tmp_path / "run" / "checkpoints").glob("[0-9]*"))


# --- damage, full disks, permissions


def test_damaged_checkpoint_is_set_aside_and_previous_resumed(undisturbed, tmp_path, capsys):
    workdir = runs.unfinished(tmp_path / "run")
    largest = max((workdir / "checkpoints" / "12").rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 16
    largest.write_bytes(content)
    with pytest.raises(ValueError, match=r"checkpoint 12 in .*differs"):
        attnlab.load(workdir)
    assert runs.run(workdir) == 0
    out = capsys.readouterr().out
    assert re.search(r"checkpoint 12 is damaged \(.* differs from what was written\): set aside as 12.damaged\n", out)
    assert "resumed from step 8" in out
    assert runs.records(workdir) == runs.records(undisturbed)
    assert (workdir / "checkpoints" / "12.damaged").exists()


def test_changed_metrics_are_refused_and_missing_ones_reported(undisturbed, tmp_path, capsys):
    workdir = runs.unfinished(tmp_path / "run")
    log = workdir / "metrics.jsonl"
    whole = log.read_text()
    log.write_text(whole.replace("9", "8", 1))
    assert runs.run(workdir) == 2
    assert "metrics.jsonl has changed since step 12 was saved" in capsys.readouterr().err
    log.unlink()
    assert runs.run(workdir) == 0
    assert "metrics.jsonl is missing: the records up to step 12 are lost" in capsys.readouterr().out
    assert runs.records(workdir) == runs.records(undisturbed)[-2:]


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


@pytest.mark.slow
def test_unwritable_workdir_prints_one_line_unless_finished(undisturbed, tmp_path):
    stopped = runs.unfinished(tmp_path / "stopped")
    done_before = shutil.copytree(undisturbed, tmp_path / "finished")
    (tmp_path / "read-only").mkdir()
    everything = [tmp_path, *tmp_path.rglob("*")]
    for path in everything:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = runs.contents(tmp_path)
    workdirs = f"{stopped},{done_before},{tmp_path}/read-only/new"
    command = [*obeys_permissions(), sys.executable, "-c", SEVERAL_STARTS, workdirs, *runs.SMALL]
    done = subprocess.run(command, cwd=runs.REPOSITORY, capture_output=True, text=True)
    for path in everything:
        path.chmod(0o755)
    first, second = done.stderr.splitlines()
    assert first.startswith(f"error: --workdir={stopped} cannot be written (Permission denied)")
    assert second.startswith(f"error: --workdir={tmp_path}/read-only/new cannot be written")
    told = [line for line in done.stdout.splitlines() if line.startswith((str(done_before), "["))]
    assert told == [f"{done_before} is finished (12 steps): nothing to do", "[2, 0, 2]"]
    assert runs.contents(tmp_path) == before


@pytest.mark.slow
def test_full_disk_prints_one_line_and_the_run_resumes_later(undisturbed, tmp_path):
    """A limit of 10 KiB per file simulates the full disk: the optimizer's metadata alone takes more.

    A limit near the size of the parameter files would not work, because that size varies between saves."""
    command = " ".join([sys.executable, "-m", "attnlab.train", *runs.SMALL, f"--workdir={tmp_path}/run"])
    command = ["bash", "-c", f"ulimit -f 10; exec {command}"]
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"}  # its entries exceed the limit, too
    done = subprocess.run(command, cwd=runs.REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: a checkpoint cannot be written to") and done.stderr.count("\n") == 1
    out, _ = runs.process(tmp_path / "run").communicate(timeout=120)
    assert "no checkpoint was saved yet: starting from the beginning" in out
    assert runs.records(tmp_path / "run") == runs.records(undisturbed)


# --- a run's folder alone is enough to resume, evaluate and extend it


def test_workdir_alone_refuses_other_changes(undisturbed, tmp_path, capsys):
    before = runs.contents(undisturbed)
    for workdir, options, message in (
        (tmp_path / "none", ["--config.steps=60"], "--config is missing"),
        (undisturbed, ["--config.model.width=64"], "config.model.width = 64, .* 16"),
        (undisturbed, ["--config.steps=11"], "12 steps, .*config.steps = 11"),
        (undisturbed, ["--config.stpes=60"], "--config.stpes .*did you mean steps"),
        (undisturbed, ["--eval_only", "--config.steps=60"], "config.steps = 60, but it was 12"),
    ):
        assert runs.workdir_alone(workdir, *options) == 2
        err = capsys.readouterr().err
        assert re.search(message, err) and err.count("\n") == 1, err
    assert runs.contents(undisturbed) == before and not (tmp_path / "none").exists()


@pytest.mark.slow
def test_run_extended_during_warmup_equals_the_longer_run(tmp_path):
    """It also keeps its history."""
    options, model = {"steps": 20, "checkpoint__keep": 1, "checkpoint__every": 10}, runs.Bigram()
    with pytest.raises(runs.CrashError):
        train.train(runs.quick(checkpoint__history=5), tmp_path / "run", model=model, on_step=runs.crash_at(7))
    train.train(runs.quick(checkpoint__history=0, **options), tmp_path / "run", model=model)
    train.train(runs.quick(**options), tmp_path / "whole", model=model)
    assert runs.records(tmp_path / "run") == runs.records(tmp_path / "whole")
    assert set(runs.kept(tmp_path / "run")) == {0, 1, 2, 5} | set(runs.kept(tmp_path / "whole"))


def test_finished_run_extended_and_crashed_is_bit_exact(undisturbed, tmp_path, capsys):
    """The run is extended from step 12 to 20, after its learning rate had decayed to 0."""
    whole, crashed = (shutil.copytree(undisturbed, tmp_path / name) for name in ("whole", "crashed"))
    first = runs.records(whole)
    assert runs.workdir_alone(whole, "--config.steps=20") == 0
    assert re.search(r"extended from 12 to 20 steps: the learning rate was .*, and is", capsys.readouterr().out)
    records = runs.records(whole)
    assert records[: len(first)] == first and first[-1]["split"] == "final"
    assert [r["step"] for r in records if r["split"] == "final"] == [12, 20]
    rates = {r["step"]: r["learning_rate"] for r in records if r["split"] == "train"}
    assert rates[14] > rates[12] and rates[20] < rates[14]
    assert rates[2] == pytest.approx(0.005 * 2 / 5)  # the second of four warmup steps; the peak is the fifth
    saved = json.loads((whole / "config.json").read_text())
    assert saved["steps"] == 20 and saved["extensions"] == [{"at_step": 12, "from_steps": 12, "to_steps": 20}]
    assert sha256(attnlab.load(whole).params["params"]) == records[-1]["params_sha256"]

    for step in (14, 18):  # before and after the first checkpoint of the extension
        with pytest.raises(runs.CrashError):
            train.train(runs.quick(steps=20), crashed, on_step=runs.crash_at(step))
    assert runs.workdir_alone(crashed) == 0
    assert runs.records(crashed) == records and json.loads((crashed / "config.json").read_text()) == saved
