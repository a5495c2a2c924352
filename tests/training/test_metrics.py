"""`metrics.jsonl` holds each record once, despite truncated lines and restarts."""

import errno
import os
import subprocess
import sys
import types
from unittest import mock

import jax
import pytest

from attnlab.support.errors import UserError
from attnlab.training import metrics
from attnlab.training.trackers import TensorBoard


@pytest.mark.parametrize("tail", ["", '{"step": 3, "spl'])
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
        with pytest.raises(UserError, match="has changed since step 1 was saved"):
            metrics.MetricsLog(path, offset, last_step=1)
        assert path.read_bytes() == damaged
    path.unlink()
    assert metrics.MetricsLog(path, offset, last_step=1).lost


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


def test_starts_within_one_second_write_separate_event_files(tmp_path):
    for loss in ("first", "second", "third"):
        tracker = TensorBoard(tmp_path)
        tracker.log(1, {loss: 2.0})
        tracker.close()
    contents = b"".join(events.read_bytes() for events in tmp_path.iterdir())
    assert all(loss in contents for loss in (b"first", b"second", b"third"))


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


def test_events_on_a_full_disk_are_disabled_without_stopping_the_run(tmp_path, monkeypatch, capsys):
    log = metrics.MetricsLog(tmp_path / "metrics.jsonl", trackers=[TensorBoard(tmp_path / "events")])
    log.write(step=1, split="train", loss=2.0)
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr("tensorboardX.record_writer.RecordWriter.write", full)
    for step in range(2, 40):  # more than any queue holds
        log.write(step=step, split="train", loss=2.0)
        log.write_text(step, "En un lugar")
    log.close()
    assert len(metrics.read(tmp_path / "metrics.jsonl")) == 39
    err = capsys.readouterr().err
    assert err == "TensorBoard logging disabled (No space left on device); training continues\n"


def test_events_without_tensorboardx_are_disabled_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    events = TensorBoard(tmp_path / "events")
    for step in (1, 2):
        events.log(step, {"train/loss": 2.0})
    events.close()
    told = "tensorboardX is not installed: pip install 'attnlab[log]'"
    assert capsys.readouterr().err == f"TensorBoard logging disabled ({told}); training continues\n"


def test_trackers_get_the_numbers_of_each_record(tmp_path):
    tracker = types.SimpleNamespace(log=mock.Mock(), close=mock.Mock())
    log = metrics.MetricsLog(tmp_path / "metrics.jsonl", trackers=[tracker])
    log.write(step=1, split="train", loss=1.0, note="no number", none=None)
    log.write(step=1, split="val", loss=1.0)
    log.close()
    assert tracker.log.mock_calls == [mock.call(1, {f"{split}/loss": 1.0}) for split in ("train", "val")]
    tracker.close.assert_called_once_with()


def test_reporter_on_a_terminal_shows_control_characters(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with metrics.ProgressReporter(steps=20) as reporter:
        reporter.print("\x1b]0;title\x07 one\ntwo\r\x9b")
    assert "\\x1b]0;title\\x07 one\ntwo\\x0d\\x9b\n" in capsys.readouterr().out


def test_reporter_without_terminal_prints_plain_lines(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in Jupyter's kernels
    with metrics.ProgressReporter(steps=20) as reporter:
        reporter.step(10, "train loss 2.5")
        reporter.print("[not markup]")
    assert capsys.readouterr().out == "step 10/20  train loss 2.5\n[not markup]\n"


@pytest.mark.parametrize(
    "stats, peak",
    [
        ([{"peak_bytes_in_use": 2_000_000_000}, {"peak_bytes_in_use": 3_500_000_000}], 3_500_000_000),
        ([{"bytes_in_use": 5}], None),
        ([None], None),
        ([jax.errors.JaxRuntimeError("UNIMPLEMENTED")], None),
    ],
    ids=str,
)
def test_memory_peaks_are_reported_if_the_backend_knows_them(stats, peak):
    peaks = metrics.memory_peaks([mock.Mock(jax.Device, memory_stats=mock.Mock(side_effect=[each])) for each in stats])
    assert peaks.get("device_peak_memory_bytes") == peak
    assert 50_000_000 < peaks["host_peak_memory_bytes"] < 1 << 40
