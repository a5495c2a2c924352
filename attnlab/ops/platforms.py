"""The platform that a program is compiled for, which may differ from this machine's."""

import contextlib
import contextvars
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp

PLATFORMS = ("cpu", "gpu", "tpu")
_AS_SPECIFIED: contextvars.ContextVar[bool] = contextvars.ContextVar("as specified", default=False)


@contextlib.contextmanager
def as_specified() -> Iterator[None]:
    """Context in which operators are traced as their specifications, whatever `impl` and the platform are."""
    token = _AS_SPECIFIED.set(True)
    try:
        yield
    finally:
        _AS_SPECIFIED.reset(token)


def is_specified() -> bool:
    """Whether operators are traced as their specifications."""
    return _AS_SPECIFIED.get()


def platform_of(*arrays) -> str:
    """The platform (one of `PLATFORMS`) of the arrays' mesh or the mesh in context; without a mesh, of this machine."""
    device = _of_mesh(arrays)
    platform = device.platform if device else jax.default_backend()
    return {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)


def is_hopper(*arrays) -> bool | None:
    """Whether the GPU of the arrays' mesh, or of this machine, is an NVIDIA Hopper, e.g. H100; None without a GPU."""
    if device := _of_mesh(arrays):
        return bool(re.search(r"\bG?H\d+\b", device.device_kind))
    if jax.default_backend() != "gpu":
        return None
    return str(getattr(jax.devices()[0], "compute_capability", "")).startswith("9.")


def _of_mesh(arrays):
    """The device of the arrays' mesh or of the mesh in context; None without a mesh."""
    meshes = [jax.typeof(x).sharding.mesh for x in arrays if isinstance(x, jax.Array)]
    devices = (mesh.abstract_device for mesh in (*meshes, jax.sharding.get_abstract_mesh()))
    return next((device for device in devices if device), None)


def is_tf32(dtype, platform: str) -> bool:
    """Whether products of a type use TF32: float32 on GPUs, unless JAX's matmul precision is set higher."""
    default = jax.config.jax_default_matmul_precision in (None, "default", "fastest", "tensorfloat32")
    return platform == "gpu" and dtype == jnp.float32 and default
