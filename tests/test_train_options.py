"""Runs with other optimizers, an average of the parameters, an early end, and a precision that the hardware chooses."""

import json
import shutil

import jax
import numpy as np
import pytest

import attnlab
from attnlab import train
from attnlab.training import precision
from attnlab.training.checkpoints import Checkpoints, sha256
from attnlab.training.experiment import Experiment
from tests.test_train import CrashError, contents, crash_at, digests, quick, records, same_checkpoints, workdir_alone
from tests.test_train import shared_programs as shared_programs  # a fixture of this module too

SLOW = pytest.mark.slow

# --- optimizers

MUON = {"optimizer__name": "muon", "optimizer__b2_halflife": 1e4, "optimizer__schedule": "linear"}
LION = {"optimizer__name": "lion", "optimizer__learning_rate": 1e-3, "optimizer__schedule": "constant"}
LION |= {"parallel__strategy": "pmap", "parallel__mesh__data": -1}
SGD = {"optimizer__name": "sgd", "optimizer__learning_rate": 0.1, "model__num_layers": 4}


def whole_and_crashed(folder, **options):
    """A run, and one that crashed after step 9."""
    config = quick(optimizer__ema=0.5, **options)
    assert train.train(config, folder / "whole") == 0
    with pytest.raises(CrashError):
        train.train(config, folder / "run", on_step=crash_at(9))
    return folder / "whole", folder / "run"


@pytest.fixture(scope="module")
def muon(tmp_path_factory):
    return whole_and_crashed(tmp_path_factory.mktemp("muon"), **MUON)


@pytest.mark.parametrize(
    "options", ["muon", pytest.param(LION, marks=SLOW), pytest.param(SGD, marks=SLOW)], ids=["muon", "lion", "sgd"]
)
def test_optimizer_trains_and_resumes_bit_for_bit(request, tmp_path, options):
    made = request.getfixturevalue("muon") if options == "muon" else whole_and_crashed(tmp_path, **options)
    whole, run = made[0], shutil.copytree(made[1], tmp_path / "resumed")
    found = records(whole)
    losses = [record["loss"] for record in found if record["split"] == "val"]
    assert losses[-1] < losses[0] - 0.02 and losses[-1] < 4.6  # of 103 characters, ln(103) = 4.63 to begin with
    assert workdir_alone(run) == 0
    assert records(run) == found and same_checkpoints(run, whole)
    assert set(digests(run, 12)) == {"params", "opt_state", "average"}


@pytest.mark.parametrize("stacked", [pytest.param(False, marks=SLOW), True])
def test_muon_and_the_average_are_sharded_as_their_parameters(muon, tmp_path, stacked):
    """A run that is saved on one device goes on over four, which hold shares of all that has the shape of a kernel."""
    shutil.copytree(muon[1], tmp_path / "four")
    config = quick(**MUON, optimizer__ema=0.5, model__scan=stacked, parallel__mesh__fsdp=4)
    assert train.train(config, tmp_path / "four") == 0
    found, expected = records(tmp_path / "four"), records(muon[0])
    np.testing.assert_allclose([r["loss"] for r in found], [r["loss"] for r in expected], rtol=1e-5)  # sums' order
    state = Experiment(config, vocab_size=95).create_state()
    leaves = jax.tree_util.tree_leaves_with_path(state)
    kernels = [leaf for path, leaf in leaves if "kernel" in jax.tree_util.keystr(path)]
    assert len(kernels) == 3 * 6  # of parameters, momentum and average
    assert all(leaf.addressable_data(0).size * 4 == leaf.size for leaf in kernels)


@pytest.fixture(scope="module")
def averaged(tmp_path_factory):
    """A run with an average, and the same without, which its patience does not end."""
    folder = tmp_path_factory.mktemp("averaged")
    config = quick(optimizer__ema=0.5, checkpoint__history=13, sample__every=12)
    assert train.train(config, folder / "run") == 0
    assert train.train(quick(eval__patience=1), folder / "plain") == 0
    return folder / "run", folder / "plain", config


def test_average_is_evaluated_loaded_and_sampled_from_while_training_goes_on_without_it(averaged, capsys):
    run, plain, config = averaged
    found, without = records(run), records(plain)
    assert [r for r in found if r["split"] == "train"] == [r for r in without if r["split"] == "train"]
    assert found[-1]["params_sha256"] == without[-1]["params_sha256"] and found[-1]["loss"] != without[-1]["loss"]

    like = Experiment(config, attnlab.load(run).tokenizer.vocab_size).abstract_state
    checkpoints = Checkpoints(run / "checkpoints")
    raw = [np.asarray(checkpoints.restore(step, like).params["embed"]["embedding"], np.float64) for step in range(13)]
    for step in (1, 7, 12):
        weights = 0.5 ** np.arange(step - 1, -1, -1.0)
        expected = np.tensordot(weights / weights.sum(), raw[1 : step + 1], 1)
        loaded = attnlab.load(run, step).params["params"]["embed"]["embedding"]
        np.testing.assert_allclose(loaded, expected, atol=1e-6)  # float32
    np.testing.assert_array_equal(attnlab.load(run, 0).params["params"]["embed"]["embedding"], raw[0])
    assert sha256(checkpoints.restore(12, like).params) == found[-1]["params_sha256"]

    assert workdir_alone(run, "--eval_only") == 0
    assert f"validation loss {found[-1]['loss']:.4f}" in capsys.readouterr().out


def test_run_that_starts_from_another_takes_its_average(averaged, tmp_path):
    config = quick(init_from=str(averaged[0]), optimizer__ema=0.5, checkpoint__history=2)
    with pytest.raises(CrashError):
        train.train(config, tmp_path / "second", on_step=crash_at(1))
    first, second = attnlab.load(averaged[0]).params, attnlab.load(tmp_path / "second", 0).params
    assert sha256(first) == sha256(second)


# --- early end: at this learning rate no parameter changes, so that no evaluation after the first is lower

STILL = {"optimizer__learning_rate": 1e-30, "steps": 30, "model__dropout": 0.0}


def ends(workdir):
    return [(r["split"], r["step"]) for r in records(workdir) if r["split"] != "train"]


@pytest.fixture(scope="module")
def ended_early(tmp_path_factory):
    """A run of 30 steps that ends at its third evaluation, after step 15."""
    workdir = tmp_path_factory.mktemp("runs") / "early"
    assert train.train(quick(**STILL, eval__patience=2), workdir) == 0
    return workdir


def test_run_ends_when_validation_has_not_improved_for_its_patience(ended_early, capsys):
    assert ends(ended_early) == [("val", 5), ("val", 10), ("val", 15), ("final", 15)]
    before = contents(ended_early)
    assert workdir_alone(ended_early) == 0
    assert "is finished (15 steps): nothing to do; --config.eval.patience=0 goes on" in capsys.readouterr().out
    assert contents(ended_early) == before
    assert sha256(attnlab.load(ended_early).params["params"]) == records(ended_early)[-1]["params_sha256"]


@pytest.mark.parametrize("crashes", [pytest.param([3], marks=SLOW), [7, 13], pytest.param([14], marks=SLOW)])
def test_run_killed_before_its_early_end_ends_at_the_same_step(ended_early, tmp_path, crashes):
    for step in crashes:
        with pytest.raises(CrashError):
            train.train(quick(**STILL, eval__patience=2), tmp_path / "run", on_step=crash_at(step))
    assert workdir_alone(tmp_path / "run") == 0
    assert records(tmp_path / "run") == records(ended_early)


@pytest.mark.parametrize("lost", ["final", "val"])
def test_run_killed_between_its_last_save_and_its_final_record_ends_there(ended_early, tmp_path, lost, capsys):
    """Before the final record; and before the evaluation as well, as when a signal stops it."""
    shutil.copytree(ended_early, tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    if lost == "val":  # the offset in the checkpoint is that of a save before the evaluation
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "15")
    assert workdir_alone(tmp_path / "run") == 0
    assert records(tmp_path / "run") == records(ended_early)


def test_run_ended_early_goes_on_without_patience_as_if_never_stopped(ended_early, tmp_path):
    shutil.copytree(ended_early, tmp_path / "run")
    assert workdir_alone(tmp_path / "run", "--config.eval.patience=0") == 0
    assert ends(tmp_path / "run")[3:] == [("final", 15), ("val", 20), ("val", 25), ("val", 30), ("final", 30)]
    assert train.train(quick(**STILL), tmp_path / "whole") == 0
    assert [r for r in records(tmp_path / "run") if (r["split"], r["step"]) != ("final", 15)] == records(
        tmp_path / "whole"
    )


def test_run_that_improves_is_not_ended(averaged):
    assert ends(averaged[1]) == [("val", 5), ("val", 10), ("val", 12), ("final", 12)]


# --- precision


def test_auto_is_saved_as_what_it_stands_for_and_kept_on_other_hardware(tmp_path, monkeypatch, capsys):
    config = quick(precision="auto")
    assert config.precision == "auto"
    monkeypatch.setattr(precision, "_cpu_flags", lambda: {"avx512_bf16"})
    with pytest.raises(CrashError):
        train.train(config, tmp_path / "run", on_step=crash_at(5))
    assert json.loads((tmp_path / "run" / "config.json").read_text())["precision"] == "bfloat16"
    assert "1 cpu device (mesh), in bfloat16, into" in capsys.readouterr().out
    monkeypatch.setattr(precision, "_cpu_flags", set)
    assert train.train(config, tmp_path / "run") == 0
    assert "the run began in bfloat16, and goes on in it" in capsys.readouterr().out
    assert attnlab.load(tmp_path / "run").model.dtype == "bfloat16"
    assert train.train(config, tmp_path / "run") == 0  # finished
    with pytest.raises(ValueError, match="config.precision = 'float32', .*'bfloat16'"):
        train.train(quick(precision="float32"), tmp_path / "run")
