"""The platform that a program is compiled for, which need not be one of this machine's."""

import jax

PLATFORMS = ("cpu", "gpu", "tpu")


def platform_of(*arrays) -> str:
    """The platform that computes with these arrays, one of `PLATFORMS`.

    Inside `jit` that is the platform of the mesh over which the program's arguments are sharded, or of the mesh in
    context (`jax.set_mesh`); without a mesh nothing tells it, and the default backend of this machine is taken.

    >>> platform_of(jnp.ones(3))
    'cpu'
    """
    meshes = [jax.typeof(x).sharding.mesh for x in arrays if isinstance(x, jax.Array)]
    for mesh in (*meshes, jax.sharding.get_abstract_mesh()):
        device = mesh.abstract_device
        if device is not None:
            return {"cuda": "gpu", "rocm": "gpu"}.get(device.platform, device.platform)
    return jax.default_backend()
