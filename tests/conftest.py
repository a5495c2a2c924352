"""Tests run on four virtual CPU devices, with their own dataset folder."""

import atexit
import gc
import os
import shutil
import tempfile
from pathlib import Path

# TFDS reads this when it is imported; subprocesses inherit it.
os.environ["TFDS_DATA_DIR"] = tempfile.mkdtemp(prefix="attnlab-tests-")
atexit.register(shutil.rmtree, os.environ["TFDS_DATA_DIR"], ignore_errors=True)
os.environ["XDG_CACHE_HOME"] = os.environ["TFDS_DATA_DIR"] + "/cache"  # for token stores
# Most of the time goes into compiling small programs, a quarter of that into optimizing them, so optimization is off.
# XLA_FLAGS can turn it on, as for the slow tests; processes that tests start set their own flags.
flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0 "
os.environ["XLA_FLAGS"] = flags + os.environ.get("XLA_FLAGS", "")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jaxtyping
import pytest
from absl import logging
from hypothesis import settings

from tests.texts import TEXT

# Many tests compile the same small programs, so each worker caches them. Processes that tests start share another
# cache, since a killed process may leave a truncated entry.
jax.config.update("jax_compilation_cache_dir", os.environ["TFDS_DATA_DIR"] + "/programs-of-this-process")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ["TFDS_DATA_DIR"] + "/programs"

collect_ignore = ["downstream"]  # a user's project: `test_wheel.py` runs its tests against an installed attnlab

logging.set_verbosity(logging.ERROR)
settings.register_profile("attnlab", deadline=None, derandomize=True, max_examples=30)
settings.register_profile("few", settings.get_profile("attnlab"), max_examples=8)  # --hypothesis-profile=few
settings.load_profile("attnlab")


@pytest.fixture(autouse=True, scope="session")
def same_precision_on_every_machine():
    """`config.precision = "auto"` is float32 in this process; processes that tests start are told so by an option."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attnlab.training.precision._cpu_flags", set)
        yield


@pytest.fixture(autouse=True, scope="module")
def room_for_programs():
    """Drops compiled programs before a worker reaches Linux's limit of memory maps, 65,530, which would end it."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_text().count("\n") > 25_000:
        jax.clear_caches()
        gc.collect()


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
def own_errors():
    """Turns jaxtyping's checks off, so that bad arguments reach attnlab's own error messages."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
