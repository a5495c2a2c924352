"""Timing on a noisy machine: contenders alternate, and are compared by ratios within a round."""

import statistics
import time
from collections.abc import Callable

import jax


def alternate(contenders: dict[str, Callable], rounds: int) -> dict[str, list[float]]:
    """Time contenders in alternation: A B C A B C …

    Args:
      contenders: functions without arguments that return JAX arrays; each is called once untimed, to compile.
      rounds: timed calls of each.

    Returns:
      Seconds of each call, by contender.

    >>> {name: len(seconds) for name, seconds in alternate({"a": lambda: 1, "b": lambda: 2}, rounds=3).items()}
    {'a': 3, 'b': 3}
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


def ratio(seconds: dict[str, list[float]], name: str, reference: str) -> float:
    """Time of `name` over the time of `reference`: the median over rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[reference]))


def line(label: str, seconds: dict[str, list[float]]) -> str:
    """One line with the median milliseconds of each contender.

    >>> line("T = 8", {"a": [0.001, 0.003, 0.002]})
    'T = 8: a 2.00 ms'
    """
    return f"{label}: " + ", ".join(f"{name} {1e3 * statistics.median(s):.2f} ms" for name, s in seconds.items())
