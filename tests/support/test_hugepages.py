"""Programs that restart themselves with huge pages, once, as the same process with the same arguments."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnlab.support import hugepages

# Only the module, because `import attnlab` takes seconds.
PROGRAM = f"""
import os, sys
sys.path.append({str(Path(hugepages.__file__).parent)!r})
if __name__ == "__main__":
    import hugepages
    hugepages.restart("program")
print(os.getpid(), os.environ["GLIBC_TUNABLES"], sys.argv[1:])
"""


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, "glibc.malloc.hugetlb=1"),
        ({"GLIBC_TUNABLES": "glibc.malloc.check=0"}, "glibc.malloc.check=0:glibc.malloc.hugetlb=1"),
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, "glibc.malloc.hugetlb=0"),
    ],
    ids=str,
)
def test_environment_keeps_given_tunables(given, expected):
    assert hugepages.environment(given | {"HOME": "/"}) == {"HOME": "/", "GLIBC_TUNABLES": expected}


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is Linux's")
@pytest.mark.parametrize("start", [["-m", "program"], ["bin/program"]], ids=["module", "script"])
def test_restart_keeps_process_and_arguments(start, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "program").write_text(PROGRAM)
    command = [sys.executable, *start, "--a", "b c"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    out, _ = running.communicate(timeout=60)
    assert running.returncode == 0
    assert out.split(maxsplit=1) == [str(running.pid), "glibc.malloc.hugetlb=1 ['--a', 'b c']\n"]


@pytest.mark.parametrize(
    "more, variables",
    [([], {}), (["-m", "attnlab.train"], {"ATTNLAB_RESTARTED": "1"})],
    ids=["another program", "restarted without effect"],
)
def test_restart_elsewhere_does_nothing(more, variables):
    program = f"""
import os, sys
sys.path.append({str(Path(hugepages.__file__).parent)!r})
print("once", flush=True)
import hugepages
hugepages.restart("attnlab.train")
print("GLIBC_TUNABLES" in os.environ)
"""
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"} | variables
    command = [sys.executable, "-c", program, *more]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "once\nFalse\n"
