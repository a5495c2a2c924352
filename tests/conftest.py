"""Tests run on four virtual CPU devices, with their own dataset folder."""

import atexit
import gc
import os
import shutil
import signal
import tempfile
from pathlib import Path

from tests.programs import FAST, Programs

# TFDS reads this when it is imported; subprocesses inherit it.
os.environ["TFDS_DATA_DIR"] = tempfile.mkdtemp(prefix="attnlab-tests-")
atexit.register(shutil.rmtree, os.environ["TFDS_DATA_DIR"], ignore_errors=True)
os.environ["XDG_CACHE_HOME"] = os.environ["TFDS_DATA_DIR"] + "/cache"  # for token stores
# Subprocesses of the tests set their own flags. XLA_FLAGS can turn optimizations on, as it does for the campaigns.
flags = ["--xla_force_host_platform_device_count=4"]
if "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", ""):
    flags += [f"--{name}={str(value).lower()}" for name, value in FAST.items()]
os.environ["XLA_FLAGS"] = " ".join([*flags, os.environ.get("XLA_FLAGS", "")])
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jaxtyping
import pytest
from absl import logging
from hypothesis import settings

import attnlab.support.shipped  # noqa: F401  the packages attnlab._studies and attnlab._benchmarks
from tests.seconds import SecondsByFile
from tests.texts import TEXT

# Background jobs of a shell ignore SIGINT, and the processes that they start would ignore it too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# JAX keeps many objects alive, and collecting garbage visits them all.
gc.set_threshold(50_000, 20, 50)

PROGRAMS = Programs(Path(os.environ.get("ATTNLAB_TEST_PROGRAMS", Path(__file__).parents[1] / ".cache" / "programs")))
jax.config.update("jax_compilation_cache_dir", str(PROGRAMS.own))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_persistent_cache_enable_xla_caches", "none")  # their folder would become part of the cache keys
# A killed process may leave a truncated entry, so subprocesses share another folder.
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ["TFDS_DATA_DIR"] + "/programs"

collect_ignore = ["downstream"]  # a user's project: `test_wheel.py` runs its tests against an installed attnlab

logging.set_verbosity(logging.ERROR)
settings.register_profile("attnlab", deadline=None, derandomize=True, max_examples=30)
settings.register_profile("few", settings.get_profile("attnlab"), max_examples=8)  # --hypothesis-profile=few
settings.load_profile("attnlab")


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # not in a worker of pytest-xdist
        config.pluginmanager.register(SecondsByFile(config))


@pytest.fixture(autouse=True, scope="session")
def same_precision_and_flags_on_every_machine():
    """`config.precision = "auto"` means float32 in this process; subprocesses get it as an option.

    No command may change XLA_FLAGS here, because they are part of the names of cached programs.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attnlab.training.precision._cpu_flags", set)
        patch.setattr("attnlab.compilation.FAULTY", ())
        yield


@pytest.fixture(autouse=True, scope="module")
def room_for_programs():
    """Drops compiled programs before a worker reaches Linux's limit of 65,530 memory maps, which would kill it."""
    PROGRAMS.exchange()
    yield
    PROGRAMS.exchange()
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_text().count("\n") > 25_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="module")
def shared_programs():
    """Traces identical runs of this process once; tests with subprocesses cover what a new process does."""
    from attnlab.nn import versions
    from tests.runs import sharing  # not above: it imports the whole trainer

    with sharing(), versions.taken_once():
        yield


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A file with a short text."""
    path = tmp_path_factory.mktemp("texts") / "quijote.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def float64():
    """Enables double precision, for reference values."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def registry(monkeypatch):
    """Gives each test its own registry of layers."""
    from tests.nn.user_parts import KINDS, custom, forget

    monkeypatch.setattr(custom, "_SOURCES", {})
    before = dict(KINDS)
    forget()
    yield
    KINDS.clear()
    KINDS.update(before)


@pytest.fixture
def mistake(capsys):
    """Calls a command's `main`, which must end with exit code 2 and one line on stderr; returns that line."""

    def run(main, *arguments):
        capsys.readouterr()
        assert main(["attnlab", *map(str, arguments)]) == 2
        out, err = capsys.readouterr()
        assert err.startswith("error: ") and err.count("\n") == 1 and "Traceback" not in out + err
        return err

    return run


@pytest.fixture
def own_errors():
    """Turns jaxtyping's checks off, so that bad arguments reach attnlab's own error messages."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
