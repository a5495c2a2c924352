"""Timing on a noisy machine: contenders alternate, and are compared by ratios within a round."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator

import jax
from rich.console import Console
from rich.table import Table


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


def rounds(label: str, count: int) -> Iterator[int]:
    """Count from 0 to `count` − 1; prints after each round how many are done and about how long the others take."""
    start = time.perf_counter()
    for done in range(1, count + 1):
        yield done - 1
        left = (time.perf_counter() - start) / done * (count - done)
        print(f"{label}: round {done} of {count}" + (f", about {left:.0f} s left" if done < count else ""), flush=True)


def ratio(seconds: dict[str, list[float]], name: str, reference: str) -> float:
    """Time of `name` over the time of `reference`: the median over rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[reference]))


def fastest(seconds: dict[str, list[float]], names: Iterable[str]) -> str:
    """The one of `names` with the smallest median.

    >>> fastest({"a": [1.0, 9.0, 3.0], "b": [2.0, 2.0, 2.0], "c": [1.0]}, ["a", "b"])
    'b'
    """
    return min(names, key=lambda name: statistics.median(seconds[name]))


def line(label: str, seconds: dict[str, list[float]]) -> str:
    """One line with the median milliseconds of each contender.

    >>> line("T = 8", {"a": [0.001, 0.003, 0.002]})
    'T = 8: a 2.00 ms'
    """
    return f"{label}: " + ", ".join(f"{name} {1e3 * statistics.median(s):.2f} ms" for name, s in seconds.items())


def report(title: str, rows: dict[str, dict[str, list[float]]], reference: str) -> None:
    """Print a row for each benchmark and a column for each contender: median milliseconds, and × the reference."""

    def cell(seconds, name):
        times = f" ({ratio(seconds, name, reference):.2f})" if reference in seconds else ""
        return f"{1e3 * statistics.median(seconds[name]):.2f}{times}"

    cells = {label: {name: cell(seconds, name) for name in seconds} for label, seconds in rows.items()}
    table(title, cells, caption=f"median milliseconds (× the time of {reference}, median over rounds)")


def mib(peak: float | None) -> str:
    """A table cell for memory; "?" where the system does not report it."""
    return "?" if peak is None else f"{peak:,.0f}"


def table(title: str, rows: dict[str, dict[str, str]], caption: str | None = None) -> None:
    """Print a table of cells, {row: {column: cell}}."""
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    printed = Table(title=title, caption=caption)
    printed.add_column("", no_wrap=True)
    for name in names:
        printed.add_column(name, justify="right")
    for label, row in rows.items():
        printed.add_row(label, *(row.get(name, "") for name in names))
    console = Console()
    if not console.is_terminal:
        console.width = 200  # a log file need not wrap lines
    console.print(printed)
