"""Processes side by side: how many at a time, how they end, and that none is left behind."""

import gc
import os
import signal
import subprocess
import sys
import time

import pytest

from attnlab.support import workers

MODULE = """
import os, signal, sys, time
from attnlab.support.workers import tell

name = sys.argv[1]
print("jaxlib 0.0 sums wrongly\\nmine.py:1: RuntimeWarning: overflow")
print(name, "runs", flush=True)
if name == "fails":
    sys.exit("error: no room")
if name == "works":
    print("attnlab has ended: half")  # of somebody else
    tell("half")
    tell("rest", "why")
if name == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
if name == "waits":
    time.sleep(600)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module that works, fails, dies or waits, as its argument says."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "behaves.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/modules:{os.environ.get('PYTHONPATH', '')}")
    return "behaves"


def test_processes_end_with_their_last_line_as_error(tmp_path, module, capsys):
    started, logs = [], tmp_path / "logs"
    with (tmp_path / "lock").open("w") as lock:
        modules = {name: [module, name] for name in ("works", "fails", "dies")}
        ended = list(workers.run(modules, 2, logs, lock.fileno(), started.append))
    whole = {("works", "", ""), ("fails", "no room", ""), ("dies", "killed by signal 9: dies runs", "")}
    assert {tuple(each) for each in ended} == whole | {("works", "", "half"), ("works", "why", "rest")}
    assert [each.part for each in ended if each.name == "works"] == ["half", "rest", ""]
    assert started == ["works", "fails", "dies"] and (logs / "works.txt").read_text().endswith(
        '\nattnlab has ended: ["rest", "why"]\n'
    )
    assert capsys.readouterr().err == "jaxlib 0.0 sums wrongly\nmine.py:1: RuntimeWarning: overflow\n"


def test_signal_stops_the_processes(tmp_path, module):
    def started(name):
        while not (tmp_path / "logs" / "waits.txt").read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(workers.Interrupted), workers.interruptible(), (tmp_path / "lock").open("w") as lock:
        list(workers.run({"waits": [module, "waits"]}, 1, tmp_path / "logs", lock.fileno(), started))
    assert not subprocess.run(["pgrep", "-x", "-f", f".*{module} waits"], capture_output=True).stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_during_garbage_collection_still_interrupts(number):
    """Python ignores an exception in a callback of its collector, and JAX has such a callback."""

    def callback(*_):
        gc.callbacks.remove(callback)
        signal.raise_signal(number)

    gc.callbacks.append(callback)
    with pytest.raises(workers.Interrupted) as raised, workers.interruptible():
        gc.collect()
        time.sleep(20)
    assert raised.value.args == (number,)


def test_hook_set_while_interruptible_is_kept(monkeypatch):
    """Checkpoints set such a hook, which silences reads that fail after the first failure."""
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    with workers.interruptible():
        sys.unraisablehook = hook = lambda lost: None
    assert sys.unraisablehook is hook


def test_process_ends_when_its_parent_is_killed(tmp_path, module):
    program = f"""
from pathlib import Path
from attnlab.support import workers
with open("{tmp_path}/lock", "w") as lock:
    list(workers.run({{"waits": ["{module}", "waits"]}}, 1, Path("{tmp_path}/logs"), lock.fileno()))
"""
    log = tmp_path / "logs" / "waits.txt"
    with subprocess.Popen([sys.executable, "-c", program]) as parent:
        while not (log.exists() and log.read_text()):
            time.sleep(0.05)
        (child,) = subprocess.run(["pgrep", "-P", str(parent.pid)], capture_output=True, text=True).stdout.split()
        parent.kill()
    deadline = time.monotonic() + 20
    while subprocess.run(["pgrep", "-x", "-f", f".*{module} waits"], capture_output=True, text=True).stdout:
        assert time.monotonic() < deadline, child
        time.sleep(0.1)
