"""Comparisons: errors, tables for a text and a task, and runs that are kept, added, diverge or are killed."""

import contextlib
import csv
import functools
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnlab
from attnlab import compare, comparing
from attnlab import config as configs
from attnlab.comparing import certificate, comparison, measuring, protocol, race, replication
from attnlab.data.batches import Batch
from attnlab.data.tasks import named
from attnlab.data.tasks.task_batches import HeldOutBatches
from attnlab.support import workers
from attnlab.support.errors import UserError
from attnlab.sweeping import grid, training_runs
from attnlab.training import text as texts
from attnlab.training.state import token_losses
from attnlab.training.workdir import Workdir
from tests.runs import REPOSITORY, WITHOUT_DROPOUT, Here, sharing, workers_here

ROTARY = ["--variant=rotary:", "--variant=again: model.positions=rotary"]
VARIANTS = [*ROTARY, "--variant=window: model.attention.window=4"]
# Columns that may differ between two comparisons of the same runs.
TIMES = ("tokens_per_second", "equal_time", "memory")
PARITY = "task:parity longest=16"
# Two variants, published results at twice the length, and options of the command. The margin is two standard errors
# of an accuracy near 1/2 that is measured on 64 answers.
TWO = f"""
VARIANTS = {{"rotary": {{}}, "window": {{"model.attention.window": 4}}}}
PUBLISHED = {{
    "{PARITY}": {{
        "source": "Grazzi et al. 2025",
        "results": {{"rotary": 0.511, "window": 1.0}},
        "margin": 0.13,
        "differs": "An answer at each bit.",
        "length": 2,
        "protocol": {{"model.attention.window": 4, "seeds": 2, "steps": 20_000}},
    }}
}}
COMPARE = {{"learning_rates": 1e-2, "seeds": "2", "tasks": ["{PARITY}", "text"]}}
"""


def compared(folder, *options):
    return compare.main(["compare", *WITHOUT_DROPOUT, f"--workdir={folder}", *options])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A comparison of two variants on parity and on a text, with published results: its folder, file and output."""
    folder, out = tmp_path_factory.mktemp("comparisons") / "tasks", io.StringIO()
    file = folder.parent / "variants.py"
    file.write_text(TWO)
    with pytest.MonkeyPatch.context() as patch, workers_here(), sharing(), contextlib.redirect_stdout(out):
        patch.setattr(race, "ROUNDS", 2)
        patch.setattr(race, "BURST", 0.01)
        # Certificates have their own tests and compile a lot.
        patch.setattr(certificate, "certify", lambda model: {"conforms": True, "worst": 0.5})
        assert compared(folder, f"--variants={file}") == 0
    return folder, file, out.getvalue()


def part_of(folder, name):
    return folder / next(path.name for path in folder.iterdir() if path.is_dir() and path.name.startswith(name))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "quickstart.py .*VARIANTS"),
        (["--variant=a:"], "one variant: .*--variant"),
        (["--variant=a: model.widht=3", "--variant=b:"], "config.model.widht .*did you mean model.width"),
        ([*VARIANTS, "--learning_rates=1e-3,fast"], "--learning_rates=1e-3,fast: "),
        ([*VARIANTS, "--seeds=1"], "seeds"),
        (["--variants=nothing.py"], "nothing.py: "),
        (
            [*VARIANTS, "--tasks=parety"],
            r"--tasks=parety: no such task \(did you mean parity\?\): expected some of text, recall",
        ),
        ([*VARIANTS, "--tasks=parity"], "config.model.context = 16: 'task:parity' needs 40 or more"),
        ([*VARIANTS, "--match_length=9"], "--match_length=9: it has no effect without match = state"),
        ([*VARIANTS, "--config.eval.patience=2"], "config.eval.patience = 2: compared runs are equally long"),
    ],
)
def test_mistake_prints_one_line_before_anything_starts(tmp_path, capsys, options, message):
    assert compared(tmp_path / "new", *options) == 2
    out, err = capsys.readouterr()
    assert re.search(message, err) and err.startswith("error: ") and err.count("\n") == 1 and not out, err
    assert not (tmp_path / "new").exists()


def test_folder_with_other_files_is_left_alone(tmp_path, capsys):
    (tmp_path / "table.csv").write_text("mine")
    assert compared(tmp_path, *VARIANTS) == 2
    assert "holds other files and no comparison" in capsys.readouterr().err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_dry_run_lists_the_runs_and_starts_none(tmp_path, capsys):
    options = ["--dry_run", "--learning_rates=1e-2,1e-3", "--seeds=2"]
    assert compared(tmp_path / "new", *VARIANTS, *options) == 0
    out = capsys.readouterr().out
    assert out.count("tuning: variant=") == 6 and "12 runs, and up to 6 more if a best learning rate" in out
    assert compared(tmp_path / "new", *VARIANTS, *options, "--tuning_seeds=3") == 0  # must not change the other seeds
    assert all(text.count("seeds 0, 1\n") == 3 for text in (out, capsys.readouterr().out))
    words = ["--config=compare_tasks", *VARIANTS, "--dry_run", f"--workdir={tmp_path / 'new'}"]
    assert compare.main(["compare", *words]) == 0
    assert all(f"--- {task}: " in (out := capsys.readouterr().out + out) for task in ("recall", "parity"))  # COMPARE's
    assert not (tmp_path / "new").exists()


def test_every_column_has_a_value(finished):
    rotary, window = comparing.read(part_of(finished[0], "text"))
    empty = {name for name, value in rotary.items() if value is None}
    assert {name for name in empty if not name.startswith(("difference_", "verdict"))} <= {
        "loss_at_equal_time_interval",
        "version",
    }
    cache = 2 * 2 * 8 * 16 * 4 + 4  # keys and values, heads, features, positions, bytes; an int32 length
    assert rotary["decode_state_bytes_1x"] == cache and rotary["decode_state_bytes_8x"] == 8 * (cache - 4) + 4
    assert rotary["peak_memory_bytes"] > 3 * 4 * rotary["parameters"]  # with AdamW's two moments
    assert (rotary["seeds"], rotary["diverged"], rotary["failed"], rotary["comparable"]) == (2, 0, 0, True)
    assert window["loss"] != rotary["loss"] and window["difference_loss"] == window["loss"] - rotary["loss"]


def test_task_table_compares_accuracies_by_seed_and_length(finished):
    folder, _, out = finished
    rotary, window = comparing.read(part_of(folder, "task"))
    finals = {}
    for variant in ("rotary", "window"):
        workdirs = sorted(part_of(folder, "task").glob(f"variant={variant},*"))
        lines = [(workdir / "metrics.jsonl").read_text().splitlines()[-1] for workdir in workdirs]
        finals[variant] = [json.loads(line)["accuracy"] for line in lines]
    assert rotary["accuracy"] == np.mean(finals["rotary"]) and window["accuracy"] == np.mean(finals["window"])
    assert window["difference_accuracy"] == pytest.approx(window["accuracy"] - rotary["accuracy"])
    steps = np.array(finals["window"]) / protocol.resolution(attnlab.load(workdirs[0]).config, "accuracy")
    np.testing.assert_allclose(steps, np.round(steps))
    assert all(0 <= window[f"accuracy_{times}x"] <= 1 for times in (1, 2, 4, 8))
    words = (part_of(folder, "task") / "table.md").read_text()
    assert "accuracy (share of answers, ± 95 % over 2 seeds)" in words and f"--- {PARITY}" in out
    assert "Learning rate 0.01, the same for all" in words  # from COMPARE


def test_each_task_has_a_folder_and_all_share_one_page(finished):
    folder, _, out = finished
    files = {
        name: {path.name for path in part_of(folder, name).iterdir() if path.is_file()} for name in ("task", "text")
    }
    assert files["text"] == {"table.csv", "table.md"}
    assert files["task"] == files["text"] | {"replication.csv", "replication.md"}
    assert {path.name for path in folder.iterdir() if path.is_file()} == {"comparison.json", "comparison.html"}
    page = (folder / "comparison.html").read_text()
    assert all(title in page for title in (PARITY, ">text<", "Accuracy against length", "Loss over seconds"))
    assert "size of the decoding state" not in page  # because all variants have the same size
    costs = {row["flops_per_token_train"] for row in comparing.read(part_of(folder, "text"))}
    assert ("Loss over FLOPs" in page) == (len(costs) > 1)
    assert (
        "tokens per parameter (here" in out and "Two things differ" not in out and "layers 1, heads 2, width 16" in page
    )
    assert page.index("window ") < page.index("<table") and "attnlab compare --config" in page
    assert f"the report is {folder / 'comparison.html'}" in out


def test_published_results_are_compared_with_ours(finished):
    folder, _, out = finished
    parity = part_of(folder, "task")
    rotary, window = comparing.read(parity)
    with (parity / "replication.csv").open() as file:
        ours = list(csv.DictReader(file))
    assert [row["variant"] for row in ours] == ["rotary", "window"]
    assert [float(row["ours"]) for row in ours] == pytest.approx([rotary["accuracy_2x"], window["accuracy_2x"]])
    assert float(ours[1]["difference"]) == pytest.approx(window["accuracy_2x"] - rotary["accuracy_2x"])
    assert float(ours[1]["published_difference"]) == pytest.approx(0.489) and not ours[0]["outcome"]
    assert ours[1]["outcome"] == "not trained far enough"
    for text in (out, (parity / "replication.md").read_text(), (folder / "comparison.html").read_text()):
        assert "Grazzi et al. 2025" in text and ours[1]["outcome"] in text
        assert re.search(r"Our runs differ: model.attention.window None, not 4; steps \d+, not 20000; An answer", text)


def test_diverged_run_counts_as_chance_against_published_results(finished, tmp_path):
    folder = shutil.copytree(part_of(finished[0], "task"), tmp_path / "task")
    workdirs = sorted(folder.glob("variant=window,*"))
    points = [grid.Point(each.name, {}, attnlab.load(each).config) for each in workdirs]
    with (workdirs[0] / "metrics.jsonl").open("a") as file:
        file.write('{"split": "diverged", "step": 12}\n')
    measured = {"window": {"accuracies_by_length": {"32": [0.7]}, "answers_by_length": {"32": 64}}}
    arguments = protocol.Protocol(points[0].config, (), (), (), "accuracy"), folder, {"window": points}, measured
    results, step = replication.results(replication.Published("", {}, 0.01, "", length=2), *arguments)
    assert results == {"window": [0.5, 0.7]} and step == 1 / 64
    measured["window"] = {"accuracies_by_length": {}}  # as with learned positions
    results, _ = replication.results(replication.Published("", {}, 0.01, "", length=2), *arguments)
    np.testing.assert_array_equal(results["window"], [0.5, np.nan])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": 1}, "seeds = 1"),
        ({"tuning_seeds": 0}, "tuning_seeds = 0: expected 1 to 1000"),
        ({"match": "size"}, "match = 'size'"),
        ({"together": 0}, "together = 0: expected"),
        ({"jobs": -1}, "jobs = -1: expected"),
        ({"tasks": "copy"}, "expected a list"),
    ],
)
def test_invalid_argument_raises_one_line(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        comparing.compare(WITHOUT_DROPOUT, {"a": {}, "b": {}}, workdir=tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_comparison_with_other_steps_needs_another_folder(finished, capsys):
    assert compared(finished[0], f"--variants={finished[1]}", "--config.steps=24") == 2
    assert re.search("has runs of 12 steps, not 24: choose a new --workdir", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("together", "jobs", "backend", "seeds"),
    [("auto", 0, "cpu", 1), ("auto", 0, "gpu", 3), (5, 1, None, 3), ("1", 0, None, 1), ("auto", 1, None, 1)],
)
def test_rates_are_tuned_on_three_seeds_if_runs_train_together(monkeypatch, together, jobs, backend, seeds):
    """A process that starts workers must not ask JAX for a device: backend None would fail here."""
    monkeypatch.setattr(jax, "default_backend", lambda: {"cpu": "cpu", "gpu": "gpu"}[backend])
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert comparison.default_tuning_seeds(together, jobs) == seeds


@pytest.mark.parametrize(
    ("best", "extensions", "tried", "verdict"),
    [(1e-2, 2, [1e-3, 1e-2, 1e-1], "worse"), (1e1, 2, [1e-3, 1e-2, 1e-1, 1.0, 10.0], "worse, rate at the edge")],
)
def test_best_rate_at_an_edge_extends_the_grid_within_a_budget(
    tmp_path, monkeypatch, capsys, best, extensions, tried, verdict
):
    saved = {"vocab_size": 65, "parameters": 7, "corpus": {"name": "text", "sha256": "0", "characters": 9}}

    def trained(runner, points, finished, folder):
        for point in points:
            rate, window = point.config.optimizer.learning_rate, point.config.model.layers[0].window
            loss = np.log10(rate / (best if window == 4 else 1e-2)) ** 2 + (window == 4)
            loss += (window or 4) * (point.config.seed % 3) ** 2 / 100 + (window == 16) / 50
            (folder / point.name).mkdir()
            (folder / point.name / "config.json").write_text(configs.to_json(point.config, **saved))
            last = {"step": 12, "split": "final", "loss": loss, "params_sha256": point.name}
            (folder / point.name / "metrics.jsonl").write_text(json.dumps(last) + "\n")
        return {}

    monkeypatch.setattr(training_runs.Runner, "train", trained)
    monkeypatch.setattr(measuring, "measure", lambda *_: ({}, None))
    variants = {"all": {}, "window": {"model.attention.window": 4}, "wide": {"model.attention.window": 6}}
    variants["wider"] = {"model.attention.window": 16}
    options = {"learning_rates": [1e-3, 1e-2, 1e-1], "seeds": 3, "extensions": extensions}
    result = comparing.compare(WITHOUT_DROPOUT, variants, workdir=tmp_path / "new", **options)
    names = [path.name for path in (tmp_path / "new").glob("variant=window,*seed=1000")]
    assert sorted(float(re.search("rate=([^,]*)", name)[1]) for name in names) == tried
    cells = dict(zip(result._part(None).sections[0].table.heads, result._part(None).sections[0].table.cells()[1]))
    assert cells["verdict"] == verdict and result.rows[1]["learning_rate"] == tried[-2 + ("edge" in verdict)]
    out, needed = capsys.readouterr().out, [row["difference_seeds_needed"] for row in result.rows[2:]]
    assert len({*needed}) == 2
    assert ("--extensions" in out) == ("edge" in verdict) and f"seeds={max(needed)}, learning_rates=" in out


def test_function_resumes_a_comparison_of_the_command(finished, monkeypatch, capsys):
    monkeypatch.setattr(workers, "subprocess", SimpleNamespace(DEVNULL=None, STDOUT=None))  # nothing can start
    variants, text = {"rotary": {}, "window": {"model.attention.window": 4}}, part_of(finished[0], "text")
    options = {"workdir": finished[0], "seeds": 2, "learning_rates": [1e-2], "tasks": ["text", PARITY]}
    tables = sorted(finished[0].glob("*/table.csv"))
    before = [path.read_bytes() for path in tables]
    result = comparing.compare(WITHOUT_DROPOUT, variants, **options)
    assert [path.read_bytes() for path in tables] == before and len(tables) == 2
    assert capsys.readouterr().out.count("4 of 4 runs are already finished") == 2
    rows = [{k: x for k, x in row.items() if k != "task"} for row in result.rows if row["task"] == "text"]
    assert rows == comparing.read(text) and result.verdict("window", "text") == rows[1]["verdict"] and not result.failed
    assert result.table(PARITY).splitlines()[0].split()[:2] == ["variant", "verdict"]
    assert (
        str(result).startswith(result.sentences[0]) and result.sentences[0].partition(": ")[2] in result._repr_html_()
    )
    assert [curve.shape[1] for curve in result.curves("window", "text")] == [3, 3]
    with pytest.raises(KeyError, match="'windows' .did you mean window"):
        result.verdict("windows", "text")


def test_accuracy_at_a_length_counts_answers_in_the_second_half(finished):
    parity, right = part_of(finished[0], "task"), []
    task = named.parse("task:parity shortest=32 longest=32")
    (batch,) = HeldOutBatches(task, context=32, batch_size=4, windows=4, part="second")
    for workdir in sorted(parity.glob("variant=window,*")):
        run = attnlab.load(workdir)
        answers = jax.jit(run.model.replace(context=32).apply)(run.params, batch.tokens[:, :-1]).argmax(-1)
        right.append((answers == batch.targets)[:, 16:].mean())
    assert comparing.read(parity)[1]["accuracy_2x"] == pytest.approx(np.mean(right))


def test_losses_by_position_use_the_second_half_of_held_out_text(finished):
    text = part_of(finished[0], "text")
    workdirs = sorted(text.glob("variant=window,*"))
    runs = [attnlab.load(workdir) for workdir in workdirs]
    config = runs[0].config.changed({"model.context": 64, "eval.windows": 2, "batch_size": 2, "eval.part": "second"})
    (batch,) = texts.load(config, Workdir(workdirs[0])).validation
    compute_losses = jax.jit(functools.partial(token_losses, runs[0].model.replace(context=64)))
    losses = [compute_losses(run.params["params"], Batch(*map(jnp.asarray, batch[:3]))).mean(0) for run in runs]
    expected = np.mean(losses, axis=0).reshape(4, 16)
    window = comparing.read(text)[1]
    actual = [window[f"loss_{times}x"] for times in (1, 2, 4)]
    np.testing.assert_allclose(actual, [expected[0].mean(), expected[1].mean(), expected[2:].mean()], rtol=1e-5)


def test_changed_variant_loses_its_old_measurements(finished, tmp_path, monkeypatch):
    folder, started = shutil.copytree(finished[0], tmp_path / "changed"), []
    for file in part_of(folder, "text").glob("variant=window,*/metrics.jsonl"):
        file.write_text(re.sub('"params_sha256": "[^"]*"', '"params_sha256": "other"', file.read_text()))

    class Idle(Here):
        def __init__(self, words, **_):
            self.returncode = started.append(words) or 0

    monkeypatch.setattr(workers, "subprocess", SimpleNamespace(Popen=Idle, DEVNULL=None, STDOUT=None))
    assert compared(folder, f"--variants={finished[1]}") == 0
    rotary, window = comparing.read(part_of(folder, "text"))
    assert rotary["parameters"] and window["parameters"] is None and len(started) == 2  # the measurement and a race


def steady(rows):
    return [{name: x for name, x in row.items() if not any(word in name for word in TIMES)} for row in rows]


def started(options, folder):
    """The command in a subprocess; comparisons in one folder share compiled programs."""
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder.parent / "programs")}
    return subprocess.Popen(
        [sys.executable, "-m", "attnlab.compare", *options, f"--workdir={folder}"],
        cwd=REPOSITORY,
        env=os.environ | {"XLA_FLAGS": "", "PYTHONUNBUFFERED": "1"} | cache,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_undisturbed(options, folder):
    process = started(options, folder)
    out, _ = process.communicate(timeout=900)
    assert process.returncode == 0, out
    return out


def run_killed(options, folder, delays):
    """Kill the command again and again, then let it finish."""
    for delay, number in zip(delays, (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL) * 2):
        process = started(options, folder)
        time.sleep(delay)
        process.send_signal(number)
        out, _ = process.communicate(timeout=120)
        assert "Traceback" not in out, out
    for _ in range(30):
        process = started(options, folder)
        out, _ = process.communicate(timeout=900)
        if "another command is running there" not in out:
            break
        time.sleep(1)  # runs of a killed command end by themselves
    assert process.returncode == 0, out


@pytest.mark.parametrize(
    ("variants", "rates", "delays"),
    [
        pytest.param(VARIANTS[:2], (1e-2,), (9,), marks=pytest.mark.slow),
        pytest.param(VARIANTS, (1e-2, 3e-3), (3, 8, 13, 21, 30), marks=pytest.mark.campaign),
    ],
)
def test_killed_comparison_ends_with_the_undisturbed_table(tmp_path, variants, rates, delays):
    """Commands run in subprocesses; variants with the same model share one compiled training step."""
    options = [
        *WITHOUT_DROPOUT,
        f"--learning_rates={','.join(map(str, rates))}",
        "--seeds=2",
        *variants,
        "--config.steps=60",
    ]
    run_undisturbed(options, tmp_path / "whole")
    programs = tmp_path / "programs"
    steps = {path.name for path in programs.rglob("jit_steps-*") if not path.name.endswith("-atime")}
    assert len(steps) == len(variants) - 1, sorted(path.name for path in programs.iterdir())
    run_killed(options, tmp_path / "killed", delays)
    rows = comparing.read(tmp_path / "killed")
    assert steady(rows) == steady(comparing.read(tmp_path / "whole"))
    assert json.loads((tmp_path / "killed" / "comparison.json").read_text())["variants"]["rotary"] == []
    rotary, again, *_ = rows  # equal but for the name
    assert again["loss"] == rotary["loss"] and again["verdict"] == "not told apart" and again["difference_loss"] == 0

    out = run_undisturbed([*options, "--variant=high: optimizer.weight_decay=1e6"], tmp_path / "killed")
    assert f"{2 * len(variants)} of {2 * len(variants) + 2} runs are already finished" in out  # two seeds each
    *others, high = comparing.read(tmp_path / "killed")
    assert high["diverged"] == 2 and high["loss"] > max(row["loss"] for row in others)
    for was, row in zip(steady(rows), steady(others)):  # equal except statistics, which cover one more variant
        changed = {name for name in was if was[name] != row[name]}
        assert all(name.startswith("difference_") and name != "difference_loss" for name in changed)
