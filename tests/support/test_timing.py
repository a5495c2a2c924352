"""Timing in alternation."""

import jax.numpy as jnp

from attnlab.support import timing


def test_alternate_calls_contenders_in_turn():
    calls = []
    contenders = {name: lambda name=name: calls.append(name) or jnp.ones(()) for name in "abc"}
    seconds = timing.alternate(contenders, rounds=2)
    assert "".join(calls) == "abc" * 3  # once more each, to compile
    assert {name: len(times) for name, times in seconds.items()} == dict.fromkeys("abc", 2)
