"""The GPU's command, as far as a CPU can tell: it checks, notices what is wrong, goes on, and keeps figures."""

import json
import sys

import numpy as np
import pytest

from attnlab.bench import gpu, peers
from attnlab.bench.__main__ import main
from attnlab.bench.workers import Worker
from attnlab.errors import UserError
from attnlab.ops import blockwise

SMALL = ["--lengths=24", "--head_dims=8", "--rounds=1", "--notrain"]


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    """What the command tells JAX by its environment ends with the test."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.parametrize("mask", [*(pytest.param(m, marks=pytest.mark.slow) for m in gpu.MASKS[:-1]), gpu.MASKS[-1]])
def test_a_mask_is_checked_and_raced(capsys, tmp_path, mask):
    path = tmp_path / "gpu.json"
    assert main(["bench", "gpu", *SMALL, f"--masks={mask}", f"--json={path}"]) == 0
    out = capsys.readouterr().out
    assert "WRONG" not in out and "left out" not in out and "no GPU is here" in out
    kept = json.loads(path.read_text())
    assert {"device", "date", "jax", "rounds"} <= set(kept) and kept["wrong"] == []
    for dtype in ("bfloat16", "float32"):
        assert f"check {mask}, D = 8, {dtype}: attnlab cudnn is not here: it needs a gpu" in out
        assert [kept[f"check_{name}_{mask}_d8_{dtype}"] for name in ("dense", "blockwise")] == ["ok", "ok"]
    for what, said in (("forward", "forward"), ("backward", "forward + backward")):
        assert f"{mask}, T = 24, D = 8, {said}: attnlab dense" in out
        assert kept[f"ms_{mask}_t24_d8_{what}_attnlab_blockwise"] > 0
        assert kept[f"ratio_{mask}_t24_d8_{what}_vs_jax_nn"] > 0


def _off(answer):
    out, lse = answer
    return 1.1 * out, lse


def _broken(answer):
    raise ArithmeticError("nothing comes of this")


FAULTS = [(_off, "is off by out 1.0e-01"), (_broken, "failed (ArithmeticError: nothing comes of this)")]


@pytest.mark.parametrize("fault, told", FAULTS)
def test_a_backend_that_is_wrong_is_told_and_the_others_race_on(capsys, monkeypatch, tmp_path, fault, told):
    right = blockwise.attend
    monkeypatch.setattr(blockwise, "attend", lambda *args, **named: fault(right(*args, **named)))
    path = tmp_path / "gpu.json"
    assert main(["bench", "gpu", *SMALL, "--masks=causal", f"--json={path}"]) == 1
    out = capsys.readouterr().out
    assert f"WRONG: check causal, D = 8, bfloat16: attnlab blockwise {told}" in out
    assert "WRONG: attnlab blockwise is left out of causal, T = 24" in out
    kept = json.loads(path.read_text())
    assert kept["check_dense_causal_d8_float32"] == "ok" and kept["check_blockwise_causal_d8_float32"] == "WRONG"
    assert len(kept["wrong"]) == 3  # both types, and the race
    assert "ratio_causal_t24_d8_backward_vs_jax_nn" in kept
    assert "ms_causal_t24_d8_forward_attnlab_blockwise" not in kept


@pytest.mark.parametrize("mask", gpu.MASKS)
def test_flops_are_those_of_visible_pairs(mask):
    task = gpu._task(mask, 2, 50, 3, 4, "bfloat16", 7)
    pairs = np.broadcast_to(peers.mask_of(task, task.ids).dense(50, 50, batch=(2,), num_heads=3), (2, 3, 50, 50)).sum()
    assert gpu._flops(task, "forward") == pairs * 2 * 2 * 4
    assert gpu._flops(task, "backward") == pairs * 7 * 2 * 4


@pytest.mark.slow
def test_training_races_too(capsys, tmp_path):
    path = tmp_path / "gpu.json"
    arguments = ["--lengths=8", "--head_dims=8", "--masks=causal", "--rounds=1", "--peak_tflops=1", f"--json={path}"]
    assert main(["bench", "gpu", *arguments]) == 0
    assert "not here: nanoGPT" in capsys.readouterr().out
    kept = json.loads(path.read_text())
    assert kept["tokens_per_second_train_tiny_bfloat16_attnlab"] > 0
    assert 0 < kept["mfu_train_tiny_bfloat16_attnlab"] < 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--lengths=a"], "--lengths=a: expected whole numbers of 1 or more"),
        (["--head_dims=64,0"], "--head_dims=64,0: expected whole numbers of 1 or more"),
        (["--masks=casual"], "--masks: 'casual' is unknown (did you mean causal?): use causal, window, documents"),
        (["--rounds=0"], "--rounds=0: expected 1 or more"),
        (["--batch=0"], "--batch=0: expected 1 or more"),
        (["--peak_tflops=-1"], "--peak_tflops=-1.0: expected more than 0"),
        (["--peer_path=/nowhere"], "--peer_path=/nowhere holds no model.py: name a checkout of nanoGPT"),
        (["--peer_python=/nowhere"], "/nowhere cannot be started (No such file or directory): name a Python"),
        ([f"--json={__file__}"], "is there already: name a new file"),
        (["--round=3"], "--round is no flag (did you mean rounds?)"),
    ],
)
def test_a_mistake_is_one_line(capsys, arguments, message):
    assert main(["bench", "gpu", *SMALL, *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_a_process_that_died_is_closed_in_silence(tmp_path):
    worker = Worker([sys.executable, "-c", "raise SystemExit('no more')"], tmp_path / "log")
    worker.process.wait()
    with pytest.raises(UserError, match="ended: no more"):
        worker.ask("train", steps=1)
    worker.close()


def test_a_peer_python_without_torch_is_told_before_anything_runs(capsys, tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("""raise ModuleNotFoundError("No module named 'torch'")""")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # of the peer's process, where this Python may have torch
    assert main(["bench", "gpu", *SMALL, f"--peer_python={sys.executable}"]) == 2
    captured = capsys.readouterr()
    assert "ended: ModuleNotFoundError: No module named 'torch'" in captured.err and "check" not in captured.out
