"""The benches run, take turns, and refuse what they cannot race. No test asserts a time."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.bench import memory, timing
from attnlab.bench.__main__ import main
from attnlab.bench.attention import MASKS


def test_contenders_take_turns():
    calls = []
    contenders = {name: lambda name=name: calls.append(name) or jnp.ones(()) for name in "abc"}
    seconds = timing.alternate(contenders, rounds=2)
    assert "".join(calls) == "abc" * 3
    assert {name: len(times) for name, times in seconds.items()} == dict.fromkeys("abc", 2)


def test_a_ratio_is_the_median_of_the_ratios_within_rounds():
    assert timing.ratio({"a": [2.0, 30.0, 8.0], "b": [1.0, 10.0, 4.0]}, "a", "b") == 2


SMALL = ["--lengths=8,12", "--rounds=2", "--batch=2", "--heads=2", "--head_dim=4", "--window=3", "--documents=2"]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's FlexAttention, of its own parts
def test_the_attention_race_prints_tables_and_keeps_figures_and_a_picture(capsys, tmp_path):
    figures, picture = tmp_path / "figures.json", tmp_path / "attention.png"
    assert main(["bench", "attention", *SMALL, f"--json={figures}", f"--plot={picture}"]) == 0
    out = capsys.readouterr().out
    assert "left out" not in out  # every contender gave the same answer
    assert "peak memory, MiB" in out
    kept = json.loads(figures.read_text())
    for label in (f"{mask}, T = {n}, forward{more}" for mask in MASKS for n in (8, 12) for more in ("", " + backward")):
        assert label in out
        assert {"attnlab", "attnlab dense", "jax.nn"} <= set(kept["seconds"][label]) == set(kept["peak_mib"][label])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_peers_may_be_chosen(capsys):
    assert main(["bench", "attention", *SMALL, "--masks=causal", "--peers=attnlab"]) == 0
    assert "jax.nn" not in capsys.readouterr().out


@pytest.mark.skipif(memory.peak(lambda: 0) is None, reason="this system does not tell peak memory")
def test_peak_memory_counts_what_a_call_holds_at_its_height():
    def call():
        held = np.ones(2**24)  # 128 MiB
        return held[:1].copy()

    assert 120 < memory.peak(call) < 140


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["atention"], "'atention' is no race (did you mean attention?): use one of attention"),
        (["attention", "--lengths=a"], "--lengths=a: expected whole numbers"),
        (["attention", "--lengths=0"], "--lengths=0: expected lengths of 1 or more"),
        (["attention", "--rounds=0"], "--rounds=0: expected 1 or more"),
        (["attention", "--masks=casual"], "--masks: 'casual' is unknown (did you mean causal?): use causal, window"),
        (["attention", "--peers=torch"], "--peers: 'torch' is unknown"),
        (["attention", "--json=/nowhere/x.json"], "--json=/nowhere/x.json lies in no folder: name a new file"),
        (["attention", f"--plot={__file__}"], "is there already: name a new file"),
        (["attention", "--round=3"], "--round is no flag (did you mean rounds?)"),
    ],
)
def test_a_mistake_is_one_line(capsys, arguments, message):
    assert main(["bench", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_help_lists_the_races(capsys):
    assert main(["bench"]) == 0 and "Races: attention" in capsys.readouterr().out
