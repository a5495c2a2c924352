import os
import subprocess
import sys
import zlib

import pytest

from attnlab import compilation

PROGRAM = """
import sys
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
    entry = min(Path(folder).glob("*-cache"))
    entry.write_bytes(entry.read_bytes()[:-20])  # as a kill leaves it
    compilation.keep_programs()
    start()
    start()
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
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def test_second_start_uses_cache_and_rebuilds_truncated_entries(tmp_path):
    environment = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    ((result, hits, folder),) = run(**environment)
    assert (hits, folder) == ("0", str(tmp_path))
    count = len(list(tmp_path.glob("*-cache")))
    assert count
    starts = [[result, str(hits), folder] for hits in (count, count - 1, count)]
    assert run("truncate", **environment) == starts
    assert len(list(tmp_path.glob("*-cache"))) == count


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


def test_cache_folder_is_the_users_and_may_be_missing_or_disabled(tmp_path):
    (tmp_path / "file").touch()
    *disabled, (folder,) = run(str(tmp_path), program=FOLDERS)
    assert disabled == [["None"]] * (3 if os.getuid() == 0 else 2)
    assert folder.startswith(f"{tmp_path}/attnlab/programs-")


@pytest.mark.parametrize("content", [b"", b"no compressed bytes", b"\x78\x9c"], ids=["empty", "other", "cut"])
def test_sweep_deletes_truncated_entries_only(content, tmp_path):
    (tmp_path / "a-cache").write_bytes(content)
    (tmp_path / "notes.txt").write_text("mine")
    assert compilation.sweep(tmp_path) == [tmp_path / "a-cache"]
    assert compilation.sweep(tmp_path) == []
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_sweep_beyond_the_limit_deletes_the_oldest(tmp_path):
    for age, name in enumerate(["new", "old", "oldest"]):
        path = tmp_path / f"{name}-cache"
        path.write_bytes(zlib.compress(os.urandom(1000)))
        os.utime(path, (1e9 - age, 1e9 - age))
    assert compilation.sweep(tmp_path, limit=2100) == []
    assert sorted(path.name for path in tmp_path.glob("*-cache")) == ["new-cache", "old-cache"]


@pytest.mark.parametrize(
    ("version", "flags", "is_told"),
    [("0.10.2", "", True), ("0.10.2", "--xla_cpu_experimental_ynn_fusion_type=", False), ("0.12.0.1", "", False)],
)
def test_jaxlib_that_errs_is_told_of_in_one_line_unless_a_flag_prevents_it(version, flags, is_told, monkeypatch):
    monkeypatch.setattr(compilation, "version", lambda _: version)
    monkeypatch.setenv("XLA_FLAGS", flags)
    line = compilation.miscompilation()
    assert bool(line) == is_told and line.startswith("jaxlib 0.10.2 sums" * is_told) and "\n" not in line
