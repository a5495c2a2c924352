"""Devices to compile for, by name: TPU slices and H100s that are not here, or the devices of this machine.

The names are `v4`, `v5e`, `v5p`, `v6e`, `tpu7x` (one chip) or with a shape in chips, as `v5e:4x4` and `v5p:2x2x1`;
`h100`, `h100:8`; and `here`. Nothing runs on a device that is not here: its compiler does, which libtpu and JAX's CUDA
plugin bring along.
"""

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device as JAX sees it; None for what is not known."""

    kind: str  # `jax.Device.device_kind`
    hbm_gib: float | None = None  # memory by the data sheet
    usable_gib: float | None = None  # memory that a program may use: on TPUs, what the compiler refuses to exceed
    peak_flops: float | None = None  # dense bfloat16 FLOP/s
    bandwidth: float | None = None  # memory, bytes per second


class Topology(NamedTuple):
    """Devices of one kind to compile for; they run only where the name is "here"."""

    name: str
    platform: str  # "tpu", "gpu" or "cpu"
    devices: list[jax.Device]
    chip: Chip


class _Slices(NamedTuple):
    """Which slices of a TPU generation there are: axes of a shape, most chips, and options of the compiler."""

    chip: Chip
    axes: int
    chips: int
    options: dict


# The figures are from https://docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e,tpu7x}, "System architecture", per
# chip: memory, peak compute (bf16), bandwidth, chips per pod (for v5p, per slice). The usable memory is not documented:
# it is what libtpu 0.0.50 names when it refuses a program ("exceeds available HBM (15.75G)").
# JAX sees one device per chip, two on tpu7x, whose figures are halved here. On v4, libtpu describes two unless told
# that both cores are one device ("megacore"), as they are on every v4 host of Google Cloud.
_TPUS = {
    "v4": _Slices(Chip("TPU v4", 32.0, 30.75, 275e12, 1200e9), 3, 4096, {"chip_config_name": "megacore"}),
    "v5e": _Slices(Chip("TPU v5 lite", 16.0, 15.75, 197e12, 819e9), 2, 256, {}),
    "v5p": _Slices(Chip("TPU v5", 95.0, 95.73, 459e12, 2765e9), 3, 6144, {}),
    "v6e": _Slices(Chip("TPU v6 lite", 32.0, 31.24, 918e12, 1638e9), 2, 256, {}),
    "tpu7x": _Slices(Chip("TPU7x", 96.0, 94.74, 2307e12 / 2, 7380e9 / 2), 3, 9216, {}),
}
# NVIDIA H100 SXM5: data sheet (80 GB HBM3, which are GiB, and 3.35 TB/s), and "NVIDIA H100 Tensor Core GPU
# Architecture", table 2 (989.4 TFLOP/s, dense). The usable memory is `device_memory_size` of the plugin's description
# of it, 84,942,979,072 bytes.
_H100 = Chip("NVIDIA H100 80GB HBM3", 80.0, 84_942_979_072 / 2**30, 989.4e12, 3.35e12)
_INSTALL_CUDA = "pip install --upgrade 'jax[cuda13]', JAX 0.12 or newer, on Python 3.12 or newer"
_MOST_GPUS = 8  # of one host; the plugin's description knows no network between hosts
_KNOWN = {chip.kind: chip for chip in (*(slices.chip for slices in _TPUS.values()), _H100)}
_HOST = (2, 2, 1)  # chips of a TPU host along each axis

EXAMPLES = ("here", "h100", "h100:8", "v4:2x2x1", "v5e", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
NAMES = (
    "here, h100, h100:1 to h100:8, or v4, v5e, v5p, v6e, tpu7x with or without a shape in chips (v5e:4x4, v5p:2x2x1)"
)


def find(name: str) -> Topology:
    """The devices of a name; for devices that are not here, to be called before JAX starts any other than CPUs."""
    generation, colon, shape = name.partition(":")
    if name == "here":
        return _here()
    if generation in _TPUS and (shape or not colon):
        return _tpu(name, generation, shape)
    if generation == "h100" and (shape or not colon):
        return _h100(name, shape)
    raise UserError(f"--topology={name} is unknown{nearest(name, EXAMPLES)}: there are {NAMES}")


def prepare(name: str) -> None:
    """Tell JAX to start on CPUs alone, and libtpu not to look for TPUs; nothing for "here"."""
    if name == "here":
        return
    os.environ["JAX_PLATFORMS"] = "cpu"
    for variable, value in {
        "TPU_SKIP_MDS_QUERY": "1",  # no question to Google Cloud about the machine
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # two plans at a time: there is no TPU over which they could quarrel
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }.items():
        os.environ.setdefault(variable, value)
    jax.config.update("jax_platforms", "cpu")
    if jax.default_backend() != "cpu":
        raise UserError(
            f"--topology={name} is compiled for from CPUs, but JAX has started on a {jax.default_backend()}: plan in a "
            "process of its own"
        )


def _here() -> Topology:
    try:
        devices = jax.devices()
    except RuntimeError as error:  # JAX_PLATFORMS names a missing platform
        raise UserError(f"--topology=here: JAX finds no device: {str(error).splitlines()[0]}") from error
    chip = _KNOWN.get(devices[0].device_kind, Chip(devices[0].device_kind))
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")  # CPUs tell none
    if limit:
        chip = dataclasses.replace(chip, usable_gib=limit / 2**30)
    return Topology("here", devices[0].platform, devices, chip)


def _tpu(name: str, generation: str, shape: str) -> Topology:
    slices = _TPUS[generation]
    sizes = _sizes(name, generation, shape or "x".join("1" * slices.axes))
    options = dict(slices.options)
    if all(size <= most for size, most in zip(sizes, _HOST)):  # a part of one host, of which libtpu must be told
        options["chips_per_host_bounds"] = (*sizes, *(1,) * (3 - len(sizes)))
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(f"--topology={name} needs libtpu: pip install 'jax[tpu]'")
    prepare(name)
    label = f"{generation}:{'x'.join(map(str, sizes))}"
    return Topology(name, "tpu", _described(name, platform="tpu", topology_name=label, **options), slices.chip)


def _sizes(name: str, generation: str, shape: str) -> tuple[int, ...]:
    """The chips along each axis; libtpu ends the process for a size of 0, and takes slices that there are not."""
    slices = _TPUS[generation]
    example = "x".join(map(str, _HOST[: slices.axes]))
    if not re.fullmatch(r"[1-9]\d{0,3}(x[1-9]\d{0,3})*", shape) or shape.count("x") + 1 != slices.axes:
        raise UserError(f"--topology={name}: expected the chips along {slices.axes} axes, e.g. {generation}:{example}")
    sizes = tuple(map(int, shape.split("x")))
    if math.prod(sizes) > slices.chips:
        raise UserError(
            f"--topology={name} has {math.prod(sizes)} chips, but a slice of {generation} has {slices.chips} at most: "
            "choose a smaller shape"
        )
    return sizes


def _h100(name: str, count: str) -> Topology:
    if count and not (count.isascii() and count.isdigit() and 1 <= int(count) <= _MOST_GPUS):
        raise UserError(f"--topology={name}: expected h100:1 to h100:{_MOST_GPUS}, the GPUs of one host")
    prepare(name)
    target = _target(name, _H100.kind)
    shape = f"1x1x{int(count or 1)}"  # slices, hosts, GPUs of a host
    devices = _described(name, platform="cuda", topology_name="h100", target_config=target, topology=shape)
    return Topology(name, "gpu", devices, _H100)


def _target(name: str, kind: str) -> str:
    """XLA's description of a GPU: it lies as text inside JAX's CUDA plugin, which has one for each GPU it knows."""
    spec = importlib.util.find_spec("jax_plugins")
    folders = [Path(folder) for folder in (spec.submodule_search_locations if spec else ())]
    plugins = sorted(plugin for folder in folders for plugin in folder.glob("xla_cuda*/xla_cuda_plugin.so"))
    if not plugins:
        raise UserError(f"--topology={name} needs JAX's CUDA plugin: {_INSTALL_CUDA}")
    with plugins[-1].open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(f'name: "{kind}"'.encode())
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
