"""The time until a process prints something."""

import os
import sys

import pytest

from attnlab._benchmarks import start
from attnlab.support.errors import UserError


def python(program):
    return [sys.executable, "-c", program]


def test_seconds_until_ends_the_process_on_a_match(tmp_path):
    pid = tmp_path / "pid"
    program = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid()))"
    command = python(program + "; print('wait'); print(os.environ['WORD'], end=''); time.sleep(600)")
    assert 0 < start.seconds_until(rb"(?m)^now", command, tmp_path, {"WORD": "now"}) < 60
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_seconds_until_reports_a_process_that_ends_early(tmp_path):
    with pytest.raises(UserError, match="ended: ValueError: no"):
        start.seconds_until(rb"never", python("print('first'); raise ValueError('no')"), tmp_path)
