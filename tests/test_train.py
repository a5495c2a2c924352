"""A run: what it writes, that it can be stopped and started, and that a finished one is left alone."""

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

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnlab
from attnlab import config as configs
from attnlab import train
from attnlab.data import tokenizers
from attnlab.training import metrics
from attnlab.training import state as states
from attnlab.training.checkpoints import Checkpoints, sha256

REPOSITORY = Path(__file__).parents[1]
SMALL = [
    f"--config={REPOSITORY}/configs/quickstart.py",
    "--config.steps=40",
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
    "--config.sample.every=20",
    "--config.sample.length=8",
]
TIMING = re.compile("time|second|mfu|flops|wall|eta|rss|memory")


def run(workdir, *options):
    return train.main(["train", *SMALL, f"--workdir={workdir}", *options])


def process(workdir, *options, program=("-m", "attnlab.train"), before=()):
    """The command as a user starts it, on one device."""
    command = [*before, sys.executable, *program, *SMALL, f"--workdir={workdir}", *options]
    environment = os.environ | {"XLA_FLAGS": "", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def wait_for(running, pattern):
    """Reads lines until one matches; fails when the process ends first."""
    seen = []
    for line in running.stdout:
        seen.append(line)
        if re.search(pattern, line):
            return
    pytest.fail(f"{pattern!r} never came: {''.join(seen)}")


def records(workdir):
    """What may not differ between two runs of the same seed."""
    lines = (Path(workdir) / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if not TIMING.search(key)} for line in lines]


def contents(folder):
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A finished run, in a process of its own."""
    workdir = tmp_path_factory.mktemp("runs") / "undisturbed"
    running = process(workdir)
    out, _ = running.communicate(timeout=300)
    assert running.returncode == 0, out
    return workdir, out


def test_a_run_tells_its_story(undisturbed):
    workdir, out = undisturbed
    assert {path.name for path in workdir.iterdir()} == {
        "config.json",
        "metrics.jsonl",
        "tokenizer.json",
        "checkpoints",
    }
    assert "tokens to train on" in out and "--- a sample at step 40:" in out
    assert re.search(r"done: validation loss \d\.\d{4} \(\d\.\d{3} bits per character\)", out)
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


def test_a_run_loads_and_its_parameters_have_the_digest_of_its_record(undisturbed):
    workdir, _ = undisturbed
    model, params, tokenizer, config = attnlab.load(workdir)
    assert sha256(params["params"]) == records(workdir)[-1]["params_sha256"]
    assert config.model.width == model.width == 32
    logits = model.apply(params, tokenizer.encode("The ")[None])
    assert logits.shape == (1, 4, tokenizer.vocab_size)


def test_the_best_checkpoint_stays_beside_the_newest(undisturbed):
    workdir, _ = undisturbed
    kept = sorted(int(path.name) for path in (workdir / "checkpoints").iterdir())
    assert kept == [32, 40]
    best = min((r for r in records(workdir) if r["split"] == "val" and r["step"] in kept), key=lambda r: r["loss"])
    assert sha256(attnlab.load(workdir, "best").params) == sha256(attnlab.load(workdir, best["step"]).params)


def test_a_finished_run_is_left_as_it_is(undisturbed, capsys):
    workdir, _ = undisturbed
    before = contents(workdir)
    assert run(workdir) == 0
    assert "is finished (40 steps): nothing to do" in capsys.readouterr().out
    assert contents(workdir) == before


def test_eval_only_repeats_the_last_validation_and_writes_nothing(undisturbed, capsys):
    workdir, _ = undisturbed
    before = contents(workdir)
    assert run(workdir, "--eval_only") == 0
    loss = float(re.search(r"validation loss (\d\.\d+)", capsys.readouterr().out)[1])
    np.testing.assert_allclose(loss, records(workdir)[-1]["loss"], atol=5e-5)  # printed to four decimals
    assert contents(workdir) == before


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM], ids=lambda number: number.name
)
def test_a_run_that_is_stopped_and_started_again_ends_where_the_undisturbed_one_does(undisturbed, tmp_path, number):
    for pattern in (r"^step 4/", r"^step 26/"):
        running = process(tmp_path / "run")
        wait_for(running, pattern)
        running.send_signal(number)
        out, _ = running.communicate(timeout=60)
        assert running.returncode == 128 + number, out
        assert re.search(r"stopped: step \d+ is saved in .*checkpoints; the same command goes on from there", out)
    running = process(tmp_path / "run")
    out, _ = running.communicate(timeout=120)
    assert running.returncode == 0 and re.search(r"resumed from step \d+", out), out
    assert records(tmp_path / "run") == records(undisturbed[0])


def test_a_run_that_is_killed_and_started_again_ends_where_the_undisturbed_one_does(undisturbed, tmp_path):
    for pattern in (r"^step 2/", r"^step 30/"):
        running = process(tmp_path / "run")
        wait_for(running, pattern)
        running.kill()
        running.communicate(timeout=60)
    newest = max(int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.isdecimal())
    assert newest >= 16
    running = process(tmp_path / "run")
    out, _ = running.communicate(timeout=120)
    assert running.returncode == 0 and f"resumed from step {newest}\n" in out, out
    assert records(tmp_path / "run") == records(undisturbed[0])


def test_a_second_interrupt_leaves_at_once(tmp_path):
    """While the first one's save takes a minute: the checkpoint before it stays."""
    slow = """
import sys, time
from attnlab import train
from attnlab.training.checkpoints import Checkpoints
save = Checkpoints.save
Checkpoints.save = lambda self, state, **facts: (time.sleep(60 * (state.step > 8)), save(self, state, **facts))
sys.exit(train.main())"""
    running = process(tmp_path / "run", "--config.steps=100000", "--config.eval.windows=2000000", program=["-c", slow])
    wait_for(running, r"^step 10/")  # the validation that follows takes a while
    running.send_signal(signal.SIGINT)
    time.sleep(0.5)
    running.send_signal(signal.SIGINT)
    out, _ = running.communicate(timeout=30)
    assert running.returncode == 130 and "Traceback" not in out and "is saved" not in out, out
    assert Checkpoints(tmp_path / "run" / "checkpoints").newest_whole() == (8, {})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_before_the_first_step_there_is_nothing_to_save(tmp_path, number):
    """While XLA compiles, which Python's own handlers would wait for."""
    running = process(tmp_path / "run", "--config.model.num_layers=12")
    wait_for(running, "parameters on 1 cpu device")
    start = time.monotonic()
    running.send_signal(number)
    out, _ = running.communicate(timeout=60)
    assert running.returncode == 128 + number and "stopped before the first step: nothing to save" in out, out
    assert time.monotonic() - start < 10 and not any((tmp_path / "run" / "checkpoints").iterdir())


def stopped_at_40(undisturbed, folder):
    """A copy of the finished run in which the last record is still to be written."""
    shutil.copytree(undisturbed[0], folder)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:-1]))
    return folder


ONE_DEVICE = "--config.parallel.mesh.data=1"


def test_a_damaged_checkpoint_is_set_aside_and_the_run_goes_on_from_the_one_before(undisturbed, tmp_path, capsys):
    workdir = stopped_at_40(undisturbed, tmp_path / "run")
    largest = max((workdir / "checkpoints" / "40").rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 16
    largest.write_bytes(content)
    with pytest.raises(ValueError, match=r"checkpoint 40 in .* is damaged \(.* is not what was written\)"):
        attnlab.load(workdir)
    assert run(workdir, ONE_DEVICE) == 0
    out = capsys.readouterr().out
    assert re.search(r"checkpoint 40 is damaged \(.* is not what was written\): set aside as 40.damaged\n", out)
    assert "resumed from step 32" in out
    found, expected = records(workdir), records(undisturbed[0])
    assert [(r["step"], r["split"]) for r in found] == [(r["step"], r["split"]) for r in expected]
    np.testing.assert_allclose([r["loss"] for r in found], [r["loss"] for r in expected], rtol=1e-5)
    assert (workdir / "checkpoints" / "40.damaged").exists()


def test_where_every_checkpoint_is_damaged_nothing_is_trained_or_touched(undisturbed, tmp_path, capsys):
    workdir = stopped_at_40(undisturbed, tmp_path / "run")
    for manifest in workdir.rglob("manifest.json"):
        manifest.unlink()
    before = contents(workdir)
    assert run(workdir, ONE_DEVICE) == 2
    assert re.search("error: every checkpoint in .* is damaged", capsys.readouterr().err)
    assert contents(workdir) == before


def test_a_run_whose_checkpoints_are_gone_does_not_begin_again_in_silence(undisturbed, tmp_path, capsys):
    workdir = stopped_at_40(undisturbed, tmp_path / "run")
    shutil.rmtree(workdir / "checkpoints")
    assert run(workdir, ONE_DEVICE) == 2
    assert "holds no checkpoint, but the run had come to step 40: bring them back" in capsys.readouterr().err


def test_records_that_are_not_those_of_the_checkpoint_are_refused_and_missing_ones_are_told(
    undisturbed, tmp_path, capsys
):
    workdir = stopped_at_40(undisturbed, tmp_path / "run")
    log = workdir / "metrics.jsonl"
    whole = log.read_text()
    log.write_text(whole.replace("9", "8", 1))
    assert run(workdir, ONE_DEVICE) == 2
    assert "metrics.jsonl is not what it was when step 40 was saved" in capsys.readouterr().err
    log.unlink()
    assert run(workdir, ONE_DEVICE) == 0
    assert "metrics.jsonl is not there: the records up to step 40 are lost" in capsys.readouterr().out
    last, expected = records(workdir)[-1], records(undisturbed[0])[-1]
    assert (last["split"], last["params_sha256"]) == ("final", expected["params_sha256"])
    np.testing.assert_allclose(last["loss"], expected["loss"], rtol=1e-5)  # by a program that is compiled otherwise


def test_what_is_not_finite_may_be_skipped_and_is_never_saved(tmp_path, capsys):
    explosive = ["--config.optimizer.learning_rate=1e20", "--config.on_nonfinite=skip", ONE_DEVICE]
    assert run(tmp_path / "run", *explosive) == 2  # what the parameters have become cannot be skipped
    assert "param_norm is inf at step 1; no checkpoint was saved yet" in capsys.readouterr().err
    assert not any((tmp_path / "run" / "checkpoints").iterdir())


@pytest.fixture
def not_finite_at_13(monkeypatch):
    """The gradient of step 13, and of no other, is not finite."""
    gradients = states.gradients

    def poisoned(model, params, batch, step_key, *args):
        loss, gradient = gradients(model, params, batch, step_key, *args)
        that = jax.random.fold_in(jax.random.key(configs.default().seed), 12)
        poison = jnp.where((jax.random.key_data(step_key) == jax.random.key_data(that)).all(), jnp.nan, 0)
        return loss, jax.tree.map(lambda g: g + poison, gradient)

    monkeypatch.setattr(states, "gradients", poisoned)


def test_a_step_that_is_not_finite_is_skipped_reported_and_counted(not_finite_at_13, tmp_path, capsys):
    options = ["--config.on_nonfinite=skip", "--config.log.every=1", ONE_DEVICE]
    assert run(tmp_path / "run", *options) == 0
    assert "step 13 is skipped: grad_norm is nan (1 skipped in all)" in capsys.readouterr().out
    found = {r["step"]: r for r in records(tmp_path / "run") if r["split"] == "train"}
    assert [found[step]["skipped"] for step in (1, 12, 13, 14, 40)] == [0, 0, 1, 1, 1]
    assert found[13]["grad_norm"] is None and found[13]["param_norm"] == found[12]["param_norm"]
    assert found[14]["param_norm"] != found[13]["param_norm"] and np.isfinite(found[40]["loss"])


def test_a_step_that_is_not_finite_ends_the_run_with_the_last_good_checkpoint(not_finite_at_13, tmp_path, capsys):
    for _ in range(2):
        assert run(tmp_path / "run", ONE_DEVICE) == 2
        said = capsys.readouterr().err
        assert re.search("error: grad_norm is nan at step 13; the last good checkpoint is step 8 in .*: lower", said)
        assert Checkpoints(tmp_path / "run" / "checkpoints").newest_whole() == (8, {})


def obeys_permissions():
    """What to start a program by so that they hold for it, for root too."""
    if os.getuid():
        return []
    if not shutil.which("setpriv"):
        pytest.skip("root may write everywhere, and there is no setpriv (Debian: util-linux)")
    return ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"]


def test_a_workdir_that_may_not_be_written_is_one_line_and_a_finished_one_is_finished(undisturbed, tmp_path):
    stopped, finished = stopped_at_40(undisturbed, tmp_path / "stopped"), tmp_path / "finished"
    shutil.copytree(undisturbed[0], finished)
    for workdir, code, said in (
        (stopped, 2, f"error: {stopped}/tokenizer.json cannot be opened for writing (Permission denied)"),
        (finished, 0, f"{finished} is finished (40 steps): nothing to do"),
        (tmp_path / "read-only" / "new", 2, f"error: --workdir={tmp_path}/read-only/new cannot be written"),
    ):
        (tmp_path / "read-only").mkdir(exist_ok=True)
        everything = [workdir, *workdir.rglob("*")] if workdir.exists() else [workdir.parent]
        for path in everything:
            path.chmod(0o555 if path.is_dir() else 0o444)
        before = contents(tmp_path)
        running = process(workdir, before=obeys_permissions())
        out, _ = running.communicate(timeout=120)
        assert running.returncode == code and out.startswith(said) and out.count("\n") == 1, out
        assert contents(tmp_path) == before
        for path in everything:
            path.chmod(0o755)


def test_two_that_begin_in_one_workdir_at_once_one_trains(tmp_path):
    both = [process(tmp_path / "run", "--config.steps=4") for _ in range(2)]
    said = [running.communicate(timeout=120)[0] for running in both]
    codes = [running.returncode for running in both]
    assert 0 in codes and set(codes) <= {0, 2}, said
    for code, out in zip(codes, said):
        assert code == 0 or (out.count("\n") == 1 and "another process trains there" in out), out
    assert records(tmp_path / "run")[-1]["split"] == "final"


def test_whoever_watches_may_leave_and_the_run_goes_on(undisturbed, tmp_path):
    """As `| tee` does, which Ctrl-C ends before the run."""
    running = process(tmp_path / "run")
    wait_for(running, r"^step 4/")
    running.stdout.close()
    assert running.wait(timeout=120) == 0
    assert records(tmp_path / "run") == records(undisturbed[0])


@pytest.mark.slow
def test_a_disk_that_is_full_is_one_line_and_with_room_on_it_the_run_goes_on(undisturbed, tmp_path):
    """Files of at most 10 KiB stand in for the disk: what a save says of the optimizer alone takes 18.

    How much it puts into one file of parameters is not the same twice."""
    limited = f"ulimit -f 10; exec {sys.executable} -m attnlab.train {' '.join(SMALL)} --workdir={tmp_path}/run"
    done = subprocess.run(
        ["bash", "-c", limited], cwd=REPOSITORY, env=os.environ | {"XLA_FLAGS": ""}, capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: a checkpoint cannot be written into") and done.stderr.count("\n") == 1
    out, _ = process(tmp_path / "run").communicate(timeout=120)
    assert "no checkpoint was saved before: starting from the beginning" in out
    assert records(tmp_path / "run") == records(undisturbed[0])


@pytest.mark.parametrize(
    "options",
    [
        ["strategy=pmap"],
        ["mesh.fsdp=4"],
        pytest.param(["strategy=mesh"], marks=pytest.mark.slow),
        pytest.param(["mesh.data=2"], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_run_goes_on_on_other_devices_with_another_strategy(undisturbed, tmp_path, options):
    """Started on one device, stopped, ended on others: the same losses to rounding."""
    running = process(tmp_path / "run")
    wait_for(running, r"^step 12/")
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=60)
    assert run(tmp_path / "run", *(f"--config.parallel.{option}" for option in options)) == 0
    found, expected = records(tmp_path / "run"), records(undisturbed[0])
    assert [(r["step"], r["split"]) for r in found] == [(r["step"], r["split"]) for r in expected]
    np.testing.assert_allclose([r["loss"] for r in found], [r["loss"] for r in expected], rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        ["--config.precision=bfloat16"],
        pytest.param(["--config.data.tokenizer=byte"], marks=pytest.mark.slow),
        pytest.param(["--config.data.tokenizer=word"], marks=pytest.mark.slow),
        ["--config.data.tokenizer=bpe", "--config.data.vocab_size=300"],
        pytest.param(["--config.data.tokenizer=wordpiece"], marks=pytest.mark.slow),
        pytest.param(["--config.optimizer.accumulation=2"], marks=pytest.mark.slow),
        ["--config.model.positions=rotary", "--config.model.qk_norm=True", "--config.model.kv_heads=2"],
        ["--config.model.positions=alibi", "--config.model.window=8"],
        ["--config.parallel.strategy=pmap"],
        ["--config.steps=1"],
    ],
    ids=" ".join,
)
def test_options_train_and_sample(tmp_path, options):
    assert run(tmp_path / "run", "--config.steps=10", *options) == 0
    found = metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert found[-1]["split"] == "final" and np.isfinite([r["loss"] for r in found]).all()


@pytest.mark.slow
def test_accumulation_changes_nothing_but_memory(tmp_path):
    assert run(tmp_path / "one", "--config.steps=10") == 0
    assert run(tmp_path / "two", "--config.steps=10", "--config.optimizer.accumulation=2") == 0
    one, two = ([r["loss"] for r in records(tmp_path / name)] for name in ("one", "two"))
    np.testing.assert_allclose(one, two, rtol=1e-5)


def test_a_run_that_failed_leaves_its_folder_free_in_the_same_process(tmp_path, capsys):
    explosive = ["--config.optimizer.learning_rate=1e20", "--config.parallel.mesh.data=1"]
    for _ in range(2):
        assert run(tmp_path / "run", *explosive) == 2
        assert "another process" not in capsys.readouterr().err


def test_setting_a_path_alone_selects_that_text(tmp_path):
    (tmp_path / "mine.txt").write_text("what I wrote myself, again and again. " * 200)
    assert run(tmp_path / "run", f"--config.data.path={tmp_path}/mine.txt", "--config.steps=4") == 0
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved["data"]["name"] == "text" and saved["corpus"]["characters"] == 38 * 200
    (tmp_path / "mine.txt").write_text("something else now. " * 400)
    assert run(tmp_path / "run", f"--config.data.path={tmp_path}/mine.txt", "--config.steps=4") == 0  # it is finished


def test_a_path_selects_a_text_whatever_the_experiment_reads(tmp_path):
    (tmp_path / "mine.txt").write_text("what I wrote myself, again and again. " * 200)
    config = configs.default()
    config.data.name, config.data.path = "quijote", f"{tmp_path}/mine.txt"
    assert configs.completed(config).data.name == "text" and config.data.name == "quijote"


@pytest.mark.slow
def test_a_text_may_move_between_two_starts(tmp_path):
    (tmp_path / "mine.txt").write_text("what I wrote myself, again and again. " * 200)
    running = process(tmp_path / "run", f"--config.data.path={tmp_path}/mine.txt")
    wait_for(running, r"^step 10/")
    running.kill()
    running.communicate()
    (tmp_path / "mine.txt").rename(tmp_path / "moved.txt")
    assert run(tmp_path / "run", f"--config.data.path={tmp_path}/moved.txt", "--config.parallel.mesh.data=1") == 0


def test_a_run_goes_on_with_the_tokenizer_that_it_began_with(tmp_path, monkeypatch):
    (tmp_path / "mine.txt").write_text("lo que escribí yo mismo, otra vez y una vez más… 👩‍👧\n" * 200)
    subwords = ["--config.data.tokenizer=bpe", "--config.data.vocab_size=280", "--config.steps=3"]
    options = [f"--config.data.path={tmp_path}/mine.txt", *subwords, "--config.parallel.mesh.data=1"]
    assert run(tmp_path / "run", *options) == 0
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    written = (tmp_path / "run" / "tokenizer.json").read_bytes()
    assert saved["vocab_size"] == 280 and saved["tokenizer_sha256"] == hashlib.sha256(written).hexdigest()

    (tmp_path / "run" / "metrics.jsonl").unlink()  # as if it had been killed before its last record
    monkeypatch.setattr(tokenizers, "make", None)
    assert run(tmp_path / "run", *options) == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == saved
    model, params, tokenizer, _ = attnlab.load(tmp_path / "run")
    prompt = tokenizer.encode("otra vez 👩‍👧")
    assert tokenizer.decode(prompt) == "otra vez 👩‍👧"
    assert model.apply(params, prompt[None]).shape == (1, len(prompt), 280)


def test_a_text_that_changed_under_a_run_is_refused(tmp_path, capsys):
    path = tmp_path / "mine.txt"
    path.write_text("what I wrote myself, again and again. " * 200)
    running = process(tmp_path / "run", f"--config.data.path={path}")
    wait_for(running, r"^step 10/")
    running.kill()
    running.communicate()
    path.write_text("what I wrote myself, again and again! " * 200)
    assert run(tmp_path / "run", f"--config.data.path={path}") == 2
    assert "was trained on another text" in capsys.readouterr().err


def test_loading_takes_a_step_by_name_or_number(undisturbed):
    workdir, _ = undisturbed
    steps = [attnlab.load(workdir, step).params for step in ("latest", 40, "40")]
    assert len({sha256(params) for params in steps}) == 1
    with pytest.raises(ValueError, match="no checkpoint 39: choose latest, best, or one of"):
        attnlab.load(workdir, 39)
    assert jax.tree.leaves(steps[0])[0].sharding.device_set == {jax.devices()[0]}
