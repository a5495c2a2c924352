"""Devices to compile for, by name: TPU slices and H100s that are not attached, or the devices of this machine.

The names are `v4`, `v5e`, `v5p`, `v6e`, `tpu7x` (one chip), or these with a shape in chips, as in `v5e:4x4` and
`v5p:2x2x1`; `h100`, `h100:8`; and `here`. For devices that are not attached, only their compilers run: libtpu and JAX's
CUDA plugin contain these.
"""

import importlib.util
import math
import mmap
import os
import re
from pathlib import Path
from typing import NamedTuple

import jax
from jax.experimental import topologies

from attnlab.support.errors import UserError
from attnlab.support.names import nearest
from attnlab.training.metrics import memory_stats


class Topology(NamedTuple):
    """Devices of one kind to compile for; programs run on them only if the name is "here"."""

    name: str
    platform: str  # "tpu", "gpu" or "cpu"
    devices: list[jax.Device]
    usable_gib: float | None  # memory that a program may use on a device; None if unknown
    tflops: float | None = None  # a device's peak for bfloat16 products, 10¹² FLOP/s; None if unknown
    bandwidth: float | None = None  # of a device's memory, TB/s


class _Generation(NamedTuple):
    """A generation of TPUs: usable memory, peaks as in `Topology`, number of axes, and the most chips in a slice."""

    usable_gib: float
    tflops: float
    bandwidth: float
    axes: int
    chips: int
    options: dict  # for the compiler


# Chips per pod (for v5p, per slice) and peaks are from https://docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x},
# "System architecture". The usable memory is not documented: it is what libtpu 0.0.50 names when it refuses a program
# ("exceeds available HBM (15.75G)"). Memory and peaks are per JAX device. A tpu7x chip is two devices. libtpu also
# makes a v4 chip two devices unless "megacore" joins its cores, as they are joined on every v4 host of Google Cloud.
_TPUS = {
    "v4": _Generation(30.75, 275, 1.23, 3, 4096, {"chip_config_name": "megacore"}),
    "v5e": _Generation(15.75, 197, 0.82, 2, 256, {}),
    "v5p": _Generation(95.73, 459, 2.77, 3, 6144, {}),
    "v6e": _Generation(31.24, 918, 1.64, 2, 256, {}),
    "tpu7x": _Generation(94.74, 1153.5, 3.69, 3, 9216, {}),
}
_H100 = "NVIDIA H100 80GB HBM3"
_H100_GIB = 84_942_979_072 / 2**30  # `device_memory_size` of the CUDA plugin's description
_H100_PEAKS = 989, 3.35  # SXM, without sparsity: https://www.nvidia.com/en-us/data-center/h100
_INSTALL_CUDA = "pip install --upgrade 'jax[cuda13]', JAX 0.12 or newer, on Python 3.12 or newer"
_MOST_GPUS = 8  # on one host; the plugin describes no network between hosts
_HOST = (2, 2, 1)  # chips of a TPU host along each axis

EXAMPLES = ("here", "h100", "h100:8", "v4:2x2x1", "v5e", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
NAMES = (
    "here, h100, h100:1 to h100:8, or v4, v5e, v5p, v6e, tpu7x with or without a shape in chips (v5e:4x4, v5p:2x2x1)"
)


def find(name: str) -> Topology:
    """Find devices by name. For devices that are not attached, call this before JAX starts any platform but CPUs."""
    generation, colon, shape = name.partition(":")
    if name == "here":
        return _here()
    if generation in _TPUS and (shape or not colon):
        return _tpu(name, generation, shape)
    if generation == "h100" and (shape or not colon):
        return _h100(name, shape)
    raise UserError(f"--topology={name} is unknown{nearest(name, EXAMPLES)}: choose {NAMES}")


def prepare(name: str) -> None:
    """Make JAX start on CPUs only, and keep libtpu from looking for TPUs."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    for variable, value in {
        "TPU_SKIP_MDS_QUERY": "1",  # do not query Google Cloud about the machine
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # two plans at a time have no TPU to compete for
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }.items():
        os.environ.setdefault(variable, value)
    jax.config.update("jax_platforms", "cpu")
    if jax.default_backend() != "cpu":
        raise UserError(
            f"--topology={name} needs JAX on CPUs, but it has started on a {jax.default_backend()}: plan in a separate "
            "process"
        )


def _here() -> Topology:
    try:
        devices = jax.devices()
    except RuntimeError as error:  # JAX_PLATFORMS names a missing platform
        raise UserError(f"--topology=here: JAX finds no device: {str(error).splitlines()[0]}") from error
    limit = memory_stats(devices[0]).get("bytes_limit")  # CPUs report none
    return Topology("here", devices[0].platform, devices, limit and limit / 2**30)


def _tpu(name: str, generation: str, shape: str) -> Topology:
    known = _TPUS[generation]
    sizes = _sizes(name, generation, shape or "x".join("1" * known.axes))
    options = dict(known.options)
    if all(size <= most for size, most in zip(sizes, _HOST)):  # libtpu must know that the slice is part of one host
        options["chips_per_host_bounds"] = (*sizes, *(1,) * (3 - len(sizes)))
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(f"--topology={name} needs libtpu: pip install 'jax[tpu]'")
    prepare(name)
    label = f"{generation}:{'x'.join(map(str, sizes))}"
    devices = _described(name, platform="tpu", topology_name=label, **options)
    return Topology(name, "tpu", devices, known.usable_gib, known.tflops, known.bandwidth)


def _sizes(name: str, generation: str, shape: str) -> tuple[int, ...]:
    """Parse and check the chips along each axis, because libtpu exits on a size of 0 and accepts impossible slices."""
    known = _TPUS[generation]
    example = "x".join(map(str, _HOST[: known.axes]))
    if not re.fullmatch(r"[1-9]\d{0,3}(x[1-9]\d{0,3})*", shape) or shape.count("x") + 1 != known.axes:
        raise UserError(f"--topology={name}: expected the chips along {known.axes} axes, e.g. {generation}:{example}")
    sizes = tuple(map(int, shape.split("x")))
    if math.prod(sizes) > known.chips:
        raise UserError(
            f"--topology={name} has {math.prod(sizes)} chips, but a slice of {generation} has {known.chips} at most: "
            "choose a smaller shape"
        )
    return sizes


def _h100(name: str, count: str) -> Topology:
    if count and not (count.isascii() and count.isdigit() and 1 <= int(count) <= _MOST_GPUS):
        raise UserError(f"--topology={name}: expected h100:1 to h100:{_MOST_GPUS}, the GPUs of one host")
    prepare(name)
    target = _target(name)
    shape = f"1x1x{int(count or 1)}"  # slices, hosts, GPUs per host
    devices = _described(name, platform="cuda", topology_name="h100", target_config=target, topology=shape)
    return Topology(name, "gpu", devices, _H100_GIB, *_H100_PEAKS)


def _target(name: str) -> str:
    """Find XLA's description of an H100: JAX's CUDA plugin contains one, as text, for each GPU that it knows."""
    spec = importlib.util.find_spec("jax_plugins")
    folders = [Path(folder) for folder in (spec.submodule_search_locations if spec else ())]
    plugins = sorted(plugin for folder in folders for plugin in folder.glob("xla_cuda*/xla_cuda_plugin.so"))
    if not plugins:
        raise UserError(f"--topology={name} needs JAX's CUDA plugin: {_INSTALL_CUDA}")
    with plugins[-1].open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(f'name: "{_H100}"'.encode())
        start = data.rfind(b"gpu_device_info {", 0, at) if at >= 0 else -1
        if start < 0:
            raise UserError(
                f"--topology={name}: the CUDA plugin of JAX {jax.__version__} does not describe it: {_INSTALL_CUDA}"
            )
        return data[start : data.find(b"\0", at)].decode()


def _described(name: str, **description) -> list[jax.Device]:
    try:
        return list(topologies.get_topology_desc(**description).devices)
    except (RuntimeError, NotImplementedError, ValueError) as error:  # JaxRuntimeError is a RuntimeError
        reason = str(error).strip().splitlines()[0].removeprefix("INVALID_ARGUMENT: ")
        raise UserError(f"--topology={name} is refused by its compiler (JAX {jax.__version__}): {reason}") from error
