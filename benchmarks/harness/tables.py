"""Tables of benchmarks, on a terminal and in logs."""

import statistics

from rich.console import Console
from rich.table import Table

from attnlab.support.timing import ratio


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
