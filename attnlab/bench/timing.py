"""Timing that a noisy machine cannot spoil: contenders take turns, and the ratios are what counts."""

import statistics
import time
from collections.abc import Callable

import jax
from rich.console import Console
from rich.table import Table


def alternate(contenders: dict[str, Callable], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call, `rounds` for each contender, one after another in turn: A B C A B C …

    Args:
      contenders: functions without arguments that return JAX arrays; each is called once before, to compile.
      rounds: counted calls of each.

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
            # What a call frees after it has returned, gigabytes perhaps, is not to be charged to the next.
            time.sleep(min(seconds[name][-1] / 2, 0.5))
    return seconds


def ratio(seconds: dict[str, list[float]], name: str, reference: str) -> float:
    """How many times as long `name` takes as `reference`: the median over rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[reference]))


def line(label: str, seconds: dict[str, list[float]]) -> str:
    """What to print when a race is over and others are to come.

    >>> line("T = 8", {"a": [0.001, 0.003, 0.002]})
    'T = 8: a 2.00 ms'
    """
    return f"{label}: " + ", ".join(f"{name} {1e3 * statistics.median(s):.2f} ms" for name, s in seconds.items())


def report(title: str, rows: dict[str, dict[str, list[float]]], reference: str) -> None:
    """Prints a row for each race and a column for each contender: median milliseconds, and × the reference."""

    def cell(seconds, name):
        times = f" ({ratio(seconds, name, reference):.2f})" if reference in seconds else ""
        return f"{1e3 * statistics.median(seconds[name]):.2f}{times}"

    cells = {label: {name: cell(seconds, name) for name in seconds} for label, seconds in rows.items()}
    table(title, cells, caption=f"median milliseconds (× {reference}, round by round)")


def table(title: str, rows: dict[str, dict[str, str]], caption: str | None = None) -> None:
    """Prints a table of cells by row and column."""
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    printed = Table(title=title, caption=caption)
    printed.add_column("", no_wrap=True)
    for name in names:
        printed.add_column(name, justify="right")
    for label, row in rows.items():
        printed.add_row(label, *(row.get(name, "") for name in names))
    console = Console()
    (console if console.is_terminal else Console(width=1000)).print(printed)  # in a log nothing need wrap
