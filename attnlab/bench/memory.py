"""Peak memory of one call, or of a process, as the operating system sees it."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import jax

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak(call: Callable) -> float | None:
    """MiB by which the process' resident memory rises, at most, during one call; its results count.

    None where the system does not tell (it takes Linux). Call it once before, so that compiling is not counted.

    >>> import sys
    >>> rise = peak(lambda: np.ones(2**23))  # 64 MiB
    >>> rise is None or 60 < rise < 70
    True
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)  # freed memory that malloc keeps would hide a rise
        before = _resident("VmRSS")
        _CLEAR.write_text("5")  # the high-water mark starts anew
        result = jax.block_until_ready(call())
        rise = max(_resident("VmHWM") - before, 0)
        del result
    except (OSError, AttributeError):
        return None
    return rise


def high_water(pid: int) -> float | None:
    """MiB that a process has had resident at most since it started; None where the system does not tell.

    >>> import os
    >>> mib = high_water(os.getpid())
    >>> mib is None or mib > 10
    True
    """
    try:
        return _resident("VmHWM", Path(f"/proc/{pid}/status"))
    except (OSError, StopIteration):
        return None


def _resident(field: str, status: Path = _STATUS) -> float:
    line = next(line for line in status.read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) / 1024
