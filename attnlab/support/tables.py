"""Tables of texts for a terminal."""

import io
import shutil
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

UNBOUND = 10_000  # characters of a line of a file


def as_text(cells: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Columns, their names first, aligned, and folded to fit a width: the terminal's where there is one."""
    if width is None:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else UNBOUND
    heads, *rows = cells
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="", show_edge=False)
    for at, head in enumerate(heads):
        is_number = any("±" in row[at] for row in rows)
        least = None if width == UNBOUND else 6 if at else 12
        is_name = at == 0 and not all(row[0][:1].isdigit() for row in rows)
        look = {"justify": "left" if is_name else "right", "overflow": "fold", "min_width": least}
        table.add_column(Text(head), no_wrap=is_number, **look)
    for row in rows:
        table.add_row(*map(Text, row))
    drawn = io.StringIO()
    Console(file=drawn, width=width, color_system=None, force_jupyter=False).print(table)
    return "\n".join(line.rstrip() for line in drawn.getvalue().splitlines())
