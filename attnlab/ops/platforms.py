"""The platform that a program is compiled for, which may differ from this machine's."""

import jax
import jax.numpy as jnp

PLATFORMS = ("cpu", "gpu", "tpu")


def platform_of(*arrays) -> str:
    """The platform, of `PLATFORMS`, of the arrays' mesh or the mesh in context; without a mesh, of this machine."""
    meshes = [jax.typeof(x).sharding.mesh for x in arrays if isinstance(x, jax.Array)]
    devices = (mesh.abstract_device for mesh in (*meshes, jax.sharding.get_abstract_mesh()))
    platform = next((device.platform for device in devices if device), jax.default_backend())
    return {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)


def is_tf32(dtype, platform: str) -> bool:
    """Whether products of a type are in TF32: float32's on GPUs, unless JAX's matmul precision is set higher."""
    default = jax.config.jax_default_matmul_precision in (None, "default", "fastest", "tensorfloat32")
    return platform == "gpu" and dtype == jnp.float32 and default
