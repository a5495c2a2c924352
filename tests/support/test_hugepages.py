import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnlab.support import hugepages

# The module alone, for `import attnlab` takes seconds.
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


@pytest.mark.parametrize("where", ["another program", "restarted without effect"])
def test_restart_elsewhere_does_nothing(where):
    program = f"""
import os, sys
sys.path.append({str(Path(hugepages.__file__).parent)!r})
print("once", flush=True)
import hugepages
hugepages.restart("attnlab.train")
print("GLIBC_TUNABLES" in os.environ)
"""
    command, environment = [sys.executable, "-c", program], dict(os.environ)
    environment.pop("GLIBC_TUNABLES", None)
    if where != "another program":
        command, environment = [*command, "-m", "attnlab.train"], environment | {"ATTNLAB_RESTARTED": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "once\nFalse\n"
