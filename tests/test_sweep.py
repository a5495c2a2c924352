"""Sweeps: grids, runs in processes that are stopped, killed and resumed, and their table, plot and CSV."""

import contextlib
import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import attnlab
from attnlab import sweep, train
from attnlab.config import RunConfig
from attnlab.support.errors import UserError
from attnlab.sweeping import grid, results, training_runs
from tests.runs import CONFIG, REPOSITORY, WITHOUT_DROPOUT, contents, records, workers_here

pytestmark = pytest.mark.usefixtures("shared_programs")

LONG = ["--config.steps=3000", "--config.eval.every=1000", "--config.checkpoint.every=1000", "--config.log.every=100"]


def swept(folder, *options):
    return sweep.main(["sweep", *WITHOUT_DROPOUT, f"--workdir={folder}", *options])


def started(folder, *options):
    command = [sys.executable, "-m", "attnlab.sweep", *WITHOUT_DROPOUT, *LONG, f"--workdir={folder}", *options]
    environment = os.environ | {"XLA_FLAGS": "", "PYTHONUNBUFFERED": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=REPOSITORY, env=environment, **pipes)


def wait_until(condition, within=120):
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def log(folder, name):
    path = folder / "logs" / f"{name}.txt"
    return path.read_text() if path.exists() else ""


# --- grids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--grid is missing: .*--grid config.seed=0,1"),
        (["--grid=config.optimizer.learning_rte=1"], "config.optimizer.learning_rte .*did you mean optimizer.learning"),
        (["--grid=config.seed=0,0"], "--grid names seed=0 twice"),
        (["--grid=config.seed=0", "--grid=config.seed=1"], "--grid names config.seed twice"),
        (["--grid=config.seed=0,1,2 config.steps=5,6"], "3 values of config.seed, but 2 of config.steps"),
        (["--grid=config.seed=0,1", "--config.checkpoint.dir=/kept"], "/kept: "),
        (["--grid=config.seed=0,1", "--jobs=-1"], "jobs"),
        (["--grid=config.seed=0,1", "--together=0"], "--together=0: expected auto, or the number of runs, 1 or more"),
    ],
)
def test_mistake_prints_one_line_before_anything_starts(tmp_path, capsys, options, message):
    assert swept(tmp_path / "sweep", *options) == 2
    out, err = capsys.readouterr()
    assert re.search(message, err) and err.startswith("error: ") and err.count("\n") == 1 and not out, err
    assert not (tmp_path / "sweep").exists()


def test_folder_with_other_files_is_left_alone(tmp_path, mistake):
    (tmp_path / "runs.csv").write_text("mine")
    line = mistake(sweep.main, *WITHOUT_DROPOUT, f"--workdir={tmp_path}", "--grid=config.seed=0")
    assert "holds other files and no sweep" in line
    assert [path.name for path in tmp_path.iterdir()] == ["runs.csv"]


def test_dry_run_lists_the_commands_and_writes_nothing(tmp_path, capsys):
    options = ["--grid", "config.optimizer.learning_rate=1e-3,3e-3", "--grid=config.data.name=quijote,python_docs"]
    assert swept(tmp_path / "sweep", *options, "--dry_run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and all(line.startswith(f"attnlab train {CONFIG} --config.steps=12") for line in lines)
    assert "--config.optimizer.learning_rate=0.001 " in lines[0] and "--config.data.name=quijote" in lines[0]
    assert lines[1].endswith(f"--workdir={tmp_path}/sweep/learning_rate=0.001,name=python_docs")
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    ("given", "values"),
    [
        (["config.steps=5, 6 config.seed=0, 1"], [(5, 0), (6, 1)]),
        (["config.steps=5,6 config.seed=0,1", "config.batch_size=3,4"], [(5, 0, 3), (5, 0, 4), (6, 1, 3), (6, 1, 4)]),
        (['config.data.mixture="quijote=3, notes=1"'], [("quijote=3, notes=1",)]),
        (['config.data.mixture="a=3 config.seed=2",b=1 seed=1,2'], [("a=3 config.seed=2", 1), ("b=1", 2)]),
        (
            ["config.model.scan=None,True", "config.model.attention.soft_cap=20,None"],
            [(None, 20), (None, None), (1, 20), (1, None)],
        ),
    ],
)
def test_grid_has_the_values_of_its_axes(given, values):
    assert [tuple(point.values.values()) for point in grid.points(given, RunConfig())] == values


# --- groups


def grouped(*given):
    """The group table of a grid: the loss is the seed, and runs with weight_decay=9 fail except for seed 1."""
    points = grid.points(given, RunConfig())
    rows = []
    for point in points:
        failed = point.config.optimizer.weight_decay == 9 and point.config.seed != 1
        rows.append({"run": point.name, "loss": None if failed else float(point.config.seed)})
    groups = results.group_table(results.group_of(points), points, rows)
    return groups and groups.rows


def test_groups_have_the_mean_over_seeds_and_its_interval():
    window = "config.model.attention.window=None"
    first, second, last = grouped("config.optimizer.weight_decay=0.1,9,0.2", "config.seed=1,2,3", window)
    assert list(first.values())[:-2] == ["weight_decay=9.0,window=None", 9.0, None, 1, 2, 1.0]
    assert list(first)[:3] == ["group", "optimizer.weight_decay", "model.attention.window"]
    assert [second["group"], last["group"]] == ["weight_decay=0.1,window=None", "weight_decay=0.2,window=None"]
    assert (last["seeds"], last["failed"], last["mean_loss"]) == (3, 0, 2.0)
    half = 4.302652729911275 / 3**0.5  # Student's t for two degrees of freedom; the deviation of 1, 2, 3 is 1
    assert last["low"] == pytest.approx(2 - half, abs=1e-9) and last["high"] == pytest.approx(2 + half, abs=1e-9)
    unfinished = grouped("config.optimizer.weight_decay=9,0.1", "config.seed=2,3")[-1]
    assert [unfinished["seeds"], unfinished["failed"]] == [0, 2] and np.isnan([first["low"], unfinished["low"]]).all()


def test_no_groups_if_none_or_all_runs_differ_only_in_seed():
    for given in (["config.seed=0,1"], ["config.steps=5,6", "config.seed=3"], ["config.steps=5,6 config.seed=0,1"]):
        assert grouped(*given) is None


def test_sweep_over_seeds_writes_groups_beside_the_runs(tmp_path, capsys, monkeypatch):
    def trained(runner, points, finished, folder):
        for point in points:
            (folder / point.name).mkdir(exist_ok=True)
            loss = point.config.seed + point.config.steps
            records = [{"step": 4, "split": split, "loss": loss} for split in ("train", "val", "final")]
            records[0]["tokens_per_second"] = 9000.0
            (folder / point.name / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
        return {"steps=5,seed=2": "no room"}

    monkeypatch.setattr(training_runs.Runner, "train", trained)
    monkeypatch.setattr(train, "is_finished", lambda *_: False)
    assert swept(tmp_path / "sweep", "--grid=config.steps=5,6", "--grid=config.seed=0,1,2") == 1
    out = capsys.readouterr().out
    assert "end of 95 % interval" in out and "runs.csv, groups.csv, runs.png, sweep.html are in" in out
    assert [line.split() for line in out.splitlines()[-3:-1]] == [
        ["5", "2", "1", "5.5000", "−0.8531", "11.8531"],
        ["6", "3", "0", "7.0000", "4.5159", "9.4841"],
    ]
    with (tmp_path / "sweep" / "groups.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["group", "steps", "seeds", "failed", "mean_loss", "low", "high"]
    assert [(row["group"], row["steps"], row["seeds"], row["failed"], row["mean_loss"]) for row in rows] == [
        ("steps=5", "5", "2", "1", "5.5"),
        ("steps=6", "6", "3", "0", "7.0"),
    ]
    assert len((tmp_path / "sweep" / "runs.csv").read_text().splitlines()) == 7
    assert swept(tmp_path / "sweep", "--grid=config.steps=5,6", "--grid=config.seed=0") == 1
    assert not (tmp_path / "sweep" / "groups.csv").exists()


# --- runs


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A sweep of three runs together, one of which diverges: its folder, exit code and output."""
    folder, out, err = tmp_path_factory.mktemp("sweeps") / "sweep", io.StringIO(), io.StringIO()
    options = ["--grid=config.optimizer.learning_rate=1e-3,1e20,1e-2", "--grid=config.seed=3", "--together=3"]
    with workers_here(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = swept(folder, *options)
    return folder, code, out.getvalue(), err.getvalue()


def test_sweep_with_a_failing_run_finishes_the_others(finished):
    folder, code, out, err = finished
    assert code == 1 and all(line.startswith("jaxlib ") for line in err.splitlines()), err
    written = {f"learning_rate={rate},seed=3" for rate in ("0.001", "1e+20", "0.01")}
    assert {path.name for path in folder.iterdir()} == written | {
        "logs",
        "runs.csv",
        "runs.png",
        "sweep.html",
        "sweep.json",
    }
    assert re.search(r"/3  learning_rate=1e\+20,seed=3  failed: .* at step 1; .* \(see .*logs\)", out)
    assert "runs.csv, runs.png, sweep.html are in" in out


@pytest.mark.slow
def test_runs_with_options_beyond_the_argument_limit_start_together(tmp_path, capsys):
    nowhere = f"--config.data.path=/{'nowhere/' * 9_000}"  # for two runs, beyond Linux's limit of 128 KiB
    assert swept(tmp_path / "sweep", "--grid=config.seed=0,1", nowhere) == 1
    assert capsys.readouterr().out.count("  failed: data.path = ") == 2


def test_table_is_sorted_by_final_loss_and_agrees_with_the_records(finished):
    folder, _, out, _ = finished
    with (folder / "runs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 and rows[2]["error"].startswith("param_norm is") and rows[2]["loss"] == ""
    assert float(rows[0]["loss"]) < float(rows[1]["loss"])
    for row in rows[:2]:
        columns = attnlab.metrics(folder / row["run"])
        validation = columns["split"] == "val"
        assert float(row["loss"]) == columns["loss"][-1] and row["steps"] == "12" and row["seed"] == "3"
        assert float(row["best_loss"]) == columns["loss"][validation].min()
        assert int(row["tokens_per_second"]) > 0
        assert f"{float(row['loss']):.4f}" in out
    head, first, *_, last = out.splitlines()[-5:-1]
    assert head.split()[:3] == ["learning", "rate", "seed"] and first.split()[0] == rows[0]["optimizer.learning_rate"]
    assert "failed" in last


def test_second_sweep_keeps_finished_runs_and_adds_new_ones(finished, capsys):
    folder = finished[0]
    before = {name: contents(folder / f"learning_rate={name},seed=3") for name in ("0.001", "0.01")}
    with workers_here():
        assert swept(folder, "--grid=config.optimizer.learning_rate=1e-3,1e-2,2e-2", "--grid=config.seed=3") == 0
    out = capsys.readouterr().out
    assert "2 of 3 runs are already finished" in out and "3/3  learning_rate=0.02,seed=3  finished" in out
    assert {name: contents(folder / f"learning_rate={name},seed=3") for name in before} == before


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_signal_saves_and_stops_all_runs_and_the_same_command_resumes(tmp_path):
    options, folder = ["--grid=config.seed=0,1,2", "--jobs=2"], tmp_path / "sweep"
    running = started(folder, *options)
    wait_until(lambda: all("step 100/" in log(folder, f"seed={seed}") for seed in (0, 1)))
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(running.pid)], capture_output=True, text=True)
    pids = listed.stdout.split()
    running.send_signal(signal.SIGTERM)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 128 + signal.SIGTERM and err == "stopped: the same command resumes from there\n"
    assert len(pids) == 2 and not any(map(is_alive, pids))
    assert all(re.search(r"stopped: step \d+ is saved", log(folder, f"seed={seed}")) for seed in (0, 1))
    assert not (folder / "seed=2").exists() and not (folder / "runs.csv").exists()

    again = started(folder, *options)
    out, err = again.communicate(timeout=300)
    assert again.returncode == 0 and not err and all(f"seed={seed}  finished" in out for seed in range(3)), out + err
    assert all("resumed from step" in log(folder, f"seed={seed}") for seed in (0, 1))
    whole = [*WITHOUT_DROPOUT, *LONG, "--config.seed=0"]
    command = [sys.executable, "-m", "attnlab.train", *whole, f"--workdir={tmp_path}/run"]
    subprocess.run(command, env=os.environ | {"XLA_FLAGS": ""}, check=True, capture_output=True)
    assert records(folder / "seed=0") == records(tmp_path / "run")


def test_ended_runs_on_another_text_are_refused(finished, tmp_path):
    (tmp_path / "a.txt").write_text("another text " * 1000)
    run = next(finished[0].glob("*/config.json")).parent
    point = grid.Point(run.name, {}, RunConfig().changed({"data.path": str(tmp_path / "a.txt")}))
    with pytest.raises(UserError, match="was trained on another text .* choose a new --workdir"):
        training_runs.check_texts([point], {run.name}, run.parent)
