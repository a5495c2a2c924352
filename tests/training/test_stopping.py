"""What a signal does: it is noted, or ends the process wherever its state is at rest."""

import signal
import subprocess
import sys
import time

import pytest

from attnlab.training.stopping import Stop


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_noted_and_handlers_are_put_back(number):
    before = signal.getsignal(number)
    with Stop() as stop:
        assert not stop.asked()
        signal.raise_signal(number)
        deadline = time.monotonic() + 10
        while not stop.asked() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert stop.asked() and stop.signal == number
    assert signal.getsignal(number) is before


def process(body):
    """Exit code, stdout and stderr of a program that gets SIGTERM where `body` says so."""
    program = f"""
import signal, time
from attnlab.training.stopping import Stop

def get(seconds=30):
    signal.raise_signal(signal.SIGTERM)
    time.sleep(seconds)

def fails():
    raise RuntimeError("the disk is full")

def takes_long():
    print("began", flush=True)
    time.sleep(30)

with Stop(own_process=True) as stop:
{body}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "body, expected",
    [
        ("    with stop.at_rest(lambda: print('saved')): get()", (143, "saved\n", "")),
        (
            "    with stop.at_rest(lambda: print('outer')):\n        with stop.at_rest(lambda: print('inner')): get()",
            (143, "inner\n", ""),
        ),
        (
            "    with stop.at_rest(lambda: print('outer')):\n"
            "        with stop.at_rest(lambda: print('inner')): pass\n"
            "        get()",
            (143, "outer\n", ""),
        ),
        ("    get(0.5)\n    print(stop.asked())", (0, "True\n", "")),
        ("    get(0.5)\n    with stop.at_rest(lambda: print('later')): time.sleep(30)", (143, "later\n", "")),
        ("    with stop.at_rest(fails): get()", (2, "", "error: the disk is full\n")),
        ("    with stop.at_rest(takes_long):\n        get(0.5)\n        get()", (143, "began\n", "")),
    ],
    ids=["at rest", "the innermost", "the outer one again", "not at rest", "at rest later", "failing", "twice"],
)
def test_where_the_state_is_at_rest_a_signal_ends_the_process(body, expected):
    assert process(body) == expected
