"""`metrics.jsonl` holds each record once, despite truncated lines and restarts."""

import errno
import json
import os
import subprocess
import sys

import pytest

from attnlab.support.errors import UserError
from attnlab.training import metrics, trackers
from attnlab.training.trackers import TensorBoard


def test_log_writes_flat_records_in_order(tmp_path):
    log = metrics.MetricsLog(tmp_path / "metrics.jsonl")
    log.write(step=1, split="train", loss=2.0)
    log.write(step=2, split="val", loss=1.5)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == log.records == metrics.read(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize("tail", ["", '{"step": 3, "spl', '{"step": 3, "split": "train"}'])
def test_log_resumed_drops_records_after_the_offset(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    log = metrics.MetricsLog(path)
    for step in (1, 2, 3):
        if step == 3:
            offset = log.offset()
        log.write(step=step, split="train", loss=float(step))
    with path.open("a") as file:
        file.write(tail)
    again = metrics.MetricsLog(path, offset, last_step=2)
    again.write(step=3, split="train", loss=3.0)
    assert [record["step"] for record in metrics.read(path)] == [1, 2, 3]
    assert again.records == log.records and again.offset() == log.offset()
    assert path.read_text().endswith("\n")


@pytest.mark.parametrize("step, kept", [(2, True), (3, False)])
def test_log_resumed_for_an_extension_keeps_its_final_record(tmp_path, step, kept):
    log = metrics.MetricsLog(tmp_path / "metrics.jsonl")
    log.write(step=2, split="val", loss=2.0)
    offset = log.offset()
    log.write(step=step, split="final", loss=2.0)
    log.write(step=3, split="train", loss=1.0)
    again = metrics.MetricsLog(log.path, offset, last_step=2)
    assert [record["split"] for record in again.records] == ["val", "final"][: 1 + kept]
    assert again.records == metrics.read(log.path)


def test_log_changed_before_the_offset_is_refused(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = metrics.MetricsLog(path)
    log.write(step=1, split="train", loss=2.0)
    offset, whole = log.offset(), path.read_bytes()
    for damaged in (whole[:-1], whole.replace(b"2.0", b"2.1"), b""):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="when step 1 was saved"):
            metrics.MetricsLog(path, offset, last_step=1)
        assert path.read_bytes() == damaged
    path.unlink()
    assert metrics.MetricsLog(path, offset, last_step=1).lost


def test_log_deleted_under_a_run_is_written_again(tmp_path, capsys):
    log = metrics.MetricsLog(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3):
        log.write(step=step, split="train", loss=1 / step)
        if step == 2:
            offset = log.offset()
            log.path.unlink()
    assert metrics.read(log.path) == log.records == metrics.MetricsLog(log.path, log.offset(), last_step=3).records
    assert metrics.MetricsLog(log.path, offset, last_step=2).records == log.records[:2]
    assert capsys.readouterr().err == f"{log.path} was deleted: it is written again, with all records\n"


def test_log_resumed_at_its_end_is_not_rewritten(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = metrics.MetricsLog(path)
    log.write(step=1, split="train", loss=1.0)
    before = path.stat()
    metrics.MetricsLog(path, log.offset(), last_step=1)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_read_names_a_damaged_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "split": "train"}\nnonsense\n{"step": 2, "split": "train"}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl line 2 .*'nonsense"):
        metrics.read(path)


def test_log_with_events_writes_tensorboard_files(tmp_path):
    log = metrics.MetricsLog(tmp_path / "metrics.jsonl", trackers=[TensorBoard(tmp_path / "events")])
    log.write(step=1, split="train", loss=2.0)
    log.write_text(1, "En un lugar")
    log.close()
    (events,) = (tmp_path / "events").iterdir()
    assert b"train/loss" in events.read_bytes() and b"En un lugar" in events.read_bytes()


def test_events_do_not_import_pytorch(tmp_path):
    (tmp_path / "torch.py").write_text("print('imported')")
    program = (
        "import sys; from attnlab.training.trackers import TensorBoard; "
        "TensorBoard(__import__('pathlib').Path(sys.argv[1])).log(1, {'loss': 2.0}); print('written'); import torch"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "events")]
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    out = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=True)
    assert out.stdout == "written\nimported\n" and list((tmp_path / "events").iterdir())


def test_events_on_a_full_disk_are_given_up_in_one_line_and_stop_nothing(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    log = metrics.MetricsLog(tmp_path / "metrics.jsonl", trackers=[TensorBoard(tmp_path / "events")])
    log.write(step=1, split="train", loss=2.0)
    monkeypatch.setattr("tensorboardX.record_writer.RecordWriter.write", full)
    for step in range(2, 40):  # more than any queue holds
        log.write(step=step, split="train", loss=2.0)
        log.write_text(step, "En un lugar")
    log.close()
    assert len(metrics.read(tmp_path / "metrics.jsonl")) == 39 and not list((tmp_path / "events").iterdir())
    err = capsys.readouterr().err
    assert err == "TensorBoard events are given up (No space left on device): the run goes on without them\n"


def test_record_that_does_not_fit_takes_the_room_of_the_events(tmp_path, monkeypatch):
    log = metrics.MetricsLog(tmp_path / "metrics.jsonl", trackers=[TensorBoard(tmp_path / "events")])
    log.write(step=1, split="train", loss=2.0)
    append = metrics.MetricsLog._append

    def append_if_there_is_room(log, line):
        if list((tmp_path / "events").iterdir()):
            append(log, line[:9])  # as far as it goes
            raise OSError(errno.ENOSPC, "No space left on device")
        append(log, line)

    monkeypatch.setattr(metrics.MetricsLog, "_append", append_if_there_is_room)
    for step in (2, 3):
        log.write(step=step, split="train", loss=2.0)
    assert [record["step"] for record in metrics.read(tmp_path / "metrics.jsonl")] == [1, 2, 3]


class Recorder:
    """A tracker that notes what it gets."""

    def __init__(self):
        self.logged, self.closed = [], False

    def log(self, step, metrics):
        self.logged += [(step, name) for name in metrics]

    def close(self):
        self.closed = True


def test_trackers_get_each_record_once_whatever_the_number_of_starts(tmp_path):
    tracker, path, offset = Recorder(), tmp_path / "metrics.jsonl", None
    for ended in (2, 7, 5, 8):  # the start ends after this step, the first one saves step 2
        log = metrics.MetricsLog(path, offset, 2 if offset else 0, trackers=[tracker])
        for step in range(3 if offset else 1, ended + 1):
            log.write(step=step, split="train", loss=1.0, note="no number", none=None)
            if step == 7:
                log.write(step=step, split="val", loss=1.0)
        offset = offset or log.offset()
    assert tracker.logged == [(step, "train/loss") for step in range(1, 8)] + [(7, "val/loss"), (8, "train/loss")]
    log.close()
    assert tracker.closed


def test_unreadable_note_of_what_trackers_got_is_one_line(tmp_path):
    (tmp_path / "tracked.json").mkdir()
    with pytest.raises(UserError, match=r"tracked.json cannot be read .*: remove it"):
        metrics.MetricsLog(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize("tracker", [Recorder(), lambda workdir, config: None, 3])
def test_tracker_without_log_and_close_is_one_line(tmp_path, own_errors, tracker):
    with pytest.raises(UserError, match=r"makes no tracker: pass a class .*log\(step, metrics\) and close\(\)"):
        trackers.made(tracker, tmp_path, {})


def test_log_without_events_writes_one_file(tmp_path):
    log = metrics.MetricsLog(tmp_path / "metrics.jsonl")
    log.write(step=1, split="train", loss=2.0)
    log.write_text(1, "En un lugar")
    log.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_reporter_on_a_terminal_shows_control_characters(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with metrics.ProgressReporter(steps=20) as reporter:
        reporter.print("\x1b]0;title\x07 one\ntwo\r\x9b")
    assert "\\x1b]0;title\\x07 one\ntwo\\x0d\\x9b\n" in capsys.readouterr().out


def test_reporter_without_terminal_prints_plain_lines(capsys):
    with metrics.ProgressReporter(steps=20) as reporter:
        reporter.step(10, "train loss 2.5")
        reporter.print("[not markup]")
    assert capsys.readouterr().out == "step 10/20  train loss 2.5\n[not markup]\n"


def test_silent_reporter_prints_nothing(capsys):
    with metrics.ProgressReporter(steps=20, silent=True) as reporter:
        reporter.step(10, "train loss 2.5")
        reporter.print("hello")
    assert capsys.readouterr().out == ""
