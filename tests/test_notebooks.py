"""Every lesson runs from top to bottom, and its notebook is the one that its source makes."""

from pathlib import Path

import jupytext
import nbclient
import nbformat
import pytest

LESSONS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.py"))


def cells(notebook):
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.stem)
def test_the_notebook_is_made_of_its_source_and_holds_no_output(lesson):
    notebook = nbformat.read(lesson.with_suffix(".ipynb"), as_version=4)
    assert cells(notebook) == cells(jupytext.read(lesson)), f"run: jupytext --to ipynb {lesson.name}"
    assert all(cell.get("outputs", []) == [] for cell in notebook.cells)


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.stem)
def test_the_lesson_draws_with_the_shared_plots_alone(lesson):
    """Which give every figure a title and every axis a name."""
    assert "matplotlib" not in lesson.read_text() and "plots." in lesson.read_text()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Jupyter's own libraries
@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.stem)
def test_the_lesson_runs(lesson, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = jupytext.read(lesson)
    nbclient.NotebookClient(notebook, timeout=90, kernel_name="python3").execute()
