"""On what figures were measured, for a page or a table that has them: machine, versions, sources."""

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
    """The device and the number of them, as in "2 cores of AMD EPYC 9R14"; starts JAX."""
    devices = jax.devices()
    if devices[0].platform != "cpu":
        return f"{len(devices)} × {devices[0].device_kind}"
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return f"{cores()} cores of {name}"


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def versions() -> dict[str, str]:
    """Of packages, and of Python."""
    return {name: metadata.version(name) for name in PACKAGES} | {"python": platform.python_version()}


def sources(digits: int = 8) -> str:
    """The first hex digits of the sha256 of attnlab's own Python files; it has 64."""
    found = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        found.update(file.read_bytes())
    return found.hexdigest()[:digits]
