"""The benchmark of training. No test asserts a time."""

import pytest

from attnlab.bench import main


def test_train_writes_a_table_and_figures(in_process, peer, figures_of, capsys):
    figures = figures_of("train", in_process, *peer(), "--precisions=bfloat16", "--rounds=1", "--seconds=1")
    out = capsys.readouterr().out
    assert "tiny: starting nanoGPT\n" in out and "× float32" in out and "tiny, nanoGPT autocast compiled" in out
    theirs = ("nanoGPT", "nanoGPT_compiled", "nanoGPT_autocast", "nanoGPT_autocast_compiled")
    kinds = ("step_ms", "tokens_per_second", "peak_mib")
    names = {f"{kind}_tiny_{contender}" for kind in kinds for contender in ("attnlab_bfloat16", *theirs)}
    over_floor = {f"{kind}_tiny_attnlab_bfloat16" for kind in ("floor_ms", "step_over_floor", "products_over_alone")}
    assert set(figures) == names | {"ratio_tiny_bfloat16", "ratio_tiny_bfloat16_over_autocast"} | over_floor
    assert "× floor" in out and figures["step_over_floor_tiny_attnlab_bfloat16"] > 0
    assert "tiny, attnlab bfloat16: products of a step" in out and "ms in the step" in out
    assert figures["products_over_alone_tiny_attnlab_bfloat16"] > 0
    assert figures["step_ms_tiny_nanoGPT"] == 2000 and figures["tokens_per_second_tiny_nanoGPT"] == 4 * 8 / 2


def test_train_compares_each_precision_with_the_faster_nanogpt_of_its_own(in_process, peer, figures_of, capsys):
    """The peer's stand-in is twice as fast compiled, and four times as fast under autocast."""
    figures = figures_of("train", in_process, *peer(), "--rounds=1", "--seconds=1")
    milliseconds = figures["step_ms_tiny_attnlab_bfloat16"]
    assert figures["ratio_tiny_bfloat16"] == pytest.approx(1000 / milliseconds)
    assert figures["ratio_tiny_bfloat16_over_autocast"] == pytest.approx(250 / milliseconds)
    assert figures["ratio_tiny_float32"] == pytest.approx(1000 / figures["step_ms_tiny_attnlab_float32"])
    assert "ratio_tiny_float32_over_autocast" not in figures
    cells = [line.split("│")[4:6] for line in capsys.readouterr().out.splitlines() if "│ tiny, nanoGPT" in line]
    assert [[cell.strip() for cell in row] for row in cells] == [
        ["0.50", ""],
        ["1.00", ""],
        ["2.00", "0.50"],
        ["4.00", "1.00"],
    ]


@pytest.mark.parametrize(
    "options, theirs",
    [
        (["--precisions=float32"], {"nanoGPT", "nanoGPT_compiled"}),
        (["--precisions=bfloat16", "--nocompiled"], {"nanoGPT", "nanoGPT_autocast"}),
    ],
    ids=["float32", "eager"],
)
def test_train_races_the_nanogpts_that_its_flags_select(in_process, peer, figures_of, options, theirs):
    figures = figures_of("train", in_process, *peer(), *options, "--rounds=1", "--seconds=1")
    assert {name.partition("step_ms_tiny_nanoGPT")[2] for name in figures if "step_ms_tiny_nanoGPT" in name} == {
        name.removeprefix("nanoGPT") for name in theirs
    }


def test_train_without_a_peer_has_no_ratio(in_process, figures_of):
    figures = figures_of("train", in_process, "--precisions=float32", "--rounds=1", "--seconds=1")
    assert not [name for name in figures if name.startswith("ratio")]
    assert figures["peak_mib_tiny_attnlab_float32"] is None


def test_train_peer_that_fails_is_one_line(in_process, peer, error_line):
    error = error_line("train", in_process, *peer(dies_of="train"), "--precisions=float32", "--nocompiled")
    assert "nanogpt.py" in error and error.endswith("ended: RuntimeError: no more\n")


@pytest.mark.slow
def test_train_profile_writes_traces_and_lists_ops(tiny, tmp_path, capsys):
    folder = tmp_path / "trace"
    assert main(["bench", "train", tiny, "--precisions=float32", f"--profile={folder}"]) == 0
    assert "tiny, attnlab float32: the most expensive ops" in capsys.readouterr().out
    assert list(folder.rglob("*.xplane.pb"))
