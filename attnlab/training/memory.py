"""The most memory that a run has taken."""

import contextlib
import resource
import sys
from collections.abc import Iterable

import jax


def peaks(devices: Iterable[jax.Device]) -> dict[str, int]:
    """Bytes at their peak, since this process began.

    Returns:
      "host_peak_memory_bytes", the resident memory of the process; "device_peak_memory_bytes", of the device that took
      most, where the backend tells: CPUs do not.

    >>> list(peaks(jax.devices("cpu")))
    ['host_peak_memory_bytes']
    """
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, else KiB
    found = {"host_peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    told = [peak for device in devices if (peak := _stats(device).get("peak_bytes_in_use"))]
    return found | ({"device_peak_memory_bytes": max(told)} if told else {})


def _stats(device: jax.Device) -> dict[str, int]:
    with contextlib.suppress(NotImplementedError, jax.errors.JaxRuntimeError):
        return device.memory_stats() or {}
    return {}


def in_words(peaks: dict[str, int]) -> str:
    """The memory of devices, else of the host.

    >>> in_words({"host_peak_memory_bytes": 1_234_000_000})
    'peak memory 1.23 GB'
    """
    host = peaks["host_peak_memory_bytes"]
    device = peaks.get("device_peak_memory_bytes")
    return f"peak {'device ' if device else ''}memory {(device or host) / 1e9:.2f} GB"
