import os
import platform
import subprocess
import sys

import pytest

from attnlab import compilation
from tests.programs import JAXLIB

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
    """Run a program in a subprocess; returns the words of each line that it prints."""
    environment = {name: x for name, x in os.environ.items() if not name.startswith("JAX_")} | environment
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert all("Error reading persistent compilation cache entry" in line for line in done.stderr.splitlines()[::2])
    return [line.split() for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_second_start_uses_cache_and_recompiles_truncated_entries(tmp_path):
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


def test_oldest_entries_beyond_the_limit_are_deleted(tmp_path):
    for age, name in enumerate(("new-cache", "old-cache", "oldest-cache", "notes.txt")):
        (tmp_path / name).write_bytes(bytes(1000))
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    compilation.delete_oldest(tmp_path, limit=2100)
    assert {path.name for path in tmp_path.iterdir()} == {"new-cache", "old-cache", "notes.txt"}


FAULT = """
import os, sys
import jax, jax.numpy as jnp, numpy as np
from attnlab import compilation
from attnlab.config import RunConfig
from attnlab.data.batches import Batch
from attnlab.training.program import TrainProgram

if "command" in sys.argv:
    compilation.keep_programs()
ROWS = np.random.default_rng(0).standard_normal((32_769, 3)).astype(np.float32)
EXACT = (ROWS.astype(np.float64) ** 2).sum(1)

def norms(rows):
    return jax.vmap(lambda row: ((jnp.eye(3) @ row) ** 2).sum())(rows)

class Model(flax.linen.Module):  # whose loss is log 2 where the largest error of the norms is 0
    @flax.linen.compact
    def __call__(self, tokens, deterministic=True, dropout_key=None):
        table = self.param("table", lambda key: jnp.asarray(ROWS))
        error = abs(norms(table) - (table**2).sum(-1)).max()
        return 100 * error * jnp.stack([jnp.zeros(tokens.shape), jnp.ones(tokens.shape)], axis=-1)

config = RunConfig.of({"model.context": 8, "batch_size": 1, "parallel.mesh.data": 1})
experiment = TrainProgram(config, 2, model=Model())
batch = Batch(np.zeros((1, 9), np.int32), np.zeros(1, np.int32), np.ones(1, np.float32))
loss = experiment.eval_step()(experiment.create_state().params, experiment.parallel.place_batch(batch))[0] / 8
print(abs(jax.jit(norms)(ROWS) - EXACT).max() < 1e-3, abs(loss - np.log(2)) < 1e-3)
"""


@pytest.mark.slow
def test_faulty_sum_fusion_is_off_in_commands_and_user_models():
    plain, command = (run(*words, program="import flax.linen\n" + FAULT, XLA_FLAGS="") for words in ([], ["command"]))
    assert plain == [[str(JAXLIB != (0, 10, 2)), "True"]] and command == [["True", "True"]]


def test_flag_for_faulty_jaxlib_keeps_the_users_flags(monkeypatch):
    monkeypatch.setattr(compilation, "FAULTY", ("0.10.2",))

    def flags(version, before):
        monkeypatch.setattr(compilation, "version", lambda _: version)
        monkeypatch.setenv("XLA_FLAGS", before)
        compilation.fuse_no_sums()
        return os.environ["XLA_FLAGS"]

    arg = "--xla_cpu_experimental_ynn_fusion_type="
    assert [flags("0.10.2", before) for before in ("", "--a=b", arg)] == [arg + "-reduce", f"--a=b {arg}-reduce", arg]
    assert flags("0.12.0.1", "") == "" and compilation.compiler_options("cpu", fuses_sums=True) is None


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
    """(A folder, the output of the two programs above with it), run one after the other in one process."""
    folder = tmp_path_factory.mktemp("cache")
    (folder / "file").touch()
    return folder, run(str(folder), program=FOLDERS + FREED)


def test_cache_folder_is_per_user_and_may_be_missing_or_disabled(printed):
    *disabled, (folder,) = printed[1][:-2]
    assert disabled == [["None"]] * (3 if os.getuid() == 0 else 2)
    assert folder.startswith(f"{printed[0]}/attnlab/programs-")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries return memory by themselves")
def test_memory_freed_by_a_long_compilation_is_returned(printed):
    (kept,), (released,) = printed[1][-2:]
    assert int(released) > 100 > 10 > int(kept)
