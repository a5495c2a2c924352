"""The platform that a program is compiled for, which may differ from this machine's."""

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

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


def only_on_tpus(x, message: str):
    """`x`; compiling a computation with it for another platform raises ValueError with the message."""
    return _only_on_tpus_p.bind(x, message=message)


def _refuse(*_, message, **__):
    raise ValueError(message)


_only_on_tpus_p = Primitive("only_on_tpus")
_only_on_tpus_p.def_impl(_refuse)
_only_on_tpus_p.def_abstract_eval(lambda x, message: x)
ad.deflinear2(_only_on_tpus_p, lambda cotangent, *_, message: (cotangent,))
batching.primitive_batchers[_only_on_tpus_p] = lambda args, axes, message: (only_on_tpus(args[0], message), axes[0])
mlir.register_lowering(_only_on_tpus_p, _refuse)
mlir.register_lowering(_only_on_tpus_p, lambda _, x, message: [x], platform="tpu")
