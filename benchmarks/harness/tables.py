"""Measured seconds as lines and tables; contenders are compared by ratios within a round."""

import statistics
import time
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table


def rounds(label: str, count: int) -> Iterator[int]:
    """Count from 0 to `count` − 1; prints after each round how many are done and about how long the others take."""
    start = time.perf_counter()
    for done in range(1, count + 1):
        yield done - 1
        left = (time.perf_counter() - start) / done * (count - done)
        print(f"{label}: round {done} of {count}" + (f", about {left:.0f} s left" if done < count else ""), flush=True)


def ratio(seconds: dict[str, list[float]], name: str, reference: str) -> float:
    """Time of `name` divided by the time of `reference` in the same round; the median of all rounds."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[reference]))


def line(label: str, seconds: dict[str, list[float]]) -> str:
    """One line with the median milliseconds of each contender."""
    return f"{label}: " + ", ".join(f"{name} {1e3 * statistics.median(s):.2f} ms" for name, s in seconds.items())


def report(title: str, rows: dict[str, dict[str, list[float]]], reference: str) -> None:
    """Print a row for each benchmark and a column for each contender: median milliseconds, and × the reference."""

    def cell(seconds, name):
        times = f" ({ratio(seconds, name, reference):.2f})" if reference in seconds else ""
        return f"{1e3 * statistics.median(seconds[name]):.2f}{times}"

    cells = {label: {name: cell(seconds, name) for name in seconds} for label, seconds in rows.items()}
    table(title, cells, caption=f"median milliseconds (× the time of {reference}, median over rounds)")


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
