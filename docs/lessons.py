"""Notebooks: `python docs/lessons.py [NAME …]` executes lessons and stores their outputs; `render` makes site pages."""

import base64
import html
import io
import os
import sys
import time
from pathlib import Path

import nbclient
import nbformat
from PIL import Image
from traitlets.config import Config

from attnlab import compilation

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
CACHE = NOTEBOOKS.parent / ".cache" / "lessons"
SECONDS_A_CELL = 900
LOCAL = Config({"KernelManager": {"transport": "ipc"}})  # the kernel warns of TCP, which others can read
# Jupyter would crop figures, and the layout that separates titles would be lost. A figure's text is its title, because
# `render` shows that to readers who cannot see the figure.
SETUP = """
%config InlineBackend.print_figure_kwargs = {'bbox_inches': None}
import matplotlib.figure
matplotlib.figure.Figure.__repr__ = lambda figure: " ".join(figure.get_suptitle().split())
del matplotlib
"""
# The cell after the title, not shown on pages.
INSTALL = """
import importlib.util

if importlib.util.find_spec("attnlab") is None:  # in Colab, for example
    raise ModuleNotFoundError(
        "attnlab is not on PyPI yet: make a wheel (`pip wheel --no-deps .` in a clone), upload it here, "
        "and run `%pip install 'NAME_OF_THE_WHEEL.whl[plots]'`"
    )
"""
HIDDEN = "remove-cell"  # Jupyter Book's tag


def render(source: Path) -> tuple[str, dict[str, bytes]]:
    """The page of a lesson with its stored outputs, and its figures by file name.

    Args:
      source: `notebooks/NAME.ipynb`.

    Raises:
      ValueError: the notebook has no outputs.
    """
    notebook, pieces, figures = nbformat.read(source, as_version=4), [], {}
    if not any(cell.get("outputs") for cell in notebook.cells):
        raise ValueError(f"notebooks/{source.name} has no outputs: run `make lessons`")
    for cell in notebook.cells:
        if HIDDEN in cell.metadata.get("tags", ()):
            continue
        if cell.cell_type == "markdown":
            pieces.append(cell.source)
            continue
        pieces.append(f"```python\n{cell.source}\n```")
        for text, figure in outputs(cell):
            if figure:
                name = f"{source.stem}_{len(figures) + 1}.png"
                figures[name] = figure
                pieces.append(f'<img alt="{html.escape(text)}" src="{name}" loading="lazy">')
            else:
                pieces.append(f'```{{ .text .output title="Output" }}\n{text.rstrip()}\n```')
    download = f"Source: `notebooks/{source.name}`."
    title, rest = "\n\n".join(pieces).split("\n", 1)
    return f"{title}\n\n{download}\n{rest}\n", figures


def outputs(cell) -> list[tuple[str, bytes]]:
    """The outputs of a cell: (text, no bytes), consecutive texts joined, and (alternative text, PNG)."""
    shown = []
    for output in cell.outputs:
        data = output.get("data", {})
        text = output.get("text") or data.get("text/plain", "")
        if "image/png" in data:
            alt = "A picture of the page that this cell makes" if "text/html" in data else text
            shown.append((alt, base64.b64decode(data["image/png"])))
        elif text:
            if shown and not shown[-1][1]:
                before = shown.pop()[0]
                text = before + ("" if before.endswith("\n") or "text" in output else "\n") + text
            shown.append((text, b""))
    return shown


def execute(source: Path) -> None:
    """Executes a lesson and stores its notebook with the outputs.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell failed.
    """
    notebook = nbformat.read(source, as_version=4)
    metadata = notebook.metadata.copy()
    notebook.cells = [cell for cell in notebook.cells if HIDDEN not in cell.metadata.get("tags", ())]
    notebook.cells.insert(1, nbformat.v4.new_code_cell(INSTALL.strip(), metadata={"tags": [HIDDEN]}))
    notebook.cells.insert(0, nbformat.v4.new_code_cell(SETUP))
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
    nbclient.NotebookClient(notebook, timeout=SECONDS_A_CELL, kernel_name="python3", config=LOCAL).execute()
    del notebook.cells[0]
    for number, cell in enumerate(notebook.cells):  # the same ids in each run
        cell["id"] = str(number)
        cell["metadata"].pop("execution", None)
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                data["image/png"] = base64.b64encode(with_palette(base64.b64decode(data["image/png"]))).decode()
    notebook.metadata = metadata
    nbformat.write(notebook, source)


def with_palette(png: bytes) -> bytes:
    """A figure in 128 colours: a third of the size, because the repository stores it."""
    smaller = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(128).save(smaller, "PNG", optimize=True)
    return smaller.getvalue()


def main(names: list[str]) -> None:
    sources = {source.stem: source for source in sorted(NOTEBOOKS.glob("*.ipynb"))}
    if unknown := sorted(set(names) - set(sources)):
        sys.exit(f"error: no lesson {unknown[0]!r}: expected one of {', '.join(sources)}")
    compilation.fuse_no_sums()
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE)  # lessons compile the same models, and each more than once
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
    for name in names or sources:
        start = time.monotonic()
        execute(sources[name])
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
