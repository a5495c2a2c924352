"""The operator's benchmark."""

import json

import matplotlib.pyplot as plt
import pytest

from attnlab._benchmarks.attention import MASKS
from attnlab._benchmarks.harness import peers, recording

SMALL = ["--rounds=2", "--batch=2", "--heads=2", "--head_dim=4", "--window=3", "--documents=2"]


INSTALLED = pytest.param([], marks=pytest.mark.slow, id="all installed")


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # raised inside torch's FlexAttention
@pytest.mark.parametrize("chosen", [pytest.param(["--peers=jax.nn,attnlab dense"], id="JAX's"), INSTALLED])
def test_attention_peers_agree_and_are_timed(capsys, figures_of, chosen):
    figures = figures_of("attention", *SMALL, "--lengths=12", *chosen)
    out = capsys.readouterr().out
    assert "left out" not in out and "peak memory, MiB" in out
    assert set(figures["seconds"]) == {f"{m}, T = 12, forward{more}" for m in MASKS for more in ("", " + backward")}
    for number, mask in enumerate(MASKS, 1):
        assert f"[{number}/3] {mask}, T = 12, forward: attnlab " in out
    for label, seconds in figures["seconds"].items():
        assert {"attnlab", "attnlab dense", "jax.nn"} <= set(seconds) == set(figures["peak_mib"][label])


def test_attention_with_peers_named_keeps_attnlab(capsys, figures_of, tmp_path):
    picture = tmp_path / "attention.png"
    options = ["--masks=causal", "--lengths=8", "--peers=jax.nn", f"--plot={picture}"]
    figures = figures_of("attention", *SMALL, *options)
    assert all(set(seconds) == {"attnlab", "jax.nn"} for seconds in figures["seconds"].values())
    assert "× the time of attnlab" in capsys.readouterr().out
    pixels = plt.imread(picture)[..., :3]
    for edge in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]):
        assert (edge == 1).all()  # a title that is cropped reaches the edge


def test_attention_with_attnlab_as_only_peer_runs_alone(figures_of):
    figures = figures_of("attention", *SMALL, "--masks=causal", "--lengths=8", "--peers=attnlab")
    assert all(set(seconds) == {"attnlab"} for seconds in figures["seconds"].values())


def test_attention_in_bfloat16_leaves_out_a_peer_with_another_mask(capsys, figures_of, monkeypatch, tmp_path):
    """A window of 3 keys and of 4 keys before each query: outputs that rounding does not explain."""

    def wider(task):
        return peers.ours("dense", task._replace(window=task.window + 1))

    monkeypatch.setitem(peers.PEERS, "jax.nn", ("jax", wider))
    options = ["--masks=window", "--lengths=12", "--dtype=bfloat16", "--peers=jax.nn,attnlab dense"]
    figures = figures_of("attention", *SMALL, *options, f"--record={tmp_path}")
    assert "jax.nn is left out of window, T = 12: its output differs by" in capsys.readouterr().out
    assert figures["title"].startswith("attention, bfloat16") and len(figures["ratio"]) == 2
    assert all(set(row) == {"attnlab", "attnlab dense"} and row["attnlab"] == 1 for row in figures["ratio"].values())
    recorded = json.loads((tmp_path / recording.file_name(recording.machine())).read_text())["benchmarks"]["attention"]
    sizes = "window of 3, bfloat16, B = 2, H = 2, D = 4"
    assert list(recorded) == [f"window, T = 12, {which}, {sizes}" for which in ("forward", "forward + backward")]


def test_attention_in_bfloat16_agrees_with_torch(capsys, figures_of):
    pytest.importorskip("torch", reason="torch is not installed")
    figures = figures_of("attention", *SMALL, "--lengths=12", "--dtype=bfloat16", "--peers=torch SDPA")
    assert "left out" not in capsys.readouterr().out
    assert all("torch SDPA" in row for row in figures["ratio"].values())
