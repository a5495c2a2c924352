"""Runs with other options: custom texts, models and optimizers, averaged weights, early stopping, precision."""

import contextlib
import hashlib
import io
import json
import re
import shutil

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
from attnlab.support.errors import UserError
from attnlab.training import precision
from attnlab.training.checkpoints import Checkpoints, sha256
from attnlab.training.program import TrainProgram
from tests import runs

pytestmark = pytest.mark.usefixtures("shared_programs")

SLOW = pytest.mark.slow
BIGRAM = {"model": runs.Bigram()}


# --- steps that are not finite


class Poisoned(runs.Bigram):
    """A bigram model whose loss is NaN in step 7 only."""

    @nn.compact
    def __call__(self, tokens, deterministic=True, dropout_key=None):
        logits = runs.Bigram(self.vocab_size)(tokens, deterministic, dropout_key)
        if deterministic:
            return logits
        key_7 = jax.random.fold_in(jax.random.fold_in(jax.random.key(runs.quick().seed), 6), 0)  # its first sequence
        same = (jax.random.key_data(dropout_key[0]) == jax.random.key_data(key_7)).all()
        return logits + jnp.where(same, jnp.nan, 0)


def test_nonfinite_step_is_skipped_reported_and_counted(tmp_path, capsys):
    train.train(runs.quick(on_nonfinite="skip", log__every=1), tmp_path / "run", model=Poisoned())
    assert "step 7 is skipped: grad_norm is nan (1 skipped in total)" in capsys.readouterr().out
    by_step = {r["step"]: r for r in runs.records(tmp_path / "run") if r["split"] == "train"}
    assert [by_step[step]["skipped"] for step in (1, 6, 7, 8, 12)] == [0, 0, 1, 1, 1]
    assert by_step[7]["grad_norm"] is None and by_step[7]["param_norm"] == by_step[6]["param_norm"]
    assert by_step[8]["param_norm"] != by_step[7]["param_norm"] and np.isfinite(by_step[12]["loss"])


def test_nonfinite_step_ends_the_run_at_last_good_checkpoint(tmp_path):
    for _ in range(2):
        with pytest.raises(UserError, match="is nan at step 7; the last good checkpoint is step 4 in .*: lower"):
            train.train(runs.quick(), tmp_path / "run", model=Poisoned())
        assert Checkpoints(tmp_path / "run" / "checkpoints").newest_intact() == (4, {})


def test_nonfinite_parameters_end_the_run_unsaved_despite_skip(tmp_path):
    """The run also releases the lock of its folder."""
    for _ in range(2):
        with pytest.raises(UserError, match="param_norm is inf at step 1; no checkpoint was saved yet"):
            train.train(runs.quick(optimizer__learning_rate=1e20, on_nonfinite="skip"), tmp_path / "run", **BIGRAM)
        assert not any((tmp_path / "run" / "checkpoints").glob("[0-9]*"))


# --- texts and tokenizers

SENTENCE = "lo que escribí yo mismo, otra vez y una vez más… 👩‍👧\n"


@pytest.fixture(scope="module")
def own_text_run(tmp_path_factory):
    """A finished run of one step on a text file, with byte-level BPE: its workdir, text, options and output."""
    folder = tmp_path_factory.mktemp("own-text")
    (folder / "mine.txt").write_text(SENTENCE * 200)
    options = runs.flags({"data.tokenizer": "bpe", "data.vocab_size": 280, "steps": 1, "sample.length": 1})
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert runs.run(folder / "run", f"--config.data.path={folder}/mine.txt", *options) == 0
    return folder / "run", folder / "mine.txt", options, printed.getvalue()


@pytest.fixture
def unfinished_own_text_run(own_text_run, tmp_path):
    """A copy of that run without its metrics, and a copy of its text."""
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
    assert runs.run(own_text_run[0], f"--config.data.path={path}", *options) == 0
    assert runs.run(workdir, f"--config.data.path={path}", *options) == 2
    assert "was trained on a different text" in capsys.readouterr().err


def test_run_resumes_with_its_own_tokenizer_when_its_text_moved(unfinished_own_text_run, monkeypatch):
    workdir, path, options = unfinished_own_text_run
    saved = json.loads((workdir / "config.json").read_text())
    monkeypatch.setattr(tokenizers, "make", None)
    assert runs.run(workdir, f"--config.data.path={path}", *options) == 0
    resumed = json.loads((workdir / "config.json").read_text())
    assert resumed | {"data": resumed["data"] | {"path": saved["data"]["path"]}} == saved
    model, params, tokenizer, _ = attnlab.load(workdir)
    prompt = tokenizer.encode("otra vez 👩‍👧")
    assert tokenizer.decode(prompt) == "otra vez 👩‍👧"
    assert jax.eval_shape(model.apply, params, prompt[None]).shape == (1, len(prompt), 280)


# --- models


@pytest.mark.slow
def test_run_with_a_partial_layer_pattern_is_loaded(tmp_path):
    config = runs.quick(steps=2, model__layers="attention conv", model__num_layers=5, model__scan=True)
    train.train(config, tmp_path / "run")
    model, params, _, _ = attnlab.load(tmp_path / "run")
    assert len(params["params"]) > 5 and model.config.num_layers == 5


def test_custom_model_optimizer_and_callbacks_train_and_resume(tmp_path, capsys):
    config = runs.quick(data__tokenizer="byte")
    custom = BIGRAM | {"optimizer": optax.adam(1e-2)}
    seen, tracked, shown = [], [], []

    class Tracker:
        def __init__(self, workdir, saved):
            assert workdir.name in ("whole", "run") and saved["corpus"]["name"] == "python_docs"

        def log(self, step, metrics):
            tracked.append((step, metrics))

        def close(self):
            tracked.append("closed")

    def on_step(step, metrics):
        seen.append(step)
        shown.append(capsys.readouterr().out)
        assert {"loss", "grad_norm", "param_norm"} == set(metrics)
        assert all(value.shape == () and value.dtype == jnp.float32 for value in metrics.values())

    train.train(config, tmp_path / "whole", on_step=on_step, **custom)
    assert seen == list(range(1, 13)) and "Bigram of 4,352 parameters" in shown[0]
    messages = ("reading python_docs\npreparing its tokens\ninitializing the model\n", "\ncompiling the step\n")
    assert shown[0].startswith(messages[0]) and messages[1] in shown[0] and "compiling" not in shown[1]
    records = runs.records(tmp_path / "whole")
    assert records[-1]["loss"] < records[0]["loss"] and "learning_rate" not in records[0]
    with pytest.raises(runs.CrashError):
        train.train(config, tmp_path / "run", on_step=runs.crash_at(8), tracker=Tracker, **custom)
    assert tracked.pop() == "closed"
    train.train(config, tmp_path / "run", tracker=Tracker, **custom)
    assert runs.records(tmp_path / "run") == records and tracked.pop() == "closed"
    assert set(range(2, 13, 2)) <= {step for step, _ in tracked}
    assert all({"train/loss", "val/loss", "final/loss"} & metrics.keys() for _, metrics in tracked)

    with pytest.raises(UserError, match=r"run with model = Bigram\(vocab_size=256\), but model is now None"):
        train.train(config, tmp_path / "run")
    with pytest.raises(UserError, match=r"run with model = Bigram\(vocab_size=256\), but model is now None"):
        attnlab.load(tmp_path / "run")
    model, params, tokenizer, _ = attnlab.load(tmp_path / "run", **BIGRAM)
    assert sha256(params["params"]) == records[-1]["params_sha256"]
    assert jax.eval_shape(model.apply, params, tokenizer.encode("The ")[None]).shape == (1, 4, 256)


# --- optimizers

MUON = {"optimizer__name": "muon", "optimizer__b2_halflife": 1e4, "optimizer__schedule": "linear", "sample__length": 0}
LION = {"optimizer__name": "lion", "optimizer__learning_rate": 1e-3, "optimizer__schedule": "constant"}
LION |= {"parallel__strategy": "pmap", "parallel__mesh__data": -1, "model__num_layers": 4}


def whole_and_crashed(folder, **options):
    """A run, and one that crashed after step 9."""
    config = runs.quick(optimizer__ema=0.5, checkpoint__every=8, **options)
    train.train(config, folder / "whole")
    with pytest.raises(runs.CrashError):
        train.train(config, folder / "run", on_step=runs.crash_at(9))
    return folder / "whole", folder / "run"


@pytest.fixture(scope="module")
def muon(tmp_path_factory):
    return whole_and_crashed(tmp_path_factory.mktemp("muon"), **MUON)


@pytest.mark.parametrize("options", ["muon", pytest.param(LION, marks=SLOW)], ids=["muon", "lion"])
def test_optimizer_trains_and_resumes_bit_for_bit(request, tmp_path, options):
    workdirs = request.getfixturevalue("muon") if options == "muon" else whole_and_crashed(tmp_path, **options)
    whole, run = workdirs[0], shutil.copytree(workdirs[1], tmp_path / "resumed")
    records = runs.records(whole)
    losses = [record["loss"] for record in records if record["split"] == "val"]
    assert losses[-1] < losses[0] - 0.02 and losses[-1] < 4.6  # at the start ln(103) = 4.63, for 103 characters
    assert runs.workdir_alone(run) == 0
    assert runs.records(run) == records and runs.same_checkpoints(run, whole)
    assert set(runs.digests(run, 12)) == {"params", "opt_state", "average"}


OVER_FOUR = MUON | {"optimizer__ema": 0.5, "model__scan": True, "parallel__mesh__fsdp": 4}


@pytest.mark.slow
def test_muon_saved_on_one_device_resumes_on_four(muon, tmp_path):
    shutil.copytree(muon[1], tmp_path / "four")
    train.train(runs.quick(**OVER_FOUR), tmp_path / "four")
    actual, expected = runs.records(tmp_path / "four"), runs.records(muon[0])
    np.testing.assert_allclose([r["loss"] for r in actual], [r["loss"] for r in expected], rtol=1e-5)  # reordered sums


def test_muon_and_the_average_are_sharded_like_the_parameters():
    """Each of four devices holds a quarter of every array with the shape of a kernel."""
    state = TrainProgram(configs.completed(runs.quick(**OVER_FOUR)), vocab_size=95).abstract_state
    leaves = jax.tree_util.tree_leaves_with_path(state)
    kernels = [leaf for path, leaf in leaves if "kernel" in jax.tree_util.keystr(path)]
    assert len(kernels) == 3 * 6  # in parameters, momentum and average
    assert all(np.prod(leaf.sharding.shard_shape(leaf.shape)) * 4 == leaf.size for leaf in kernels)


def test_run_initialized_from_another_takes_its_average(muon, tmp_path):
    config = runs.quick(**MUON, init_from=str(muon[0]), optimizer__ema=0.5, checkpoint__history=2)
    with pytest.raises(runs.CrashError):
        train.train(config, tmp_path / "second", on_step=runs.crash_at(1))
    first, second = attnlab.load(muon[0]), attnlab.load(tmp_path / "second", 0)
    assert sha256(first.params) == sha256(second.params) != runs.records(muon[0])[-1]["params_sha256"]
    assert first.tokenizer.to_dict() == second.tokenizer.to_dict()


def test_average_is_evaluated_and_loaded_but_does_not_affect_training(tmp_path, capsys):
    config = runs.quick(optimizer__ema=0.5, steps=6, checkpoint__history=7)
    train.train(config, tmp_path / "run", **BIGRAM)
    train.train(runs.quick(steps=6, eval__patience=1), tmp_path / "plain", **BIGRAM)
    assert ends(tmp_path / "plain") == [("val", 5), ("val", 6), ("final", 6)]  # each evaluation is lower
    averaged, without = runs.records(tmp_path / "run"), runs.records(tmp_path / "plain")
    assert [r for r in averaged if r["split"] == "train"] == [r for r in without if r["split"] == "train"]
    assert averaged[-1]["params_sha256"] == without[-1]["params_sha256"] and averaged[-1]["loss"] != without[-1]["loss"]

    def loaded(step):
        return attnlab.load(tmp_path / "run", step, **BIGRAM).params["params"]["Embed_0"]["embedding"]

    vocab_size = attnlab.load(tmp_path / "run", **BIGRAM).tokenizer.vocab_size
    like = TrainProgram(configs.completed(config), vocab_size, **BIGRAM).abstract_state
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    raw = [np.asarray(checkpoints.restore(n, like).params["Embed_0"]["embedding"], np.float64) for n in range(7)]
    for step in (1, 4, 6):
        weights = 0.5 ** np.arange(step - 1, -1, -1.0)
        expected = np.tensordot(weights / weights.sum(), raw[1 : step + 1], 1)
        np.testing.assert_allclose(loaded(step), expected, atol=1e-6)  # float32
    np.testing.assert_array_equal(loaded(0), raw[0])
    assert sha256(checkpoints.restore(6, like).params) == averaged[-1]["params_sha256"]

    capsys.readouterr()
    loss = train.train(config, tmp_path / "run", eval_only=True, **BIGRAM).loss
    assert loss == pytest.approx(averaged[-1]["loss"], rel=1e-6)
    assert f"validation loss {averaged[-1]['loss']:.4f}" in capsys.readouterr().out


# --- early stopping: at this learning rate no parameter changes, so no evaluation after the first is lower


def still(workdir, patience=2, **options):
    config = runs.quick(optimizer__learning_rate=1e-30, steps=20, eval__patience=patience, checkpoint__every=6)
    return train.train(config, workdir, **BIGRAM, **options)


def ends(workdir):
    return [(r["split"], r["step"]) for r in runs.records(workdir) if r["split"] != "train"]


@pytest.fixture(scope="module")
def ended_early(tmp_path_factory):
    """A run of 20 steps that ends at its third evaluation, after step 15."""
    workdir = tmp_path_factory.mktemp("runs") / "early"
    still(workdir)
    return workdir


def test_run_ends_when_validation_has_not_improved_for_its_patience(ended_early, capsys):
    assert ends(ended_early) == [("val", 5), ("val", 10), ("val", 15), ("final", 15)]
    before = runs.contents(ended_early)
    assert still(ended_early).loss == runs.records(ended_early)[-1]["loss"]
    assert "is finished (15 steps): nothing to do; --config.eval.patience=0 continues" in capsys.readouterr().out
    assert runs.contents(ended_early) == before
    loaded = attnlab.load(ended_early, **BIGRAM)
    assert sha256(loaded.params["params"]) == runs.records(ended_early)[-1]["params_sha256"]


def test_run_killed_before_early_stopping_ends_at_the_same_step(ended_early, tmp_path):
    for step in (7, 14):
        with pytest.raises(runs.CrashError):
            still(tmp_path / "run", on_step=runs.crash_at(step))
    still(tmp_path / "run")
    assert runs.records(tmp_path / "run") == runs.records(ended_early)


@pytest.mark.parametrize("lost", ["final", "val"])
def test_run_killed_after_its_last_save_ends_at_the_same_step(ended_early, tmp_path, lost):
    """The kill comes before the final record, or already before the evaluation, like a signal that stops the run."""
    shutil.copytree(ended_early, tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    if lost == "val":  # the last checkpoint is then from before the evaluation
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "15")
    still(tmp_path / "run")
    assert runs.records(tmp_path / "run") == runs.records(ended_early)


def test_early_stopped_run_continues_exactly_without_patience(ended_early, tmp_path):
    shutil.copytree(ended_early, tmp_path / "run")
    for name in ("run", "whole"):
        still(tmp_path / name, patience=0)
    assert ends(tmp_path / "run")[3:] == [("final", 15), ("val", 20), ("final", 20)]
    records = [r for r in runs.records(tmp_path / "run") if (r["split"], r["step"]) != ("final", 15)]
    assert records == runs.records(tmp_path / "whole")


# --- precision


def test_auto_precision_is_saved_resolved_and_kept_elsewhere(tmp_path, monkeypatch, capsys):
    """The run also uses ALiBi, a window and grouped heads."""
    config = runs.quick(precision="auto", steps=6, model__positions="alibi", sample__length=0)
    config.model.attention.update(window=8, kv_heads=1)
    monkeypatch.setattr(precision, "_cpu_flags", lambda: {"avx512_bf16"})
    with pytest.raises(runs.CrashError):
        train.train(config, tmp_path / "run", on_step=runs.crash_at(5))
    assert json.loads((tmp_path / "run" / "config.json").read_text())["precision"] == "bfloat16"
    assert "1 cpu device (mesh), in bfloat16, into" in capsys.readouterr().out
    monkeypatch.setattr(precision, "_cpu_flags", set)
    train.train(config, tmp_path / "run")
    assert "1 cpu device (mesh), in bfloat16, into" in capsys.readouterr().out
    assert np.isfinite([r["loss"] for r in runs.records(tmp_path / "run")]).all()
    assert attnlab.load(tmp_path / "run").model.dtype == "bfloat16"
    train.train(config, tmp_path / "run")  # finished
    config.precision = "float32"
    with pytest.raises(ValueError, match="config.precision = 'float32', .*'bfloat16'"):
        train.train(config, tmp_path / "run")
