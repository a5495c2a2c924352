"""The records of runs as columns, as CSV and as a figure."""

import csv
import json

import numpy as np
import pytest

import attnlab
from attnlab import plots, records
from attnlab.support.errors import UserError


def write(folder, *records):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.fixture
def two(tmp_path):
    first = {"step": 1, "split": "train", "loss": 3.0, "grad_norm": None}
    last = {"step": 2, "split": "final", "loss": 2.0, "params_sha256": "ab"}
    write(tmp_path / "a", first, {"step": 2, "split": "val", "loss": 2.0}, last)
    write(tmp_path / "b", {"step": 2, "split": "val", "loss": 1.5, "tokens": 64})
    return tmp_path


def test_metrics_columns_have_gaps_where_a_record_lacks_the_field(two):
    columns = attnlab.metrics(two / "*")
    assert columns["run"].tolist() == ["a", "a", "a", "b"] and columns["step"].tolist() == [1, 2, 2, 2]
    assert columns["split"].tolist() == ["train", "val", "final", "val"] and columns["step"].dtype == np.int64
    np.testing.assert_array_equal(columns["loss"], [3.0, 2.0, 2.0, 1.5])
    np.testing.assert_array_equal(columns["tokens"], [np.nan, np.nan, np.nan, 64])
    assert np.isnan(columns["grad_norm"]).all() and columns["params_sha256"].tolist() == ["", "", "ab", ""]


def test_metrics_take_a_folder_a_list_or_a_glob_and_one_split(two):
    assert attnlab.metrics(str(two / "b"))["loss"].tolist() == [1.5]
    assert attnlab.metrics([two / "b", two / "a", two / "*"], split="val")["loss"].tolist() == [1.5, 2.0]
    (two / "runs.csv").touch()
    (two / "logs").mkdir()
    assert set(attnlab.metrics(two / "*")["run"]) == {"a", "b"}


def test_metrics_distinguish_runs_with_the_same_name(two):
    again = write(two / "later" / "a", {"step": 5, "split": "val", "loss": 1.0})
    assert set(attnlab.metrics([two / "a", again])["run"]) == {str(two / "a"), str(again)}


@pytest.mark.parametrize(("name", "message"), [("none", "none .*metrics.jsonl"), ("x*", "matches no folder with a")])
def test_metrics_without_a_run_raise_one_line(tmp_path, name, message):
    with pytest.raises(UserError, match=message):
        attnlab.metrics(tmp_path / name)


def test_csv_has_a_line_for_each_record_and_empty_cells_for_gaps(two):
    path = records.write_csv(two / "all.csv", attnlab.metrics(two / "*"))
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["loss"] for row in rows] == ["3.0", "2.0", "2.0", "1.5"]
    assert [row["tokens"] for row in rows] == ["", "", "", "64.0"]


def test_plot_of_runs_has_one_label_for_each_run(two):
    axes = plots.runs(two / "*").axes[0]
    assert {text.get_text() for text in axes.texts} == {"a", "b"}
    train, a, b = axes.lines
    assert train.get_color() == a.get_color() != b.get_color()


def test_plot_of_groups_has_a_colour_and_a_mean_for_each(tmp_path):
    for name, losses in {"a0": [3.0, 2.0], "a1": [5.0, 4.0, 1.0], "b0": [1.0]}.items():
        records = [{"step": step, "split": "val", "loss": loss} for step, loss in enumerate(losses)]
        write(tmp_path / name, *records, {"step": 0, "split": "train", "loss": 9.0})
    axes = plots.runs(tmp_path / "*", groups={"a0": "a", "a1": "a"}).axes[0]
    assert {text.get_text(): text.get_color() for text in axes.texts} == {
        "a": axes.lines[0].get_color(), "b0": axes.lines[3].get_color()
    }  # fmt: skip
    first, second, mean, alone = axes.lines
    assert mean.get_xydata().tolist() == [[0, 4], [1, 3]] and alone.get_xydata().tolist() == [[0, 1]]
    assert second.get_ydata().tolist() == [5, 4, 1]
    assert first.get_color() == second.get_color() == mean.get_color() != alone.get_color()
