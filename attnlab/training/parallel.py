"""Run one pure step on all devices: replicated with `jax.pmap`, or sharded with `jax.jit` over a named mesh."""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from attnlab import compilation
from attnlab.config import RunConfig
from attnlab.data.batches import Batch
from attnlab.nn import sharding
from attnlab.nn.multihead import AttentionConfig
from attnlab.ops.context import context_parallel
from attnlab.ops.cpu import stacks
from attnlab.support.errors import UserError

DATA, FSDP, CONTEXT, TENSOR = AXES = ("data", "fsdp", "context", "tensor")
BATCH = (DATA, FSDP)

# Which mesh axis splits which axes of parameters and activations: see `attnlab.nn.sharding`.
RULES = (
    ("batch", BATCH),
    ("length", CONTEXT),
    ("embed", FSDP),
    ("heads", TENSOR),
    ("kv_heads", TENSOR),
    ("mlp", TENSOR),
    ("vocab", TENSOR),
)


class Parallel(NamedTuple):
    """How a run uses its devices.

    Attributes:
      strategy: "pmap" or "mesh".
      mesh: the devices, along the axes "data", "fsdp", "context" and "tensor". The first two split the batch. "fsdp"
        also splits the state (Zhao et al. 2023, Rajbhandari et al. 2020). "context" splits sequences, see
        `attnlab.context_parallel`. "tensor" splits heads, hidden features and the vocabulary (Shoeybi et al. 2019).
    """

    strategy: str
    mesh: jax.sharding.Mesh

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of replicated arrays."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def splits_state(self) -> bool:
        """Whether a device holds only a share of the state."""
        return self.mesh.shape[FSDP] * self.mesh.shape[TENSOR] > 1

    def shardings(self, state):
        """The sharding of each leaf of a state by `RULES`; optimizer moments are sharded like their parameters."""
        if not self.splits_state:
            return jax.tree.map(lambda _: self.replicated, state)

        def place(path, x):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            spec = sharding.spec_of(sharding.parameter_names(name, x.ndim), x.shape, self.mesh)
            return NamedSharding(self.mesh, spec)

        with nn.logical_axis_rules(RULES):
            return jax.tree_util.tree_map_with_path(place, state)

    def create_state(self, create: Callable, *arguments):
        """Place `create(*arguments)` on the devices; no device ever holds more than its share."""
        if not self.splits_state:  # first on one device: if several run out of memory at once, they deadlock
            return jax.device_put(create(*arguments), self.replicated)
        return jax.jit(create, out_shardings=self.shardings(jax.eval_shape(create, *arguments)))(*arguments)

    def replicate(self, tree):
        """Copy values to every device, without waiting for other processes; all processes must pass equal values."""
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(self.replicated, np.asarray(x)), tree)

    def over_processes(self, state):
        """Convert a state to arrays that span all processes, to save it; `pmap` returns only local arrays."""
        if self.strategy == "mesh" or jax.process_count() == 1:
            return state

        def span(x):
            shards = [shard.data for shard in x.addressable_shards]
            return jax.make_array_from_single_device_arrays(x.shape, self.replicated, shards)

        return jax.tree.map(span, state)

    def on_every_device(self, tree):
        """Replicate a sharded tree. Every process must call this."""
        if not self.splits_state:
            return tree
        return jax.jit(lambda tree: tree, out_shardings=self.replicated)(tree)

    @property
    def batch_share(self) -> tuple[int, int]:
        """(Index of the share of a global batch that this process reads, number of equal shares)."""
        if self.strategy == "pmap":
            return jax.process_index(), jax.process_count()
        devices = self.mesh.devices.reshape(math.prod(self.mesh.shape[name] for name in BATCH), -1)
        by_process = {}
        for row, row_devices in enumerate(devices):
            for device in row_devices:
                by_process.setdefault(device.process_index, set()).add(row)
        shares = sorted({tuple(sorted(rows)) for rows in by_process.values()})
        if sum(map(len, shares)) != len(devices) or len({len(rows) for rows in shares}) != 1:
            raise UserError(
                f"the mesh {dict(self.mesh.shape)} gives {len(by_process)} processes overlapping shares of a batch: "
                "use sizes of config.parallel.mesh that divide, or are multiples of, the number of devices per process"
            )
        return shares.index(tuple(sorted(by_process[jax.process_index()]))), len(shares)

    def place_batch(self, batch: Batch, axis: int = 0) -> Batch:
        """Split this process' share of a global batch over its devices; sequences lie along `axis`."""
        if self.strategy == "pmap":

            def split(x):
                by_device = x.reshape(*x.shape[:axis], jax.local_device_count(), -1, *x.shape[axis + 1 :])
                return np.moveaxis(by_device, axis, 0)

            return jax.tree.map(split, batch)
        sharding = self._of_batch(axis)
        return jax.tree.map(functools.partial(jax.make_array_from_process_local_data, sharding), batch)

    def _of_batch(self, axis: int) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*[None] * axis, BATCH))

    def abstract_batch(
        self, batch_size: int, context: int, segments: bool = False, answers: int = 0, outer: tuple[int, ...] = ()
    ) -> Batch:
        """Shapes, types and shardings of a batch from `place_batch`; a sequence has `answers` answers, 0 for a text.

        `outer` are the sizes of the axes before the sequences.
        """
        leading, sharding = (*outer, batch_size), self._of_batch(len(outer))
        if self.strategy == "pmap":
            leading, sharding = (jax.local_device_count(), *outer, batch_size // jax.device_count()), None
        make = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
        tokens = make((*leading, context + 1), np.int32)
        return Batch(
            tokens,
            make(leading, np.int32),
            make(leading, np.float32),
            tokens if segments else None,
            make((*leading, context), np.int32) if answers else None,
            make((*leading, answers), np.int32) if 0 < answers < context else None,
        )

    def transfer_guard(self):
        """Context for a step: disallows implicit transfers, but not for `pmap`, which transfers the batch itself."""
        return jax.transfer_guard("disallow") if self.strategy == "mesh" else contextlib.nullcontext()

    def compile_train(self, steps: Callable, shardings, fuses_sums: bool = False) -> Callable:
        """Compile `steps(state, batches, per_run, count, axis_name=…)` → (state, metrics); the old state is donated.

        `fuses_sums` is for `compilation.compiler_options`; `pmap` has no such options, and follows XLA's flags.
        """
        return self._compile(steps, (shardings, self.replicated), (None, 0, None, None), fuses_sums, donate_argnums=0)

    def compile_eval(self, step: Callable, fuses_sums: bool = False) -> Callable:
        """Compile `step(params, batch, axis_name=…)` → sums over the global batch."""
        return self._compile(step, self.replicated, (None, 0), fuses_sums)

    def _compile(self, step, out_shardings, in_axes, fuses_sums, **options):
        platform = self.mesh.devices.flat[0].platform
        prepared = stacks.moved_as_integers if platform == "cpu" else lambda step: step
        if self.strategy == "mesh":
            is_split = self.mesh.shape[CONTEXT] > 1

            @functools.wraps(step)
            def with_rules(*args):
                split = context_parallel(CONTEXT) if is_split else contextlib.nullcontext()
                with nn.logical_axis_rules(RULES), split:
                    return step(*args)

            options["compiler_options"] = compilation.compiler_options(platform, fuses_sums=fuses_sums)
            return jax.jit(prepared(with_rules), out_shardings=out_shardings, **options)
        # The state is not mapped, so its shapes are the same on one device, on disk, and with the mesh strategy.
        step, devices = functools.partial(step, axis_name=DATA), self.mesh.devices.ravel().tolist()
        return jax.pmap(prepared(step), DATA, in_axes=in_axes, out_axes=None, devices=devices, **options)


def make(
    strategy: str,
    data: int = -1,
    fsdp: int = 1,
    tensor: int = 1,
    context: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Parallel:
    """Arrange `devices` (None: `jax.devices()`) as the mesh of a run; `data` = −1 takes all available devices."""
    try:
        devices = jax.devices() if devices is None else list(devices)
    except RuntimeError as error:  # JAX_PLATFORMS names a missing platform
        raise UserError(f"JAX finds no device: {str(error).splitlines()[0]}") from error
    among, taken = (available := len(devices)), []
    for name, size in (("fsdp", fsdp), ("context", context), ("tensor", tensor)):
        if size < 1 or among % size or (strategy == "pmap" and size > 1):
            share = f" ({among} for each of {' × '.join(taken)})" if taken else ""
            raise UserError(
                f"config.parallel.mesh.{name} = {size}, but there are {available} devices{share}: use a number that "
                "divides them" + (", with config.parallel.strategy=mesh" if strategy == "pmap" else "")
            )
        among //= size
        taken += [f"{name} = {size}"] if size > 1 else []
    split = fsdp * context * tensor
    data, requested = (available // split, data) if data == -1 else (data, data)
    count = data * split
    if not 1 <= count <= available or (count != available and (jax.process_count() > 1 or strategy == "pmap")):
        raise UserError(
            f"config.parallel.mesh.data = {requested}, but there are {available} devices: use −1 for all"
            + (" (pmap always takes all)" if strategy == "pmap" else f", or 1 to {available // split}")
        )
    # Neighbours in the mesh are neighbours in a TPU's torus where possible; several mesh axes may share a torus axis.
    sizes = (data, fsdp, context, tensor)
    placed = mesh_utils.create_device_mesh(sizes, devices[:count], allow_split_physical_axes=True)
    mesh = jax.sharding.Mesh(placed, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    return Parallel(strategy, mesh)


def from_config(config: RunConfig, devices: Sequence[jax.Device] | None = None) -> Parallel:
    """Choose the devices of a run, and check its batch and model against them."""
    parallel = make(config.parallel.strategy, **vars(config.parallel.mesh), devices=devices)
    check_shares(config, math.prod(parallel.mesh.shape[name] for name in BATCH))
    return parallel


def from_first_process(number: int) -> int:
    """Broadcast the first process' number to all processes. Every process must call this."""
    return int(multihost_utils.broadcast_one_to_all(np.int32(number))) if jax.process_count() > 1 else int(number)


def check_shares(config: RunConfig, devices: int) -> None:
    """Raise UserError for a size that cannot be split evenly; the batch is split over `devices` devices."""
    mesh, accumulation, model = config.parallel.mesh, config.optimizer.accumulation, config.model
    key_heads = [(f"model.{x.kind}.kv_heads", x.kv_heads or 0) for x in model.used if isinstance(x, AttentionConfig)]
    parts = f"devices × accumulation = {devices} × {accumulation} ="
    for name, size, by, of in (
        ("batch_size", config.batch_size, parts, devices * accumulation),
        ("model.width", model.width, "config.parallel.mesh.fsdp =", mesh.fsdp),
        ("model.num_heads", model.num_heads, "config.parallel.mesh.tensor =", mesh.tensor),
        *((name, heads, "config.parallel.mesh.tensor =", mesh.tensor) for name, heads in key_heads),
        ("model.mlp_ratio × width", model.hidden, "config.parallel.mesh.tensor =", mesh.tensor),
        ("model.context", model.context, "config.parallel.mesh.context =", mesh.context),
    ):
        if size % of:
            below = size // of * of
            near = " or ".join(str(multiple) for multiple in (below, below + of) if multiple)
            raise UserError(
                f"config.{name} = {size} is not divisible by {by} {of}: use {near}, or fewer devices "
                "(config.parallel.mesh)"
            )
