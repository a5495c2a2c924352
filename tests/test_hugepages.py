import subprocess
import sys

import pytest

from attnlab import hugepages

PROGRAM = """
import os, sys
if __name__ == "__main__":
    from attnlab import hugepages
    hugepages.restart()
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
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    running = subprocess.Popen([sys.executable, path, "--a", "b c"], stdout=subprocess.PIPE, text=True)
    out, _ = running.communicate(timeout=60)
    assert running.returncode == 0
    assert out.split(maxsplit=1) == [str(running.pid), "glibc.malloc.hugetlb=1 ['--a', 'b c']\n"]
