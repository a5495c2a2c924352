"""The GPU's benchmark, as far as a CPU can test it. No test asserts a time."""

import importlib.util
import sys

import jax
import numpy as np
import pytest

from attnlab._benchmarks import gpu
from attnlab._benchmarks.harness import gpu_operator, peers
from attnlab.ops import blockwise

SMALL = ["--lengths=24", "--head_dims=8", "--rounds=1", "--notrain"]


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    """Restores the environment variables that the command sets."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def without_torch(monkeypatch):
    """Hides torch, as if it were not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: None if name == "torch" else find(name, *args))


def test_gpu_checks_and_times_every_backend(capsys, figures_of, without_torch):
    figures = figures_of("gpu", *SMALL, "--masks=documents")
    assert_complete(figures, capsys.readouterr().out, "documents")


@pytest.mark.slow
@pytest.mark.parametrize("mask", gpu.MASKS)
def test_gpu_checks_and_times_with_installed_peers(capsys, figures_of, mask):
    figures = figures_of("gpu", *SMALL, f"--masks={mask}")
    assert_complete(figures, capsys.readouterr().out, mask)


def assert_complete(figures, out, mask):
    """Every backend was checked and timed under a mask."""
    assert "WRONG" not in out and f"left out of {mask}" not in out and "no GPU found" in out
    assert {"device", "date", "jax", "rounds"} <= set(figures) and figures["wrong"] == []
    for dtype in ("bfloat16", "float32"):
        assert f"check {mask}, D = 8, {dtype}: attnlab cudnn is not available: it needs a gpu" in out
        assert [figures[f"check_{name}_{mask}_d8_{dtype}"] for name in ("dense", "blockwise")] == ["ok", "ok"]
    for which, label in (("forward", "forward"), ("backward", "forward + backward")):
        assert f"{mask}, T = 24, D = 8, {label}: attnlab dense" in out
        assert figures[f"ms_{mask}_t24_d8_{which}_attnlab_blockwise"] > 0
        assert figures[f"ratio_{mask}_t24_d8_{which}_vs_jax_nn"] > 0


def _wrong(answer):
    """Off by a tenth in bfloat16; an exception in float32."""
    out, lse = answer
    if out.dtype == np.float32:
        raise ArithmeticError("no answer")
    return 1.1 * out, lse


def test_gpu_wrong_backend_is_reported_and_the_others_run(capsys, monkeypatch, figures_of, without_torch):
    attend = blockwise.attend
    monkeypatch.setattr(blockwise, "attend", lambda *args, **options: _wrong(attend(*args, **options)))
    figures = figures_of("gpu", *SMALL, "--masks=causal", code=1)
    out = capsys.readouterr().out
    assert "torch is not installed, so torch and nanoGPT are left out" in out
    assert "WRONG: check causal, D = 8, bfloat16: attnlab blockwise has errors out 1.0e-01" in out
    assert "WRONG: check causal, D = 8, float32: attnlab blockwise failed (ArithmeticError: no answer)" in out
    assert "WRONG: attnlab blockwise is left out of causal, T = 24" in out
    assert [figures[f"check_{name}_causal_d8_float32"] for name in ("dense", "blockwise")] == ["ok", "WRONG"]
    assert figures["check_blockwise_causal_d8_bfloat16"] == "WRONG" and len(figures["wrong"]) == 3
    assert "ratio_causal_t24_d8_backward_vs_jax_nn" in figures
    assert "ms_causal_t24_d8_forward_attnlab_blockwise" not in figures


@pytest.mark.parametrize("mask", gpu.MASKS)
def test_flops_are_those_of_visible_pairs(mask):
    task = gpu_operator.make_task(mask, 2, 50, 3, 4, "bfloat16", 7)
    visible = jax.jit(lambda: peers.mask_of(task, task.ids).dense(50, 50, batch=(2,), num_heads=3))()
    pairs = np.broadcast_to(visible, (2, 3, 50, 50)).sum()
    assert gpu_operator.flops_of(task, "forward") == pairs * 2 * 2 * 4
    assert gpu_operator.flops_of(task, "backward") == pairs * 7 * 2 * 4


@pytest.mark.slow
def test_gpu_times_training(capsys, figures_of, without_torch):
    options = ["--lengths=8", "--head_dims=8", "--masks=causal", "--rounds=1", "--peak_tflops=1"]
    figures = figures_of("gpu", *options)
    assert "nanoGPT is left out" in capsys.readouterr().out
    assert figures["tokens_per_second_train_tiny_bfloat16_attnlab"] > 0
    assert 0 < figures["mfu_train_tiny_bfloat16_attnlab"] < 1


def test_gpu_peer_python_without_torch_is_one_line(error_line, tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("""raise ModuleNotFoundError("No module named 'torch'")""")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # of the peer's process, in case this Python has torch
    error = error_line("gpu", *SMALL, f"--peer_python={sys.executable}")
    assert "ended: ModuleNotFoundError: No module named 'torch'" in error
