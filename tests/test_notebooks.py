"""Every notebook has the outputs of its last run; `make lessons` executes all of them, and fails if a cell does."""

import ast
import importlib.util
from pathlib import Path

import nbformat
import pytest

REPOSITORY = Path(__file__).parents[1]
LESSONS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))


def code(lesson):
    """The code cells of a notebook, as one program."""
    cells = nbformat.read(lesson, as_version=4).cells
    return "\n".join(cell.source for cell in cells if cell.cell_type == "code")


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.stem)
def test_lesson_says_how_to_install_has_outputs_and_draws_only_with_shared_plots(lesson, monkeypatch):
    """The shared plots require a title and axis labels."""
    notebook = nbformat.read(lesson, as_version=4)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="attnlab .* run `%pip install"):
        exec(notebook.cells[1].source)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    figures = [output["data"] for output in outputs if "image/png" in output.get("data", {})]
    assert figures and not any(figure["text/plain"].startswith("<Figure") for figure in figures)  # but its title
    assert all(output["output_type"] != "error" for output in outputs)
    assert "matplotlib" not in code(lesson) and "plots." in code(lesson)


def test_lesson_6_names_the_axes_of_its_table_of_heads():
    """The table's rows are heads and its columns are positions; they are not queries and keys."""
    (lesson,) = (path for path in LESSONS if path.stem.startswith("6_"))
    calls = [node for node in ast.walk(ast.parse(code(lesson))) if isinstance(node, ast.Call)]
    calls = [call for call in calls if "plots.weights" in ast.unparse(call.func)]
    drawn = [{keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords} for call in calls]
    (table,) = (arguments for arguments in drawn if "names" in arguments["queries"])
    assert (table["x"], table["y"]) == ("'position attended to'", "'head'")


@pytest.mark.slow
def test_lesson_runs_without_kernel_warnings(tmp_path, monkeypatch, capfd):
    monkeypatch.syspath_prepend(REPOSITORY / "docs")
    lessons = pytest.importorskip("lessons", reason="the packages of [docs] are not installed", exc_type=ImportError)
    monkeypatch.setenv("MPLBACKEND", "agg")  # `execute` changes it; restored afterwards
    lesson = tmp_path / "lesson.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 + 1")]), lesson)
    lessons.execute(lesson)
    assert nbformat.read(lesson, as_version=4).cells[0].outputs[0]["data"]["text/plain"] == "2"
    assert capfd.readouterr().err == ""
