"""Every test sees four virtual CPU devices, its own dataset folder, and no network worth waiting for."""

import atexit
import os
import shutil
import tempfile

# TFDS reads this when it is imported; subprocesses inherit it.
os.environ["TFDS_DATA_DIR"] = tempfile.mkdtemp(prefix="attnlab-tests-")
atexit.register(shutil.rmtree, os.environ["TFDS_DATA_DIR"], ignore_errors=True)
# Most of the time goes into compiling small programs, a quarter of it into making them fast: not here, but where
# XLA_FLAGS says otherwise, as for the slow tests, and in the processes that tests start.
flags = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0 "
os.environ["XLA_FLAGS"] = flags + os.environ.get("XLA_FLAGS", "")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jaxtyping
import pytest
from absl import logging
from hypothesis import settings

# For the processes that tests start; this one has read its environment.
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ["TFDS_DATA_DIR"] + "/programs"

collect_ignore = ["downstream"]  # somebody else's project: `test_wheel.py` runs its tests, where attnlab is installed

logging.set_verbosity(logging.ERROR)
settings.register_profile("attnlab", deadline=None, derandomize=True, max_examples=30)
settings.load_profile("attnlab")


@pytest.fixture
def float64():
    """Double precision, for references."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def own_errors():
    """Lets bad arguments through to attnlab's own messages: elsewhere in the tests, annotations are checked first."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
