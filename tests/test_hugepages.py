import os
import subprocess
import sys

import pytest

from attnlab import hugepages

PROGRAM = """
import os, sys
if __name__ == "__main__":
    from attnlab import hugepages
    hugepages.restart(sys.orig_argv[sys.orig_argv.index("-m") + 1])
print(os.getpid(), os.environ["GLIBC_TUNABLES"], sys.argv[1:])
"""


@pytest.mark.parametrize(
    "given, wished",
    [
        ({}, "glibc.malloc.hugetlb=1"),
        ({"GLIBC_TUNABLES": "glibc.malloc.check=0"}, "glibc.malloc.check=0:glibc.malloc.hugetlb=1"),
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, "glibc.malloc.hugetlb=0"),
    ],
    ids=str,
)
def test_what_the_user_wished_stays(given, wished):
    assert hugepages.environment(given | {"HOME": "/"}) == {"HOME": "/", "GLIBC_TUNABLES": wished}


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is Linux's")
def test_a_program_restarts_once_as_the_same_process_with_its_arguments(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "program", "--a", "b c"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    out, _ = running.communicate(timeout=60)
    assert running.returncode == 0
    assert out.split(maxsplit=1) == [str(running.pid), "glibc.malloc.hugetlb=1 ['--a', 'b c']\n"]


@pytest.mark.parametrize("where", ["another program", "a wish that does not come through"])
def test_elsewhere_it_does_not_restart(where):
    environment = {"ATTNLAB_RESTARTED": "1"} if where != "another program" else {}
    program = """
import os, runpy, sys
print("once", flush=True)
from attnlab import hugepages
hugepages.restart("attnlab.train")
print("GLIBC_TUNABLES" in os.environ)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, *(["-m", "attnlab.train"] if environment else [])],
        env={k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "once\nFalse\n"
