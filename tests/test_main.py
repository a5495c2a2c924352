"""The program `attnlab`: its commands, help and version."""

import functools
import os
import re
import subprocess
import sys

import pytest

import attnlab
from attnlab.__main__ import COMMANDS, main


@pytest.mark.parametrize("words", [[], ["--help"]], ids=str)
def test_help_lists_every_command(capsys, words):
    assert main(["attnlab", *words]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {command} " in out and summary in out for command, (_, summary) in COMMANDS.items())


def test_version_matches_the_package(capsys):
    assert main(["attnlab", "--version"]) == 0
    assert capsys.readouterr().out == f"attnlab {attnlab.__version__}\n"


def test_import_sets_no_signal_handler_and_reads_no_argv():
    program = "import signal, sys; before = signal.getsignal(2); del sys.argv, sys.orig_argv; import attnlab; "
    program += "assert signal.getsignal(2) is before and 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_unknown_command_suggests_the_nearest(capsys):
    assert main(["attnlab", "trian"]) == 2
    known = "train, sweep, compare, sample, see, export, plan, study, conform, bench"
    error = capsys.readouterr().err
    assert error == f"error: 'trian' is not a command (did you mean train?): use one of {known}\n"


def test_command_help_comes_from_its_module(capsys):
    of = {"train": "--workdir", "sweep": "--grid", "sample": "--prompt", "see": "--checkpoints", "export": "--to"}
    of |= {"plan": "--topology", "study": "heads", "bench": "attention"}
    for command, usage in of.items():
        assert main(["attnlab", command, "--help"]) == 0
        assert usage in capsys.readouterr().out


def test_arguments_reach_the_command_in_a_subprocess(tmp_path):
    command = [sys.executable, "-m", "attnlab", "train", "--config=quickstart", "--config.steps=0"]
    run = functools.partial(subprocess.run, capture_output=True, text=True, cwd=tmp_path)
    done = run(command)
    assert (done.returncode, done.stdout) == (2, "importing JAX\n")
    assert done.stderr == "error: config.steps = 0: expected 1 or more, below 2^31\n"
    assert not list(tmp_path.iterdir())
    closed = run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command])
    assert (closed.returncode, closed.stdout, closed.stderr) == (2, "", "")
    command[-1] = "--config.parallel.mesh.data=1"
    done = run([*command, f"--workdir={tmp_path}/run"], env=os.environ | {"JAX_PLATFORMS": "nosuch"})
    assert done.returncode == 2 and re.match("error: JAX finds no .* 'nosuch'.*\n$", done.stderr), done.stderr


@pytest.mark.parametrize("command", [[], ["train"], ["bench"], ["study"]], ids=str)
def test_help_needs_no_docstrings(command):
    done = subprocess.run([sys.executable, "-OO", "-m", "attnlab", *command, "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout
