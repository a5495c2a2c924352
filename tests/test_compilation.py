import os
import subprocess
import sys
import zlib

import pytest

from attnlab import compilation

PROGRAM = """
from attnlab import compilation
folder = compilation.keep_programs()
import jax, jax.numpy as jnp
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if "cache_hits" in event else None)
print(jax.jit(lambda x: jnp.sin(x) @ x)(jnp.eye(8)).sum(), len(hits), folder)
"""


def run(**environment):
    """What a process of its own prints, that compiles a program or finds it: (result, programs found, folder)."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={name: value for name, value in os.environ.items() if not name.startswith("JAX_")} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    result, hits, folder = done.stdout.split()
    return result, int(hits), folder


def test_the_next_start_finds_what_this_one_compiled_and_a_torn_entry_is_made_again(tmp_path):
    environment = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    result, hits, folder = run(**environment)
    assert (hits, folder) == (0, str(tmp_path))
    entries = list(tmp_path.glob("*-cache"))
    assert entries
    assert run(**environment)[:2] == (result, len(entries))
    whole = {entry: entry.read_bytes() for entry in entries}
    entries[0].write_bytes(whole[entries[0]][:-20])  # as a kill leaves it
    assert run(**environment)[:2] == (result, len(entries) - 1)
    assert all(len(entry.read_bytes()) >= len(content) - 20 for entry, content in whole.items())
    assert run(**environment)[:2] == (result, len(entries))


def test_the_folder_is_the_users_and_nothing_is_kept_on_demand(tmp_path):
    folder = run(XDG_CACHE_HOME=str(tmp_path))[2]
    assert folder.startswith(f"{tmp_path}/attnlab/programs-")
    assert run(XDG_CACHE_HOME=str(tmp_path), JAX_ENABLE_COMPILATION_CACHE="false")[2] == "None"
    (tmp_path / "file").touch()
    assert run(XDG_CACHE_HOME=str(tmp_path / "file"))[2] == "None"  # a folder that cannot be made


@pytest.mark.parametrize("content", [b"", b"no compressed bytes", b"\x78\x9c"], ids=["empty", "other", "cut"])
def test_a_sweep_deletes_what_is_torn_once_and_leaves_other_files(content, tmp_path):
    (tmp_path / "a-cache").write_bytes(content)
    (tmp_path / "notes.txt").write_text("mine")
    assert compilation.sweep(tmp_path) == [tmp_path / "a-cache"]
    assert compilation.sweep(tmp_path) == []
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_without_a_home_nothing_is_kept():
    program = "import os; from attnlab import compilation; os.setuid(54321); print(compilation.keep_programs())"
    if os.getuid() != 0:
        pytest.skip("only root can become a user without a home")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XDG_", "HOME"))}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "None\n", done.stderr


def test_past_its_limit_the_oldest_entries_go(tmp_path):
    for age, name in enumerate(["new", "old", "oldest"]):
        path = tmp_path / f"{name}-cache"
        path.write_bytes(zlib.compress(os.urandom(1000)))
        os.utime(path, (1e9 - age, 1e9 - age))
    assert compilation.sweep(tmp_path, limit=2100) == []
    assert sorted(path.name for path in tmp_path.glob("*-cache")) == ["new-cache", "old-cache"]
