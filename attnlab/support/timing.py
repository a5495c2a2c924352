"""Timing on a noisy machine: contenders alternate."""

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import jax

Name = TypeVar("Name")


def alternate(contenders: Mapping[Name, Callable], rounds: int) -> dict[Name, list[float]]:
    """Time contenders in alternation: A B C A B C …

    Args:
      contenders: functions without arguments that return JAX arrays; each is called once untimed, to compile.
      rounds: timed calls per contender.

    Returns:
      Seconds of each call, by contender.
    """
    for contender in contenders.values():
        jax.block_until_ready(contender())
    seconds = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            start = time.perf_counter()
            jax.block_until_ready(contender())
            seconds[name].append(time.perf_counter() - start)
            # A call may free gigabytes after it has returned: that must not count against the next contender.
            time.sleep(min(seconds[name][-1] / 2, 0.5))
    return seconds
