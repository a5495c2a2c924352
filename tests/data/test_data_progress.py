"""Progress of reading and tokenising: silent for short work, lines without a terminal, a bar on one."""

import sys
import time

import pytest

from attnlab.data import data_progress


@pytest.fixture
def clock(monkeypatch):
    """Replaces the clock: add seconds with `clock(seconds)`."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


@pytest.mark.parametrize("seconds, options", [(0.9, {}), (100, {"quiet": True})], ids=["short", "quiet"])
def test_short_or_quiet_work_prints_nothing(seconds, options, capsys, clock):
    with data_progress.DataProgress("reading", **options) as reading:
        clock(seconds)
        reading.advance(10**6)
    assert capsys.readouterr().out == ""


def test_without_a_terminal_a_line_is_printed_every_ten_seconds(capsys, clock):
    with data_progress.DataProgress("reading a.txt", 300_000_000) as reading:
        for _ in range(30):
            clock(1)
            reading.advance(10_000_000)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "reading a.txt: 100 of 300 MB, 10.0 MB/s"
    assert len(lines) == 4 and lines[-1] == "reading a.txt: 300 of 300 MB, 10.0 MB/s"


def test_terminal_gets_a_bar(capsys, clock, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with data_progress.DataProgress("reading a.txt", 2_000_000) as reading:
        clock(2)
        reading.advance(10**6)
        assert "reading a.txt" in capsys.readouterr().out
