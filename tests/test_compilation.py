import os
import platform
import subprocess
import sys

import pytest

from attnlab import compilation

PROGRAM = """
import os, sys
from pathlib import Path
from attnlab import compilation
folder = compilation.keep_programs()
import jax, jax.numpy as jnp
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if "cache_hits" in event else None)

def start():
    hits.clear()
    jax.clear_caches()  # those in memory
    print(jax.jit(lambda x: jnp.sin(x) @ x)(jnp.eye(8)).sum(), len(hits), folder)

start()
if "truncate" in sys.argv:
    for entry in Path(folder).glob("*-cache"):
        entry.write_bytes(entry.read_bytes()[:-20])  # as a kill may leave it
"""


def run(*arguments, program=PROGRAM, **environment):
    """The words that a program prints in a process of its own, line by line."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={name: value for name, value in os.environ.items() if not name.startswith("JAX_")} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert all("Error reading persistent compilation cache entry" in line for line in done.stderr.splitlines()[::2])
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_second_start_uses_cache_and_truncated_entries_are_compiled_again(tmp_path):
    environment = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    ((result, hits, folder),) = run(**environment)
    count = len(list(tmp_path.glob("*-cache")))
    assert (hits, folder) == ("0", str(tmp_path)) and count
    assert run("truncate", **environment) == [[result, str(count), folder]]
    assert run(**environment)[0][0] == result


FOLDERS = """
import os, sys
import jax
from attnlab import compilation
if os.getuid() == 0:  # only root can become a user without a home
    os.environ.pop("XDG_CACHE_HOME", None)
    os.environ.pop("HOME", None)
    os.setresuid(54321, 54321, 0)
    print(compilation.keep_programs())
    os.setresuid(0, 0, 0)
os.environ["XDG_CACHE_HOME"] = sys.argv[1] + "/file"  # a folder that cannot be created
print(compilation.keep_programs())
os.environ["XDG_CACHE_HOME"] = sys.argv[1]
jax.config.update("jax_enable_compilation_cache", False)  # as JAX_ENABLE_COMPILATION_CACHE=false does
print(compilation.keep_programs())
jax.config.update("jax_enable_compilation_cache", True)
print(compilation.keep_programs())
"""


def test_entries_beyond_the_limit_are_deleted_from_the_oldest(tmp_path):
    for age, name in enumerate(("new-cache", "old-cache", "oldest-cache", "notes.txt")):
        (tmp_path / name).write_bytes(bytes(1000))
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    compilation.delete_oldest(tmp_path, limit=2100)
    assert {path.name for path in tmp_path.iterdir()} == {"new-cache", "old-cache", "notes.txt"}


@pytest.mark.parametrize(
    ("version", "flags", "is_told"),
    [("0.10.2", "", True), ("0.10.2", "--xla_cpu_experimental_ynn_fusion_type=", False), ("0.12.0.1", "", False)],
)
def test_jaxlib_that_errs_is_told_of_in_one_line_unless_a_flag_prevents_it(version, flags, is_told, monkeypatch):
    monkeypatch.setattr(compilation, "version", lambda _: version)
    monkeypatch.setenv("XLA_FLAGS", flags)
    line = compilation.miscompilation()
    assert bool(line) == is_told and line.startswith("jaxlib 0.10.2 sums" * is_told) and "\n" not in line


FREED = """
import pathlib
import numpy as np

def resident():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

compilation.release_memory()
for seconds in (0.01, 1.0):
    kept = [np.ones(2**13) for _ in range(2**11)]  # 64 KiB each, of one heap
    del kept[: len(kept) - 1]  # the last keeps the heap from shrinking
    before = resident()
    jax.monitoring.record_event_duration_secs(compilation.COMPILED, seconds)
    print(before - resident())
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """(A folder, what the two programs above print with it, one after the other in one process)."""
    folder = tmp_path_factory.mktemp("cache")
    (folder / "file").touch()
    return folder, run(str(folder), program=FOLDERS + FREED)


def test_cache_folder_is_the_users_and_may_be_missing_or_disabled(printed):
    *disabled, (folder,) = printed[1][:-2]
    assert disabled == [["None"]] * (3 if os.getuid() == 0 else 2)
    assert folder.startswith(f"{printed[0]}/attnlab/programs-")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries return memory by themselves")
def test_memory_freed_by_a_long_compilation_is_returned(printed):
    (kept,), (released,) = printed[1][-2:]
    assert int(released) > 100 > 10 > int(kept)
