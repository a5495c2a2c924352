"""The memory of devices, and requests that it cannot hold, with which a process would never end or be killed."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import jax

from attnlab.support.errors import UserError

# The limits of a container, of control groups 2 and 1.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def check(needed: int | float, devices: Sequence[jax.Device], what: str, remedy: str) -> None:
    """Raise UserError where each of some devices, used at once, needs more bytes than it has, as far as it tells."""
    available = of_each(devices)
    if available is not None and needed > available:
        sizes = f"at least {needed / 2**30:,.0f} GiB on a device that has {available / 2**30:,.0f}"
        raise UserError(f"out of memory: {what} needs {sizes}: {remedy}")


def of_each(devices: Sequence[jax.Device]) -> int | None:
    """Bytes for arrays on each device: of CPUs, an equal share of their host's; None where nothing tells.

    >>> of_each(jax.devices("cpu")) <= of_each(jax.devices("cpu")[:1])
    True
    """
    if devices[0].platform == "cpu":
        return of_host() // len(devices)
    return stats(devices[0]).get("bytes_limit")


def stats(device: jax.Device) -> dict[str, int]:
    """What a device tells of its memory, in bytes; {} where its backend tells nothing, as CPUs."""
    with contextlib.suppress(NotImplementedError, jax.errors.JaxRuntimeError):
        return device.memory_stats() or {}
    return {}


def of_host() -> int:
    """Bytes of this machine's memory, or of this container's."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such control group, or "max"
            found = min(found, int(Path(file).read_text()))
    return found
