"""Peak memory of one call, or of a process, as the operating system counts it."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import jax

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak(call: Callable) -> float | None:
    """Peak rise of the process' resident memory during one call, results included, in MiB.

    None where the system does not report it (all but Linux). Run `call` once before, so that compiling is not counted.

    >>> import sys
    >>> rise = peak(lambda: np.ones(2**23))  # 64 MiB
    >>> rise is None or 60 < rise < 70
    True
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)  # freed memory that malloc keeps would hide a rise
        before = _resident("VmRSS")
        _CLEAR.write_text("5")  # resets the high-water mark
        result = jax.block_until_ready(call())
        rise = max(_resident("VmHWM") - before, 0)
        del result
    except (OSError, AttributeError):
        return None
    return rise


def high_water(pid: int) -> float | None:
    """Peak resident memory of a process since it started, in MiB; None where the system does not report it.

    >>> import os
    >>> mib = high_water(os.getpid())
    >>> mib is None or mib > 10
    True
    """
    try:
        return _resident("VmHWM", Path(f"/proc/{pid}/status"))
    except (OSError, StopIteration):
        return None


def cell(peak: float | None) -> str:
    """A table cell; "?" where the system does not report memory."""
    return "?" if peak is None else f"{peak:,.0f}"


def _resident(field: str, status: Path = _STATUS) -> float:
    line = next(line for line in status.read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) / 1024
