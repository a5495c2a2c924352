"""The benches run, take turns, and refuse what they cannot race. No test asserts a time."""

import jax.numpy as jnp
import pytest

from attnlab.bench import timing
from attnlab.bench.__main__ import main


def test_contenders_take_turns():
    calls = []
    contenders = {name: lambda name=name: calls.append(name) or jnp.ones(()) for name in "abc"}
    seconds = timing.alternate(contenders, rounds=2)
    assert "".join(calls) == "abc" * 3
    assert {name: len(times) for name, times in seconds.items()} == dict.fromkeys("abc", 2)


def test_a_ratio_is_the_median_of_the_ratios_within_rounds():
    assert timing.ratio({"a": [2.0, 30.0, 8.0], "b": [1.0, 10.0, 4.0]}, "a", "b") == 2


def test_the_attention_race_prints_a_table(capsys):
    assert main(["bench", "attention", "--lengths=8", "--rounds=2", "--batch=1", "--heads=2", "--head_dim=4"]) == 0
    out = capsys.readouterr().out
    assert "T = 8, forward + backward" in out and "jax.nn" in out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["atention"], "'atention' is no race (did you mean attention?): use one of attention"),
        (["attention", "--lengths=a"], "--lengths=a: expected whole numbers"),
        (["attention", "--lengths=0"], "--lengths=0: expected lengths of 1 or more"),
        (["attention", "--rounds=0"], "--rounds=0: expected 1 or more"),
        (["attention", "--round=3"], "--round is no flag (did you mean rounds?)"),
    ],
)
def test_a_mistake_is_one_line(capsys, arguments, message):
    assert main(["bench", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_help_lists_the_races(capsys):
    assert main(["bench"]) == 0 and "Races: attention" in capsys.readouterr().out
