"""The operator's benchmarks, `attention` and `gpu`: which contenders are left out, and which are wrong."""

import json

import jax
import numpy as np
import pytest

from attnlab._benchmarks import gpu
from attnlab._benchmarks.harness import gpu_operator, peers, recording
from attnlab.ops import blockwise

SMALL = ["--rounds=1", "--batch=2", "--heads=2", "--head_dim=4", "--window=3", "--documents=2", "--lengths=12"]
GPU = ["--lengths=24", "--head_dims=8", "--rounds=1"]


def test_attention_leaves_out_a_peer_with_another_mask(capsys, figures_of, monkeypatch, tmp_path):
    """A window of 3 keys and of 4 keys before each query: outputs that rounding does not explain."""

    def wider(task):
        return peers.ours("dense", task._replace(window=task.window + 1))

    monkeypatch.setitem(peers.PEERS, "jax.nn", ("jax", wider))
    options = ["--masks=window", "--dtype=bfloat16", "--peers=jax.nn,attnlab dense"]
    figures = figures_of("attention", *SMALL, *options, f"--record={tmp_path}")
    assert "jax.nn is left out of window, T = 12: its output differs by" in capsys.readouterr().out
    assert all(set(row) == {"attnlab", "attnlab dense"} and row["attnlab"] == 1 for row in figures["ratio"].values())
    recorded = json.loads((tmp_path / recording.file_name(recording.machine())).read_text())["benchmarks"]["attention"]
    sizes = "window of 3, bfloat16, B = 2, H = 2, D = 4"
    assert list(recorded) == [f"window, T = 12, {which}, {sizes}" for which in ("forward", "forward + backward")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # raised inside torch's FlexAttention
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_installed_peers_agree_under_every_mask(capsys, figures_of, dtype):
    peers = [] if dtype == "float32" else ["--peers=jax.nn,torch SDPA"]
    if peers:
        pytest.importorskip("torch", reason="torch is not installed")
    assert len(figures_of("attention", *SMALL, f"--dtype={dtype}", *peers)["seconds"]) == 2 * 3
    assert "left out" not in capsys.readouterr().out


@pytest.mark.slow
def test_gpu_checks_and_times_installed_peers_and_training(capsys, figures_of):
    figures = figures_of("gpu", *GPU, "--peak_tflops=1")
    out = capsys.readouterr().out
    assert "WRONG" not in out and "left out of" not in out and "nanoGPT is left out" in out
    assert {value for name, value in figures.items() if name.startswith("check_dense")} == {"ok"}
    assert 0 < figures["mfu_train_tiny_bfloat16_attnlab"] < 1


def _wrong(answer):
    """Off by a tenth in bfloat16; an exception in float32."""
    out, lse = answer
    if out.dtype == np.float32:
        raise ArithmeticError("no answer")
    return 1.1 * out, lse


def test_gpu_wrong_backend_is_reported_and_the_others_run(capsys, monkeypatch, figures_of):
    attend = blockwise.attend
    monkeypatch.setattr(blockwise, "attend", lambda *args, **options: _wrong(attend(*args, **options)))
    figures = figures_of("gpu", *GPU, "--notrain", "--masks=causal", code=1)
    out = capsys.readouterr().out
    assert "WRONG: check causal, D = 8, bfloat16: attnlab blockwise has errors out 1.0e-01" in out
    assert "WRONG: check causal, D = 8, float32: attnlab blockwise failed (ArithmeticError: no answer)" in out
    assert "WRONG: attnlab blockwise is left out of causal, T = 24" in out
    assert [figures[f"check_{name}_causal_d8_float32"] for name in ("dense", "blockwise")] == ["ok", "WRONG"]
    assert len(figures["wrong"]) == 3 and "ratio_causal_t24_d8_backward_vs_jax_nn" in figures


@pytest.mark.parametrize("mask", gpu.MASKS)
def test_flops_are_those_of_visible_pairs(mask):
    task = gpu_operator.make_task(mask, 2, 50, 3, 4, "bfloat16", 7)
    visible = jax.jit(lambda: peers.mask_of(task, task.ids).dense(50, 50, batch=(2,), num_heads=3))()
    pairs = np.broadcast_to(visible, (2, 3, 50, 50)).sum()
    assert gpu_operator.flops_of(task, "forward") == pairs * 2 * 2 * 4
    assert gpu_operator.flops_of(task, "backward") == pairs * 7 * 2 * 4
