"""`metrics.jsonl` holds each record once, across torn lines and second starts."""

import json

import pytest

from attnlab.errors import UserError
from attnlab.training import metrics


def test_records_are_flat_lines_in_order(tmp_path):
    log = metrics.MetricsLog(tmp_path / "metrics.jsonl")
    log.write(step=1, split="train", loss=2.0)
    log.write(step=2, split="val", loss=1.5)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == log.records == metrics.read(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize("torn", ["", '{"step": 3, "spl', '{"step": 3, "split": "train"}'])
def test_a_second_start_drops_what_it_will_write_again(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    log = metrics.MetricsLog(path)
    for step in (1, 2, 3):
        if step == 3:
            mark = log.mark()
        log.write(step=step, split="train", loss=float(step))
    with path.open("a") as file:
        file.write(torn)
    again = metrics.MetricsLog(path, mark, last_step=2)
    again.write(step=3, split="train", loss=3.0)
    assert [record["step"] for record in metrics.read(path)] == [1, 2, 3]
    assert again.records == log.records and again.mark() == log.mark()
    assert path.read_text().endswith("\n")


def test_a_log_that_is_not_what_it_was_at_the_mark_is_refused(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = metrics.MetricsLog(path)
    log.write(step=1, split="train", loss=2.0)
    mark, whole = log.mark(), path.read_bytes()
    for damaged in (whole[:-1], whole.replace(b"2.0", b"2.1"), b""):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="is not what it was when step 1 was saved: bring it back, or move it away"):
            metrics.MetricsLog(path, mark, last_step=1)
        assert path.read_bytes() == damaged
    path.unlink()
    assert metrics.MetricsLog(path, mark, last_step=1).lost


def test_a_log_that_needs_nothing_dropped_is_not_rewritten(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = metrics.MetricsLog(path)
    log.write(step=1, split="train", loss=1.0)
    before = path.stat()
    metrics.MetricsLog(path, log.mark(), last_step=1)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "split": "train"}\nnonsense\n{"step": 2, "split": "train"}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl line 2 is no record \('nonsense"):
        metrics.read(path)


def test_tensorboard_events_are_written_beside_it(tmp_path):
    log = metrics.MetricsLog(tmp_path / "metrics.jsonl", events=tmp_path / "events")
    log.write(step=1, split="train", loss=2.0)
    log.write_text(1, "En un lugar")
    log.close()
    (events,) = (tmp_path / "events").iterdir()
    assert b"train/loss" in events.read_bytes() and b"En un lugar" in events.read_bytes()


def test_without_tensorboard_no_events_are_written(tmp_path):
    log = metrics.MetricsLog(tmp_path / "metrics.jsonl")
    log.write(step=1, split="train", loss=2.0)
    log.write_text(1, "En un lugar")
    log.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_where_nobody_watches_a_terminal_lines_are_plain(capsys):
    with metrics.Watch(steps=20) as watch:
        watch.step(10, "train loss 2.5")
        watch.say("[not markup]")
    assert capsys.readouterr().out == "step 10/20  train loss 2.5\n[not markup]\n"


def test_a_silent_watch_prints_nothing(capsys):
    with metrics.Watch(steps=20, silent=True) as watch:
        watch.step(10, "train loss 2.5")
        watch.say("hello")
    assert capsys.readouterr().out == ""
