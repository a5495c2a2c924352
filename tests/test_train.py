"""Training runs: files, resuming after signals and kills, extending, and user-defined models."""

import contextlib
import gzip
import hashlib
import io
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
import orbax.checkpoint as ocp
import pytest

import attnlab
from attnlab import config as configs
from attnlab import train
from attnlab.data import tokenizers
from attnlab.support.errors import UserError
from attnlab.training import metrics
from attnlab.training import run as runs
from attnlab.training import state as states
from attnlab.training.checkpoints import Checkpoints, sha256
from attnlab.training.experiment import Experiment

REPOSITORY = Path(__file__).parents[1]
FIELDS = {
    "steps": 12, "precision": "float32", "batch_size": 8, "parallel.mesh.data": 1, "optimizer.warmup_steps": 4,
    "model.num_layers": 1, "model.num_heads": 2, "model.width": 16, "model.context": 16, "model.dropout": 0.1,
    "eval.every": 5, "eval.windows": 8, "checkpoint.every": 4, "sample.every": 0, "sample.length": 2,
    "log.every": 2, "log.tensorboard": False, "log.peak_tflops": 1.0,
}  # fmt: skip


def flags(fields):
    return [f"--config.{name}={value}" for name, value in fields.items()]


SMALL = [f"--config={REPOSITORY}/configs/quickstart.py", *flags(FIELDS)]
# So long that a signal arrives in the middle.
LONG = {"steps": 40, "model.num_layers": 2, "model.width": 32, "model.context": 32, "model.num_heads": 4}
LONG = flags(LONG | {"eval.every": 10, "eval.windows": 16, "checkpoint.every": 8})
TIMING = re.compile("time|second|mfu|flops|wall|eta|rss|memory")


def run(workdir, *options):
    return train.main(["train", *SMALL, f"--workdir={workdir}", *options])


def process(workdir, *options, program=("-m", "attnlab.train")):
    """Start the training command in a process, which compiles as this one does."""
    command = [sys.executable, *program, *SMALL, f"--workdir={workdir}", *options]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=REPOSITORY, env=os.environ | {"PYTHONUNBUFFERED": "1"}, **output)


def wait_for(running, pattern):
    """Read lines until one matches; fails when the process ends first."""
    seen = []
    for line in running.stdout:
        seen.append(line)
        if re.search(pattern, line):
            return
    pytest.fail(f"{pattern!r} was not printed: {''.join(seen)}")


def records(workdir):
    """The records without fields that differ between runs with the same seed."""
    lines = (Path(workdir) / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if not TIMING.search(key)} for line in lines]


def kept(workdir):
    return Checkpoints(workdir / "checkpoints").steps()


def contents(folder):
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(autouse=True, scope="module")
def shared_programs():
    """Later runs of this process with the same model, optimizer and devices take the traced steps of the first one.

    Tracing them is most of a start's time. What a new process computes is tested with processes.
    """
    first = {}

    def experiment(config, vocab_size, *, parallel, extensions, **own):
        made = Experiment(config, vocab_size, parallel=parallel, extensions=extensions, **own)
        fields = {name: value for name, value in made.config.to_dict().items() if name not in NOT_COMPILED}
        key = (json.dumps(fields), vocab_size, str(extensions), *own.values(), states.gradients)
        like = first.setdefault(key, made)
        vars(made).update({"_init": like._init, "train_step": like.train_step, "eval_step": like.eval_step})
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "Experiment", experiment)
        yield


NOT_COMPILED = ("checkpoint", "eval", "log", "sample", "init_from")


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
    files = {"config.json", "metrics.jsonl", "tokenizer.json", "checkpoints"}
    assert {path.name for path in workdir.iterdir()} == files
    assert "training tokens" in out and "--- sample at step 12:" in out
    assert re.search(r"done: validation loss \d\.\d{4} \(\d\.\d{3} bits per character, \d\.\d{3} per byte\)", out)
    assert f"attnlab sample --workdir={workdir}" in out
    saved = json.loads((workdir / "config.json").read_text())
    assert saved["steps"] == 12 and saved["corpus"]["name"] == "python_docs"
    assert len(saved["corpus"]["sha256"]) == 64


def test_metrics_hold_every_record_once(undisturbed):
    found = records(undisturbed[0])
    assert [r["step"] for r in found if r["split"] == "train"] == list(range(2, 13, 2))
    assert [r["step"] for r in found if r["split"] == "val"] == [5, 10, 12]
    assert [r["step"] for r in found if r["split"] == "final"] == [12]
    first, last = found[0], found[-1]
    assert {"loss", "grad_norm", "learning_rate", "bits_per_character", "tokens"} <= first.keys()
    np.testing.assert_allclose(first["bits_per_character"], first["loss"] / np.log(2))  # one token a character
    assert last["loss"] == [r for r in found if r["split"] == "val"][-1]["loss"]
    losses = [r["loss"] for r in found if r["split"] == "val"]
    assert losses[-1] < losses[0] < 6
    told = json.loads((undisturbed[0] / "metrics.jsonl").read_text().splitlines()[0])
    assert told["tokens_per_second"] > 0 and told["host_peak_memory_bytes"] > 50_000_000


def test_load_finished_run_matches_recorded_digest_and_takes_a_step_by_name_or_number(undisturbed):
    workdir, _ = undisturbed
    model, params, tokenizer, config = attnlab.load(workdir)
    assert sha256(params["params"]) == records(workdir)[-1]["params_sha256"]
    assert jax.tree.leaves(params)[0].sharding.device_set == {jax.devices()[0]}
    assert config.model.width == model.width == 16
    logits = jax.eval_shape(model.apply, params, tokenizer.encode("The ")[None])
    assert logits.shape == (1, 4, tokenizer.vocab_size)
    assert {sha256(attnlab.load(workdir, step).params) for step in (12, "12")} == {sha256(params)}
    with pytest.raises(ValueError, match="no checkpoint 11"):
        attnlab.load(workdir, 11)


def test_best_checkpoint_is_kept_beside_the_newest(undisturbed):
    workdir, _ = undisturbed
    assert kept(workdir) == [8, 12]
    best = min((r for r in records(workdir) if r["split"] == "val" and r["step"] in (8, 12)), key=lambda r: r["loss"])
    assert sha256(attnlab.load(workdir, "best").params) == sha256(attnlab.load(workdir, best["step"]).params)


def test_finished_run_started_again_or_evaluated_writes_nothing(undisturbed, capsys):
    workdir, _ = undisturbed
    before = contents(workdir)
    for start in (run, workdir_alone):
        assert start(workdir) == 0
        assert "is finished (12 steps): nothing to do" in capsys.readouterr().out
    for start in (run, workdir_alone):
        assert start(workdir, "--eval_only") == 0
        loss = float(re.search(r"step 12  validation loss (\d\.\d+)", capsys.readouterr().out)[1])
        np.testing.assert_allclose(loss, records(workdir)[-1]["loss"], atol=5e-5)  # printed to four decimals
    assert contents(workdir) == before


SIGNALS_ITSELF = """
import os, sys, time
from attnlab import train

number, at = int(sys.argv.pop(1)), int(sys.argv.pop(1))
whole = train.train

def on_step(step, metrics):
    if step == at:
        time.sleep(0.5)  # the checkpoint before is on disk
        os.kill(os.getpid(), number)
        time.sleep(0.5)  # a thread receives it

train.train = lambda *args, **options: whole(*args, **options, on_step=on_step)
sys.exit(train.main())"""
HISTORY = "--config.checkpoint.history=5"  # which the undisturbed run has not


@pytest.fixture(scope="module")
def stopped_at_6(tmp_path_factory):
    """A run with a history, stopped by SIGTERM after step 6."""
    workdir = tmp_path_factory.mktemp("runs") / "stopped"
    running = process(workdir, HISTORY, program=["-c", SIGNALS_ITSELF, f"{signal.SIGTERM:d}", "6"])
    out, _ = running.communicate(timeout=60)
    assert running.returncode == 128 + signal.SIGTERM, out
    assert re.search(r"stopped: step 6 is saved in .*checkpoints; the same command resumes from there", out)
    return workdir


def test_run_stopped_and_killed_without_a_reader_of_its_output_is_bit_exact(
    undisturbed, with_history, stopped_at_6, tmp_path, capsys
):
    """The pipe's reader ends first, as with `| tee`, which Ctrl-C ends before the run."""
    shutil.copytree(stopped_at_6, tmp_path / "run")
    running = process(tmp_path / "run", program=["-c", SIGNALS_ITSELF, f"{signal.SIGKILL:d}", "11"])
    wait_for(running, "^resumed from step 6$")
    running.stdout.close()
    assert running.wait(timeout=60) == -signal.SIGKILL
    newest = max(kept(tmp_path / "run"))
    assert records(tmp_path / "run")[-1]["step"] == 10 and newest in (6, 8)
    assert run(tmp_path / "run") == 0
    assert f"resumed from step {newest}\n" in capsys.readouterr().out
    assert records(tmp_path / "run") == records(undisturbed[0])
    assert same_checkpoints(tmp_path / "run", with_history)


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "long"
    assert run(workdir, *LONG) == 0
    return workdir


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["gated_delta gru attention", "rwkv7 hgrn2 delta_product"])
def test_hybrid_killed_is_bit_exact(tmp_path, pattern):
    hybrid = flags({"model.num_layers": 3, "model.pattern": pattern})
    assert run(tmp_path / "whole", *hybrid) == 0
    running = process(tmp_path / "run", *hybrid, program=["-c", SIGNALS_ITSELF, f"{signal.SIGKILL:d}", "6"])
    out, _ = running.communicate(timeout=300)
    assert running.returncode == -signal.SIGKILL, out
    running = process(tmp_path / "run", *hybrid)
    out, _ = running.communicate(timeout=300)
    assert running.returncode == 0 and "resumed from step 4\n" in out, out
    assert records(tmp_path / "run") == records(tmp_path / "whole")
    assert same_checkpoints(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_signal_while_compiling_ends_the_process(tmp_path, number):
    """Python's handlers would wait until XLA has compiled."""
    running = process(tmp_path / "run", "--config.model.num_layers=12")
    wait_for(running, "parameters on 1 cpu device")
    start = time.monotonic()
    running.send_signal(number)
    out, _ = running.communicate(timeout=60)
    assert running.returncode == -number and "Traceback" not in out, out
    assert time.monotonic() - start < 10 and not any((tmp_path / "run" / "checkpoints").glob("[0-9]*"))


def unfinished(undisturbed, folder):
    """A copy of the finished run without its final record."""
    shutil.copytree(undisturbed[0], folder)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:-1]))
    return folder


def test_damaged_checkpoint_is_set_aside_and_previous_resumed(undisturbed, tmp_path, capsys):
    workdir = unfinished(undisturbed, tmp_path / "run")
    largest = max((workdir / "checkpoints" / "12").rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 16
    largest.write_bytes(content)
    with pytest.raises(ValueError, match=r"checkpoint 12 in .*differs"):
        attnlab.load(workdir)
    assert run(workdir) == 0
    out = capsys.readouterr().out
    assert re.search(r"checkpoint 12 is damaged \(.* differs from what was written\): set aside as 12.damaged\n", out)
    assert "resumed from step 8" in out
    assert records(workdir) == records(undisturbed[0])
    assert (workdir / "checkpoints" / "12.damaged").exists()


def test_all_checkpoints_damaged_is_an_error_and_nothing_changes(undisturbed, tmp_path, capsys):
    workdir = unfinished(undisturbed, tmp_path / "run")
    for manifest in workdir.rglob("manifest.json"):
        manifest.unlink()
    before = contents(workdir)
    assert run(workdir) == 2
    assert re.search("error: every checkpoint in .* is damaged", capsys.readouterr().err)
    assert contents(workdir) == before


def test_changed_metrics_are_refused_and_missing_ones_reported(undisturbed, tmp_path, capsys):
    workdir = unfinished(undisturbed, tmp_path / "run")
    log = workdir / "metrics.jsonl"
    whole = log.read_text()
    log.write_text(whole.replace("9", "8", 1))
    assert run(workdir) == 2
    assert "metrics.jsonl is not what it was when step 12 was saved" in capsys.readouterr().err
    log.unlink()
    assert run(workdir) == 0
    assert "metrics.jsonl is missing: the records up to step 12 are lost" in capsys.readouterr().out
    assert records(workdir) == records(undisturbed[0])[-2:]


def test_nonfinite_parameters_end_the_run_unsaved_despite_skip_and_release_its_lock(tmp_path, capsys):
    for _ in range(2):
        assert run(tmp_path / "run", "--config.optimizer.learning_rate=1e20", "--config.on_nonfinite=skip") == 2
        assert "param_norm is inf at step 1; no checkpoint was saved yet" in capsys.readouterr().err
        assert not any((tmp_path / "run" / "checkpoints").glob("[0-9]*"))


@pytest.fixture
def not_finite_at_7(monkeypatch):
    """Makes the gradient of step 7, and of no other step, NaN."""
    gradients = states.gradients

    def poisoned(model, params, batch, step_key, *args):
        loss, gradient = gradients(model, params, batch, step_key, *args)
        key_7 = jax.random.fold_in(jax.random.key(configs.default().seed), 6)
        poison = jnp.where((jax.random.key_data(step_key) == jax.random.key_data(key_7)).all(), jnp.nan, 0)
        return loss, jax.tree.map(lambda g: g + poison, gradient)

    monkeypatch.setattr(states, "gradients", poisoned)


def test_nonfinite_step_is_skipped_reported_and_counted(not_finite_at_7, tmp_path, capsys):
    assert run(tmp_path / "run", "--config.on_nonfinite=skip", "--config.log.every=1") == 0
    assert "step 7 is skipped: grad_norm is nan (1 skipped in total)" in capsys.readouterr().out
    found = {r["step"]: r for r in records(tmp_path / "run") if r["split"] == "train"}
    assert [found[step]["skipped"] for step in (1, 6, 7, 8, 12)] == [0, 0, 1, 1, 1]
    assert found[7]["grad_norm"] is None and found[7]["param_norm"] == found[6]["param_norm"]
    assert found[8]["param_norm"] != found[7]["param_norm"] and np.isfinite(found[12]["loss"])


def test_nonfinite_step_ends_the_run_at_last_good_checkpoint(not_finite_at_7, tmp_path, capsys):
    for _ in range(2):
        assert run(tmp_path / "run") == 2
        err = capsys.readouterr().err
        assert re.search("error: grad_norm is nan at step 7; the last good checkpoint is step 4 in .*: lower", err)
        assert Checkpoints(tmp_path / "run" / "checkpoints").newest_intact() == (4, {})


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
    stopped, finished = unfinished(undisturbed, tmp_path / "stopped"), tmp_path / "finished"
    shutil.copytree(undisturbed[0], finished)
    (tmp_path / "read-only").mkdir()
    everything = [tmp_path, *tmp_path.rglob("*")]
    for path in everything:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = contents(tmp_path)
    workdirs = f"{stopped},{finished},{tmp_path}/read-only/new"
    command = [*obeys_permissions(), sys.executable, "-c", SEVERAL_STARTS, workdirs, *SMALL]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    for path in everything:
        path.chmod(0o755)
    first, second = done.stderr.splitlines()
    assert first.startswith(f"error: --workdir={stopped} cannot be written (Permission denied)")
    assert second.startswith(f"error: --workdir={tmp_path}/read-only/new cannot be written")
    told = [line for line in done.stdout.splitlines() if line.startswith((str(finished), "["))]
    assert told == [f"{finished} is finished (12 steps): nothing to do", "[2, 0, 2]"]
    assert contents(tmp_path) == before


@pytest.mark.slow
def test_two_starts_in_one_workdir_one_trains(tmp_path):
    both = [process(tmp_path / "run", "--config.steps=4") for _ in range(2)]
    outputs = [running.communicate(timeout=120)[0] for running in both]
    codes = [running.returncode for running in both]
    assert 0 in codes and set(codes) <= {0, 2}, outputs
    for code, out in zip(codes, outputs):
        assert code == 0 or "another command runs there" in out.splitlines()[-1], out
    assert records(tmp_path / "run")[-1]["split"] == "final"


@pytest.mark.slow
def test_full_disk_is_one_line_and_the_run_resumes_later(long_run, tmp_path):
    """A limit of 10 KiB per file simulates the full disk: the optimizer's metadata alone takes 18.

    Limits near the size of parameter files would not do: that size varies between saves."""
    command = " ".join([sys.executable, "-m", "attnlab.train", *SMALL, *LONG, f"--workdir={tmp_path}/run"])
    done = subprocess.run(
        ["bash", "-c", f"ulimit -f 10; exec {command}"],
        cwd=REPOSITORY,
        env=os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"},  # its entries are larger, too
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: a checkpoint cannot be written to") and done.stderr.count("\n") == 1
    out, _ = process(tmp_path / "run", *LONG).communicate(timeout=120)
    assert "no checkpoint was saved yet: starting from the beginning" in out
    assert records(tmp_path / "run") == records(long_run)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "options",
    [
        ["parallel.strategy=pmap", "parallel.mesh.data=-1", "model.scan=True", "model.remat=attention"],
        pytest.param(["parallel.mesh.fsdp=4", "model.remat=attention"], marks=SLOW),
        pytest.param(["parallel.mesh.data=-1"], marks=SLOW),
        pytest.param(["parallel.mesh.data=2"], marks=SLOW),
        pytest.param(["parallel.mesh.fsdp=2", "parallel.mesh.tensor=2"], marks=SLOW),
    ],
    ids=" ".join,
)
def test_run_resumed_on_other_devices_or_with_stacked_layers_has_the_same_losses(
    undisturbed, stopped_at_6, tmp_path, options
):
    """To rounding."""
    shutil.copytree(stopped_at_6, tmp_path / "run")
    assert run(tmp_path / "run", *(f"--config.{option}" for option in options)) == 0
    found, expected = records(tmp_path / "run"), records(undisturbed[0])
    assert [(r["step"], r["split"]) for r in found] == [(r["step"], r["split"]) for r in expected]
    np.testing.assert_allclose([r["loss"] for r in found], [r["loss"] for r in expected], rtol=1e-5)


FOUR, ACCUMULATED = ["parallel.mesh.data=-1"], "optimizer.accumulation=2"


@pytest.mark.parametrize(
    "options",
    [
        ["precision=bfloat16", "model.positions=alibi", "model.window=8", "model.kv_heads=1", *FOUR, ACCUMULATED],
        pytest.param(
            ["data.tokenizer=bpe", "data.vocab_size=300", "model.positions=alibi", "model.window=8"], marks=SLOW
        ),
        pytest.param(["parallel.strategy=pmap", "model.kv_heads=1", *FOUR], marks=SLOW),
        pytest.param(["data.tokenizer=byte", ACCUMULATED], marks=SLOW),
        pytest.param(["data.tokenizer=word", "model.positions=learned"], marks=SLOW),
        pytest.param(["data.tokenizer=wordpiece", "model.positions=none"], marks=SLOW),
    ],
    ids=" ".join,
)
def test_options_train_and_sample(tmp_path, options, capsys):
    assert run(tmp_path / "run", "--config.sample.every=8", *(f"--config.{option}" for option in options)) == 0
    assert re.findall(r"--- sample at step (\d+):", capsys.readouterr().out) == ["8", "12"]
    found = metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert found[-1]["split"] == "final" and np.isfinite([r["loss"] for r in found]).all()


SENTENCE = "lo que escribí yo mismo, otra vez y una vez más… 👩‍👧\n"


@pytest.fixture(scope="module")
def own_text_run(tmp_path_factory):
    """A finished run of one step on a text file, with byte-level BPE: its workdir, text, options and output."""
    folder = tmp_path_factory.mktemp("own-text")
    (folder / "mine.txt").write_text(SENTENCE * 200)
    options = ["--config.data.tokenizer=bpe", "--config.data.vocab_size=280", "--config.steps=1"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert run(folder / "run", f"--config.data.path={folder}/mine.txt", *options) == 0
    return folder / "run", folder / "mine.txt", options, printed.getvalue()


@pytest.fixture
def unfinished_own_text_run(own_text_run, tmp_path):
    """A copy of that run without its final record, and of its text."""
    workdir, text, options, _ = own_text_run
    shutil.copytree(workdir, tmp_path / "run")
    shutil.copy(text, tmp_path / "mine.txt")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    return tmp_path / "run", tmp_path / "mine.txt", options


def test_data_path_alone_selects_that_text(own_text_run):
    workdir, *_, printed = own_text_run
    assert re.findall(r"--- sample at step (\d+):", printed) == ["1"]
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
    assert jax.eval_shape(model.apply, params, prompt[None]).shape == (1, len(prompt), 280)


# A run's folder alone is enough to resume, evaluate and extend it.


def workdir_alone(workdir, *options):
    return train.main(["train", f"--workdir={workdir}", *options])


def test_workdir_alone_resumes(undisturbed, tmp_path, capsys):
    workdir = unfinished(undisturbed, tmp_path / "run")
    assert workdir_alone(workdir) == 0
    assert "resumed from step 12" in capsys.readouterr().out
    assert records(workdir) == records(undisturbed[0])


def test_workdir_alone_without_a_run_asks_for_a_config(tmp_path, capsys):
    for options in ([], ["--config.steps=60"], ["--eval_only"]):
        assert workdir_alone(tmp_path / "none", *options) == 2
        assert "--config is missing" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_workdir_alone_refuses_other_changes(undisturbed, capsys):
    before = contents(undisturbed[0])
    for change, message in (
        ("--config.model.width=64", "config.model.width = 64, .* 16"),
        ("--config.steps=11", "12 steps, .*config.steps = 11"),
        ("--config.stpes=60", "--config.stpes: .*did you mean steps"),
    ):
        assert workdir_alone(undisturbed[0], change) == 2
        err = capsys.readouterr().err
        assert re.search(message, err) and err.count("\n") == 1, err
    assert workdir_alone(undisturbed[0], "--eval_only", "--config.steps=60") == 2
    assert "config.steps = 60, there it was 12" in capsys.readouterr().err
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
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    config.update_from_flattened_dict(FIELDS | changes)
    return config


def best(workdir):
    return min((r for r in records(workdir) if r["split"] == "val"), key=lambda r: r["loss"])["step"]


@pytest.fixture(scope="module")
def with_history(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "history"
    assert train.train(quick(checkpoint__history=5, log__profile="3:4"), workdir) == 0
    return workdir


def test_profile_has_the_steps_that_were_asked_for(with_history):
    (trace,) = (with_history / "profile").glob("plugins/profile/*/*.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert {event["args"]["step_num"] for event in events if event.get("name") == "train"} == {"3", "4"}


def digests(workdir, step):
    """sha256 of the parameters, the optimizer state, and the average if there is one, of a checkpoint."""
    folder = workdir / "checkpoints" / str(step)
    names = [name for name in ("params", "opt_state", "average") if (folder / name).exists()]
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        items = reader.restore(
            folder.absolute(), ocp.args.Composite(**dict.fromkeys(names, ocp.args.StandardRestore()))
        )
    return {name: sha256(items[name]) for name in names}


def same_checkpoints(*workdirs):
    """Whether runs keep checkpoints of the same steps, with the same bits."""
    first, second = ({step: digests(workdir, step) for step in kept(workdir)} for workdir in workdirs)
    return first == second


def test_history_stays_beside_newest_and_best_and_changes_no_bit(undisturbed, with_history):
    assert records(with_history) == records(undisturbed[0])
    assert set(kept(with_history)) == {0, 1, 2, 5, 12} | set(kept(undisturbed[0]))


def test_history_begins_with_the_untrained_model(with_history):
    first = attnlab.load(with_history, step=0)
    untrained = Experiment(runs.resolve(quick()).config, first.tokenizer.vocab_size).create_state()
    assert sha256(first.params["params"]) == sha256(untrained.params)
    assert len({sha256(attnlab.load(with_history, step=step).params["params"]) for step in (0, 1, 12)}) == 3


@pytest.mark.parametrize("crashes", [[1], pytest.param([6], marks=SLOW), pytest.param([3, 9], marks=SLOW)])
def test_history_of_a_crashed_run_is_the_same(with_history, tmp_path, crashes):
    """Before the second checkpoint, and after some; the first attempt may leave step 0 alone."""
    for step in crashes:
        with pytest.raises(CrashError):
            train.train(quick(checkpoint__history=5), tmp_path / "run", on_step=crash_at(step))
    assert workdir_alone(tmp_path / "run") == 0
    assert records(tmp_path / "run") == records(with_history)
    assert same_checkpoints(tmp_path / "run", with_history)


def test_run_extended_during_warmup_equals_the_longer_run_and_keeps_its_history(tmp_path):
    with pytest.raises(CrashError):
        train.train(quick(checkpoint__history=5), tmp_path / "run", on_step=crash_at(7))
    assert train.train(quick(checkpoint__history=0, steps=20, checkpoint__keep=1), tmp_path / "run") == 0
    assert set(kept(tmp_path / "run")) == {0, 1, 2, 5, 20} | {best(tmp_path / "run")}
    assert train.train(quick(steps=20), tmp_path / "whole") == 0
    assert records(tmp_path / "run") == records(tmp_path / "whole")


def test_checkpoint_of_step_0_alone_is_no_checkpoint_to_resume_from(with_history, tmp_path, capsys):
    workdir = unfinished([with_history], tmp_path / "run")
    for step in kept(workdir)[1:]:
        shutil.rmtree(workdir / "checkpoints" / str(step))
    assert kept(workdir) == [0] and workdir_alone(workdir) == 2
    assert "holds no checkpoint after step 0, but the run had reached step 12" in capsys.readouterr().err


def test_checkpoint_folder_with_step_0_of_another_run_is_refused(with_history, tmp_path):
    shutil.copytree(with_history / "checkpoints" / "0", tmp_path / "checkpoints" / "0")
    with pytest.raises(UserError, match="checkpoints of another run"):
        train.train(quick(checkpoint__dir=f"{tmp_path}/checkpoints"), tmp_path / "other")


def test_finished_run_extended_and_crashed_is_bit_exact(undisturbed, tmp_path, capsys):
    """From step 12 to 20, after the learning rate had decayed to 0."""
    whole, crashed = tmp_path / "whole", tmp_path / "crashed"
    for folder in (whole, crashed):
        shutil.copytree(undisturbed[0], folder)
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


class Bigram(nn.Module):
    """Logits of the next token by the last one."""

    vocab_size: int = 256

    @nn.compact
    def __call__(self, tokens, deterministic=True, dropout_key=None):
        assert deterministic == (dropout_key is None) and (dropout_key is None or len(dropout_key) == len(tokens))
        return nn.Dense(self.vocab_size)(nn.Embed(self.vocab_size, 8)(tokens))


def test_own_model_optimizer_callback_and_tracker_train_and_resume(tmp_path, capsys):
    config = quick(data__tokenizer="byte")
    own = {"model": Bigram(), "optimizer": optax.adam(1e-2)}
    seen, tracked = [], []

    class Tracker:
        def __init__(self, workdir, saved):
            assert workdir.name in ("whole", "run") and saved["corpus"]["name"] == "python_docs"

        def log(self, step, metrics):
            tracked.append((step, metrics))

        def close(self):
            tracked.append("closed")

    def on_step(step, metrics):
        seen.append(step)
        assert {"loss", "grad_norm", "param_norm"} == set(metrics)
        assert all(value.shape == () and value.dtype == jnp.float32 for value in metrics.values())

    assert train.train(config, tmp_path / "whole", on_step=on_step, **own) == 0
    assert seen == list(range(1, 13)) and "Bigram of 4,352 parameters" in capsys.readouterr().out
    found = records(tmp_path / "whole")
    assert found[-1]["loss"] < found[0]["loss"] and "learning_rate" not in found[0]
    with pytest.raises(CrashError):
        train.train(config, tmp_path / "run", on_step=crash_at(8), tracker=Tracker, **own)
    assert tracked.pop() == "closed"
    assert train.train(config, tmp_path / "run", tracker=Tracker, **own) == 0
    assert records(tmp_path / "run") == found and tracked.pop() == "closed"
    assert set(range(2, 13, 2)) <= {step for step, _ in tracked}
    assert all({"train/loss", "val/loss", "final/loss"} & metrics.keys() for _, metrics in tracked)

    with pytest.raises(UserError, match="run with model = Bigram, and model= gives None"):
        train.train(config, tmp_path / "run")
    with pytest.raises(UserError, match="run with model = Bigram, and model= gives None"):
        attnlab.load(tmp_path / "run")
    model, params, tokenizer, _ = attnlab.load(tmp_path / "run", model=Bigram())
    assert sha256(params["params"]) == found[-1]["params_sha256"]
    assert jax.eval_shape(model.apply, params, tokenizer.encode("The ")[None]).shape == (1, 4, 256)


@pytest.mark.parametrize(
    "pattern, layers", [("attention conv", 5), pytest.param("attention conv gru", 4, marks=SLOW)], ids=str
)
def test_run_whose_pattern_does_not_divide_its_layers_is_loaded(tmp_path, pattern, layers):
    config = quick(steps=2, model__pattern=pattern, model__num_layers=layers, model__scan=True)
    assert train.train(config, tmp_path / "run") == 0
    model, params, _, _ = attnlab.load(tmp_path / "run")
    assert len(params["params"]) > layers and model.num_layers == layers


def test_start_says_what_it_does_until_the_first_step(tmp_path, capsys):
    shown = []

    def on_step(step, metrics):
        shown.append(capsys.readouterr().out)
        if step == 2:
            raise CrashError

    with pytest.raises(CrashError):
        train.train(quick(), tmp_path / "run", on_step=on_step)
    said = ("reading python_docs\npreparing its tokens\ninitializing the model\n", "\ncompiling the step\n")
    assert shown[0].startswith(said[0]) and said[1] in shown[0] and "compiling" not in shown[1]
