"""Progress of a study: plain lines where output is captured, a bar on a terminal."""

import io

import pytest

from attnlab.study import study_progress
from attnlab.study.study_progress import StudyProgress


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def reported(file, seconds_per_unit, total):
    """The output of a run of `total` units."""
    clock = Clock()
    with StudyProgress(file, clock) as reporter:
        advance = reporter.expect(total)
        for _ in range(total):
            clock.now += seconds_per_unit
            advance()
    return file.getvalue()


def test_progress_without_terminal_prints_share_and_time_left():
    assert reported(io.StringIO(), 12, total=10).splitlines()[:3] == [
        "10 % done, about 2 minutes left",
        "20 % done, about 2 minutes left",
        "30 % done, about 80 seconds left",
    ]


def test_progress_lines_become_rarer_in_long_studies():
    lines = reported(io.StringIO(), 1, total=4 * 3600).splitlines()
    assert 20 < len(lines) < 70
    assert lines[0].endswith("about 4 hours left") and lines[-1].endswith("minutes left")


def test_progress_on_a_terminal_is_a_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    text = reported(terminal, 30, total=4)
    assert "━" in text and "100%" in text and "\n25 %" not in text


def test_progress_survives_a_closed_pipe():
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    reported(Closed(), 60, total=3)


@pytest.mark.parametrize("seconds, words", [(0, "a few seconds"), (89, "about 90 seconds"), (7200, "about 2 hours")])
def test_duration_in_words_is_rounded(seconds, words):
    assert study_progress.in_words(seconds) == words
