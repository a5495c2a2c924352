"""The data type of a run's computation: `config.precision`, where "auto" is the faster type on the hardware."""

import contextlib
import functools
from pathlib import Path

import jax

# Instructions of x86 CPUs that multiply bfloat16, as Linux names them.
_CPU_FLAGS = {"avx512_bf16", "amx_bf16"}


def products(precision: str) -> contextlib.AbstractContextManager:
    """The context in which a run multiplies: float32 in full precision, where JAX takes TF32 on GPUs by default."""
    return jax.default_matmul_precision("highest") if precision == "float32" else contextlib.nullcontext()


def resolved(precision: str, device: jax.Device | None = None) -> str:
    """The data type of a precision; "auto" is bfloat16 on devices that multiply it faster than float32.

    These are TPUs, NVIDIA's GPUs from compute capability 8.0 on (Ampere), and CPUs with AVX512_BF16 or AMX_BF16.

    Args:
      precision: "auto", "float32" or "bfloat16".
      device: the first of this process when None.
    """
    if precision != "auto":
        return precision
    return "bfloat16" if _multiplies_bfloat16(device or jax.local_devices()[0]) else "float32"


def _multiplies_bfloat16(device: jax.Device) -> bool:
    if device.platform == "cpu":
        return bool(_CPU_FLAGS & _cpu_flags())
    capability = str(getattr(device, "compute_capability", ""))
    return device.platform == "tpu" or (capability.replace(".", "", 1).isdecimal() and float(capability) >= 8)


@functools.cache
def _cpu_flags() -> set[str]:
    """The instruction sets of this machine's CPU; empty where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return next((set(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), set())
