"""The platform that a program is compiled for, which may differ from this machine's."""

import jax

PLATFORMS = ("cpu", "gpu", "tpu")


def platform_of(*arrays) -> str:
    """The platform, of `PLATFORMS`, of the arrays' mesh or the mesh in context; without a mesh, of this machine."""
    device = _device_of(arrays)
    platform = jax.default_backend() if device is None else device.platform
    return {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)


def device_kind_of(*arrays) -> str:
    """The kind of device that computes with these arrays, e.g. "TPU v5 lite"."""
    device = _device_of(arrays)
    return jax.devices()[0].device_kind if device is None else device.device_kind


def _device_of(arrays):
    """A device of the mesh, all of one kind; None without a mesh."""
    meshes = [jax.typeof(x).sharding.mesh for x in arrays if isinstance(x, jax.Array)]
    return next(
        (mesh.abstract_device for mesh in (*meshes, jax.sharding.get_abstract_mesh()) if mesh.abstract_device), None
    )
