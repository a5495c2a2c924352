"""The precision of a run: `config.precision`, where "auto" is the type that the hardware multiplies faster.

"tf32" has the types of "float32". Only its products differ: NVIDIA GPUs since Ampere round their operands to TF32, with
10 bits of mantissa.
"""

import contextlib
import functools
from pathlib import Path

import jax

from attnlab.support.errors import UserError

# JAX's names for the precision of products; by default, JAX multiplies float32 in TF32 on GPUs.
_PRODUCTS = {"float32": "highest", "tf32": "tensorfloat32"}
_DESCRIBED = {"float32": "float32 (products in full precision)", "tf32": "float32, products in TF32"}
# Instructions of x86 CPUs that multiply bfloat16, as Linux names them.
_CPU_FLAGS = {"avx512_bf16", "amx_bf16"}


def products(precision: str) -> contextlib.AbstractContextManager:
    """Context for a run's matrix products: float32 in full precision, or TF32."""
    return jax.default_matmul_precision(_PRODUCTS[precision]) if precision in _PRODUCTS else contextlib.nullcontext()


def described(precision: str) -> str:
    """A resolved precision in words."""
    return _DESCRIBED.get(precision, precision)


def resolved(precision: str, device: jax.Device | None = None) -> str:
    """Resolve "auto" for a device; return any other precision unchanged.

    "auto" is bfloat16 on devices that multiply it faster than float32: TPUs, NVIDIA GPUs from compute capability 8.0 on
    (Ampere), and CPUs with AVX512_BF16 or AMX_BF16. Elsewhere it is float32.

    Args:
      precision: "auto", "float32", "tf32" or "bfloat16".
      device: None for the first device of this process.

    Raises:
      UserError: "tf32" on a device without it.
    """
    if precision in ("float32", "bfloat16"):
        return precision
    device = device or jax.local_devices()[0]
    if precision == "auto":
        return "bfloat16" if _multiplies_bfloat16(device) else "float32"
    if not _is_ampere(device):
        raise UserError(
            f"config.precision = 'tf32' needs NVIDIA's Ampere or newer, not a {device.device_kind}: use float32"
        )
    return precision


def _is_ampere(device: jax.Device) -> bool:
    """Whether a device is an NVIDIA GPU, Ampere or newer, which multiplies both bfloat16 and TF32."""
    capability = str(getattr(device, "compute_capability", ""))
    return capability.replace(".", "", 1).isdecimal() and float(capability) >= 8


def _multiplies_bfloat16(device: jax.Device) -> bool:
    if device.platform == "cpu":
        return bool(_CPU_FLAGS & _cpu_flags())
    return device.platform == "tpu" or _is_ampere(device)


@functools.cache
def _cpu_flags() -> set[str]:
    """The instruction sets of this machine's CPU; empty if the system does not list them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return next((set(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), set())
