"""Tables of results: each column is declared once, for the terminal, Markdown, CSV and a page."""

import io
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import rich.table
from rich.console import Console
from rich.text import Text

UNBOUND = 10_000  # characters per line when the output is a file


class Column(NamedTuple):
    """A column of a table.

    Attributes:
      key: the key of its values in the rows, and its name in the CSV file.
      title: its name for readers; "" for a column that only the CSV file has.
      read: computes the value from the subject of a row, or returns None; None for a table whose rows already exist.
      unit: unit of the value, and of its interval.
      format: format of the value, such as ".4f"; or a function from a row to the text of its cell.
      help: a sentence that explains the column.
      usual: an uninformative value; a column that holds nothing else is hidden.
      empty: the text of a cell without a value.
    """

    key: str
    title: str
    read: Callable[[Any], Any] | None = None
    unit: str = ""
    format: str | Callable[[Mapping[str, Any]], str] = ""
    help: str = ""
    usual: Any = None
    empty: str = ""

    def cell(self, row: Mapping[str, Any]) -> str:
        """Return the text of a row's cell."""
        value = row[self.key]
        if is_missing(value):
            return self.empty
        if callable(self.format):
            return self.format(row)
        if isinstance(value, bool):
            return "yes" if value else "no"
        return value if isinstance(value, str) else minus(format(value, self.format) if self.format else number(value))


class Table(NamedTuple):
    """Rows, and the columns declared for them.

    >>> columns = [Column("name", "variant", lambda of: of[0]), Column("loss", "loss", lambda of: of[1], "nats", ".2f")]
    >>> print(Table.of(columns, [("rotary", 1.5), ("none", -0.25)]))
    variant  loss (nats)
    rotary          1.50
    none           −0.25
    """

    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, columns: Sequence[Column], subjects: Iterable) -> "Table":
        """Build a table with a row for each subject."""
        return cls(columns, [{column.key: column.read(subject) for column in columns} for subject in subjects])

    def only(self, *keys: str) -> "Table":
        """Select columns, in the order of `keys`."""
        by_key = {column.key: column for column in self.columns}
        return self._replace(columns=[by_key[key] for key in keys])

    def shown(self) -> "Table":
        """Select the titled columns that hold an informative value."""
        return self._replace(
            columns=[
                column
                for column in self.columns
                if column.title
                and any(not is_missing(row[column.key]) and row[column.key] != column.usual for row in self.rows)
            ]
        )

    @property
    def heads(self) -> list[str]:
        """The names of the columns, with their units."""
        return [f"{column.title} ({column.unit})" if column.unit else column.title for column in self.columns]

    def cells(self) -> list[list[str]]:
        """Return the texts of all cells, by row."""
        return [[column.cell(row) for column in self.columns] for row in self.rows]

    def text(self, width: int | None = None) -> str:
        """Format aligned columns, wrapped to fit a width, by default the terminal's if there is one."""
        if width is None:
            width = shutil.get_terminal_size().columns if sys.stdout.isatty() else UNBOUND
        drawn = rich.table.Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="", show_edge=False)
        cells = self.cells()
        for at, head in enumerate(self.heads):
            # Words wrap, but intervals do not.
            least = max([6 if at else 12, *(len(line[at]) for line in cells if "±" in line[at])])
            is_name = at == 0 and any(isinstance(row[self.columns[0].key], str) for row in self.rows)
            look = {"justify": "left" if is_name else "right", "overflow": "fold"}
            drawn.add_column(Text(head), min_width=None if width == UNBOUND else least, **look)
        for line in cells:
            drawn.add_row(*map(Text, line))
        out = io.StringIO()
        Console(file=out, width=width, color_system=None, force_jupyter=False).print(drawn)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    __str__ = text

    def markdown(self, before: Sequence[str] = (), after: Sequence[str] = ()) -> str:
        """Format the table in Markdown, between paragraphs."""
        heads, *lines = [[_plain(cell) for cell in line] for line in [self.heads, *self.cells()]]
        table = "\n".join("| " + " | ".join(line) + " |" for line in [heads, ["---"] * len(heads), *lines])
        return "\n\n".join([*map(_plain, before), table, *map(_plain, after)]) + "\n"


def with_interval(
    key: str, title: str, read: Callable[[Any], tuple[float, float] | None], unit: str, sign: str = "", help: str = ""
) -> list[Column]:
    """Return two columns: a mean, shown with ± half its interval's width, and that half width, only in the CSV file.

    `read` returns both values, or None; `sign` "+" shows the sign of positive means.
    """

    def part(at: int) -> Callable[[Any], float | None]:
        def read_part(subject):
            pair = read(subject)
            return None if pair is None or math.isnan(pair[at]) else float(pair[at])

        return read_part

    def text(row: Mapping[str, Any]) -> str:
        value, half = row[key], row[f"{key}_interval"]
        digits = decimals(half, 4)
        return minus(f"{value:{sign}.{digits}f}") + ("" if half is None else f" ± {half:.{digits}f}")

    return [
        Column(key, title, part(0), unit, text, help),
        Column(f"{key}_interval", "", part(1), unit, help=f"Half the width of the interval of `{key}`."),
    ]


def decimals(size: float | None, least: int) -> int:
    """Number of decimals that shows the first nonzero digit of a size, from `least` to 9."""
    return least if not size else min(9, max(least, -math.floor(math.log10(abs(size)))))


def number(value: int | float) -> str:
    """Format a number without decimals, or from a million on with three digits."""
    return f"{value:,.0f}" if abs(value) < 1e6 else f"{value:.3g}"


def minus(text: str) -> str:
    """Replace hyphens by true minus signs, except in exponents, so that a learning rate can be pasted into a flag."""
    return re.sub(r"(?<!e)-", "−", text)


def is_missing(value) -> bool:
    """Whether a cell has no value: None or NaN."""
    return value is None or value != value


def _plain(text: str) -> str:
    """Escape a text as one line of Markdown that shows it unchanged."""
    return re.sub(r"[\\|`*<\[$~&]|(?<!\w)_|_(?!\w)", r"\\\g<0>", " ".join(text.split()))
