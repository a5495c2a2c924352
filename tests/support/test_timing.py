"""Timing in alternation, and ratios."""

import jax.numpy as jnp

from attnlab.support import timing


def test_alternate_calls_contenders_in_turn():
    calls = []
    contenders = {name: lambda name=name: calls.append(name) or jnp.ones(()) for name in "abc"}
    seconds = timing.alternate(contenders, rounds=2)
    assert "".join(calls) == "abc" * 3  # once more each, to compile
    assert {name: len(times) for name, times in seconds.items()} == dict.fromkeys("abc", 2)


def test_ratio_is_the_median_of_ratios_within_rounds():
    assert timing.ratio({"a": [2.0, 30.0, 8.0], "b": [1.0, 10.0, 4.0]}, "a", "b") == 2
