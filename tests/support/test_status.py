"""The status of a command: one line that changes on a terminal, a line each elsewhere; other output replaces it."""

import io
import os
import signal
import subprocess
import sys

import pytest

from attnlab.support import progress, status

ERASE = "\r\x1b[2K"


@pytest.fixture
def terminal(capsys, monkeypatch):
    """A terminal of 20 columns, as standard output."""
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda stdout: True)
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("TERM", "xterm")
    return capsys


def test_status_on_a_terminal_is_one_line_that_fits_and_changes(terminal):
    status.show("importing JAX")
    status.show("reading a\x1b[2J/of\na/long/path.txt")
    status.clear()
    status.clear()
    assert terminal.readouterr().out == f"importing JAX ...{ERASE}reading a\\x1b[2J/of{ERASE}"


@pytest.mark.parametrize("bar", [True, False])
def test_progress_takes_the_place_of_the_status(terminal, bar):
    status.show("compiling")
    with progress.Progress(file=io.StringIO()) as shown:
        shown.show("") if bar else shown.print("compiled")
    assert terminal.readouterr().out == f"compiling ...{ERASE}"


def test_status_without_a_terminal_is_a_line_each(capsys):
    for text in ("importing JAX", "reading"):
        status.show(text)
    status.clear()
    assert capsys.readouterr().out == "importing JAX\nreading\n"


def test_help_is_not_preceded_by_a_status(capsys):
    for words, out in ((["--help"], ""), (["-h"], ""), (["--workdir=h"], "importing JAX\n")):
        status.importing(words)
        assert capsys.readouterr().out == out


def test_interrupt_while_importing_prints_one_line():
    command = [sys.executable, "-m", "attnlab", "train", "--config=quickstart", "--config.steps=1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout.readline() == "importing JAX\n"
        os.kill(running.pid, signal.SIGINT)
        assert running.communicate(timeout=60) == ("", "interrupted\n") and running.returncode == 130
