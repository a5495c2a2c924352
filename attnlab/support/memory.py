"""The memory of devices, and requests that it cannot hold, with which a process would never end or be killed."""

import contextlib
import os
from pathlib import Path

import jax

from attnlab.support.errors import UserError

# The limits of a container, of control groups 2 and 1.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def check(needed: int | float, device: jax.Device, what: str, remedy: str) -> None:
    """Raise UserError where a device has less memory than `needed`, bytes; devices that do not tell have enough."""
    available = of_device(device)
    if available is not None and needed > available:
        sizes = f"at least {needed / 2**30:,.0f} GiB on a device that has {available / 2**30:,.0f}"
        raise UserError(f"out of memory: {what} needs {sizes}: {remedy}")


def of_device(device: jax.Device) -> int | None:
    """Bytes for a device's arrays: of CPUs, an equal share of their host's; None where nothing tells.

    >>> of_device(jax.devices()[0]) > 2**20
    True
    """
    if device.platform == "cpu":
        return of_host() // len(jax.local_devices(backend="cpu"))
    with contextlib.suppress(NotImplementedError, jax.errors.JaxRuntimeError):  # of backends that tell none
        return (device.memory_stats() or {}).get("bytes_limit")
    return None


def of_host() -> int:
    """Bytes of this machine's memory, or of this container's."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # no such control group, or "max"
            found = min(found, int(Path(file).read_text()))
    return found
