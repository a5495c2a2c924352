"""Signals end a run that has nothing to save yet. Later, the first signal is recorded and the second ends the run."""

import signal
import subprocess
import sys

import pytest

from attnlab.training.preemption import PreemptionHandler


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_is_recorded_and_handlers_are_restored(number):
    before = signal.getsignal(number)
    with PreemptionHandler() as preemption:
        preemption.handle()
        assert not preemption.requested()
        signal.raise_signal(number)
        assert preemption.requested() and preemption.signal == number and preemption.exit_code == 128 + number
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_interrupt_before_the_first_step_of_a_notebook_is_an_exception():
    with pytest.raises(KeyboardInterrupt), PreemptionHandler():
        signal.raise_signal(signal.SIGINT)


PROGRAM = """
import signal, sys
from attnlab.training.preemption import PreemptionHandler
number, body = int(sys.argv[1]), sys.argv[2]
with PreemptionHandler(own_process=True) as preemption:
    if body != "before":
        preemption.handle()
    signal.raise_signal(number)
    print(preemption.requested(), flush=True)
    if body == "twice":
        signal.raise_signal(number)
    print("saved")
"""


@pytest.mark.parametrize("number, body, out", [(signal.SIGTERM, "before", ""), (signal.SIGINT, "twice", "True\n")])
def test_signal_ends_process_before_first_step_or_when_repeated(number, body, out):
    command = [sys.executable, "-c", PROGRAM, str(int(number)), body]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (-number, out, "")
