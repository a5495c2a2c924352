"""Provenance of measurements, for the pages and tables that show them: machine, versions, sources."""

import contextlib
import hashlib
import os
import platform
from importlib import metadata
from pathlib import Path

import jax

PACKAGE = Path(__file__).parents[1]
PACKAGES = ("attnlab", "jax", "flax", "optax", "numpy")


def machine() -> str:
    """The type and number of devices, as in "2 cores of AMD EPYC 9R14"; starts JAX."""
    devices = jax.devices()
    if devices[0].platform != "cpu":
        return f"{len(devices)} × {devices[0].device_kind}"
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return f"{cores()} cores of {name}"


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that can change results."""
    return {name: metadata.version(name) for name in PACKAGES} | {"python": platform.python_version()}


def sources(digits: int = 8) -> str:
    """The first `digits` of the 64 hex digits of a sha256 over attnlab's Python files."""
    digest = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:digits]
