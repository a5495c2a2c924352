"""Signals are recorded, or end the process while its state is not changing."""

import signal
import subprocess
import sys
import time

import pytest

from attnlab.training.preemption import PreemptionHandler


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_is_recorded_and_handlers_are_restored(number):
    before = signal.getsignal(number)
    with PreemptionHandler() as preemption:
        assert not preemption.requested()
        signal.raise_signal(number)
        deadline = time.monotonic() + 10
        while not preemption.requested() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert preemption.requested() and preemption.signal == number
    assert signal.getsignal(number) is before


def process(body):
    """Exit code, stdout and stderr of a program that raises SIGTERM where `body` calls `get`."""
    program = f"""
import signal, time
from attnlab.training.preemption import PreemptionHandler

def get(seconds=30):
    signal.raise_signal(signal.SIGTERM)
    time.sleep(seconds)

def fails():
    raise RuntimeError("the disk is full")

def takes_long():
    print("began", flush=True)
    time.sleep(300)  # longer than the test waits

with PreemptionHandler(own_process=True) as preemption:
{body}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "body, expected",
    [
        ("    with preemption.at_rest(lambda: print('saved')): get()", (143, "saved\n", "")),
        (
            "    with preemption.at_rest(lambda: print('outer')):\n"
            "        with preemption.at_rest(lambda: print('inner')): get()",
            (143, "inner\n", ""),
        ),
        (
            "    with preemption.at_rest(lambda: print('outer')):\n"
            "        with preemption.at_rest(lambda: print('inner')): pass\n"
            "        get()",
            (143, "outer\n", ""),
        ),
        ("    get(0.5)\n    print(preemption.requested())", (0, "True\n", "")),
        ("    get(0.5)\n    with preemption.at_rest(lambda: print('later')): time.sleep(30)", (143, "later\n", "")),
        ("    with preemption.at_rest(fails): get()", (2, "", "error: the disk is full\n")),
        ("    with preemption.at_rest(takes_long):\n        get(0.5)\n        get()", (143, "began\n", "")),
    ],
    ids=["at rest", "nested", "after nested", "not at rest", "at rest later", "failing save", "twice"],
)
def test_signal_at_rest_saves_and_exits(body, expected):
    assert process(body) == expected
