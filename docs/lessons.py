"""Notebooks as pages: executes a lesson, and writes its cells, outputs and figures as Markdown and PNG."""

import base64
import hashlib
import os
from pathlib import Path

import jupytext
import nbclient
import nbformat

ROOT = Path(__file__).parents[1]
SECONDS_A_CELL = 900
# Else Jupyter crops figures, and the layout that keeps titles apart is lost.
UNCROPPED = "%config InlineBackend.print_figure_kwargs = {'bbox_inches': None}"


def render(source: Path, cache: Path) -> tuple[str, dict[str, bytes]]:
    """The page of a lesson, and its figures by file name.

    Args:
      source: the lesson's script, `notebooks/NAME.py`.
      cache: where executed notebooks are kept, by the hash of the lesson and of attnlab's source.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell failed.
    """
    notebook, pieces, figures = executed(source, cache), [], {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            pieces.append(cell.source)
            continue
        pieces.append(f"```python\n{cell.source}\n```")
        for kind, content in outputs(cell):
            if kind == "figure":
                name = f"{source.stem}_{len(figures) + 1}.png"
                figures[name] = content
                pieces.append(f"![Figure {len(figures)} of this lesson]({name}){{ loading=lazy }}")
            else:
                pieces.append(f'```{{ .text .output title="Output" }}\n{content.rstrip()}\n```')
    download = f"Source: `notebooks/{source.name}`. The outputs below are of the run that built this page."
    title, rest = "\n\n".join(pieces).split("\n", 1)
    return f"{title}\n\n{download}\n{rest}\n", figures


def outputs(cell) -> list[tuple[str, str | bytes]]:
    """The outputs of a cell: ("figure", PNG) and ("text", text), consecutive texts joined."""
    shown = []
    for output in cell.outputs:
        data = output.get("data", {})
        if "image/png" in data:
            shown.append(("figure", base64.b64decode(data["image/png"])))
        elif text := output.get("text") or data.get("text/plain"):
            if shown and shown[-1][0] == "text":
                before = shown.pop()[1]
                text = before + ("" if before.endswith("\n") or "text" in output else "\n") + text
            shown.append(("text", text))
    return shown


def executed(source: Path, cache: Path):
    """The lesson's notebook with its outputs, from the cache or run now."""
    digest = hashlib.sha256()
    for path in [source, *sorted((ROOT / "attnlab").rglob("*.py"))]:
        digest.update(path.read_bytes())
    kept = cache / f"{source.stem}-{digest.hexdigest()[:16]}.ipynb"
    if kept.exists():
        return nbformat.read(kept, as_version=4)
    notebook = jupytext.read(source)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(UNCROPPED))
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
    nbclient.NotebookClient(notebook, timeout=SECONDS_A_CELL, kernel_name="python3").execute()
    del notebook.cells[0]
    cache.mkdir(parents=True, exist_ok=True)
    for old in cache.glob(f"{source.stem}-*.ipynb"):
        old.unlink()
    nbformat.write(notebook, kept)
    return notebook
