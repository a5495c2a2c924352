"""Every notebook is its source with outputs; `make lessons` executes all of them, and fails where a cell does."""

import ast
from pathlib import Path

import jupytext
import nbformat
import pytest

LESSONS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.py"))


def cells(notebook):
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.stem)
def test_notebook_equals_its_source_and_has_outputs(lesson):
    notebook = nbformat.read(lesson.with_suffix(".ipynb"), as_version=4)
    assert cells(notebook) == cells(jupytext.read(lesson)), f"run: python docs/lessons.py {lesson.stem}"
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert all(output["output_type"] != "error" for output in outputs)


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.stem)
def test_lesson_draws_only_with_shared_plots(lesson):
    """The shared plots require a title and axis labels."""
    assert "matplotlib" not in lesson.read_text() and "plots." in lesson.read_text()


def test_lesson_5_names_the_axes_of_its_table_of_heads():
    """Its rows are heads and its columns positions, not queries and keys."""
    (lesson,) = (path for path in LESSONS if path.stem.startswith("5_"))
    calls = [node for node in ast.walk(ast.parse(lesson.read_text())) if isinstance(node, ast.Call)]
    drawn = [
        {k.arg: ast.unparse(k.value) for k in call.keywords}
        for call in calls
        if "plots.weights" in ast.unparse(call.func)
    ]
    (table,) = (arguments for arguments in drawn if "names" in arguments["queries"])
    assert (table["x"], table["y"]) == ("'position attended to'", "'head'")
