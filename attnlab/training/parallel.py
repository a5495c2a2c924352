"""Run one pure step on all devices: replicated with `jax.pmap`, or sharded with `jax.jit` over a named mesh."""

import contextlib
import functools
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from attnlab.data.batches import Batch
from attnlab.errors import UserError

DATA, FSDP = "data", "fsdp"

# Which axis of a parameter is split over which mesh axis; all other parameters (biases, norms) are replicated.
# Tensor parallelism would split the heads and the hidden features of the MLP.
RULES = (
    (r"(query|key|value)/kernel$", (FSDP, None, None)),  # [width, heads, head_dim]
    (r"attention/out/kernel$", (None, None, FSDP)),  # [heads, head_dim, width]
    (r"mlp/up/kernel$", (FSDP, None)),  # [width, mlp]
    (r"mlp/down/kernel$", (None, FSDP)),  # [mlp, width]
    (r"(embed|positions)/embedding$", (None, FSDP)),  # [vocabulary or context, width]
)


class Parallel(NamedTuple):
    """How a run uses its devices.

    Attributes:
      strategy: "pmap" or "mesh".
      mesh: the devices, along the axes "data" and "fsdp": both split the batch, and "fsdp" also splits the state
        (Zhao et al. 2023, Rajbhandari et al. 2020).
    """

    strategy: str
    mesh: jax.sharding.Mesh

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of replicated arrays."""
        return NamedSharding(self.mesh, PartitionSpec())

    def shardings(self, state):
        """The sharding of each leaf of a state by `RULES`; optimizer moments are sharded like their parameters."""
        if self.mesh.shape[FSDP] == 1:
            return jax.tree.map(lambda _: self.replicated, state)

        def place(path, _):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            axes = next((axes for rule, axes in RULES if re.search(rule, name)), ())
            return NamedSharding(self.mesh, PartitionSpec(*axes))

        return jax.tree_util.tree_map_with_path(place, state)

    def create_state(self, create: Callable):
        """Create a state, placed on the devices; with FSDP no device ever holds more than its share of it."""
        if self.mesh.shape[FSDP] == 1:  # first on one device: if several run out of memory at once, they deadlock
            return jax.device_put(create(), self.replicated)
        return jax.jit(create, out_shardings=self.shardings(jax.eval_shape(create)))()

    def over_processes(self, state):
        """The state as arrays that span all processes, for saving; `pmap` returns arrays of the local devices only."""
        if self.strategy == "mesh" or jax.process_count() == 1:
            return state

        def span(x):
            shards = [shard.data for shard in x.addressable_shards]
            return jax.make_array_from_single_device_arrays(x.shape, self.replicated, shards)

        return jax.tree.map(span, state)

    def on_every_device(self, tree):
        """A sharded tree, replicated. Every process must call it."""
        if self.mesh.shape[FSDP] == 1:
            return tree
        return jax.jit(lambda tree: tree, out_shardings=self.replicated)(tree)

    def place_batch(self, batch: Batch) -> Batch:
        """Split this process' sequences of a global batch over its devices."""
        if self.strategy == "pmap":
            local = jax.local_device_count()
            return jax.tree.map(lambda x: x.reshape(local, -1, *x.shape[1:]), batch)
        sharding = NamedSharding(self.mesh, PartitionSpec((DATA, FSDP)))
        return jax.tree.map(functools.partial(jax.make_array_from_process_local_data, sharding), batch)

    def abstract_batch(self, batch_size: int, context: int) -> Batch:
        """Shapes, types and shardings of a batch as `place_batch` returns it.

        Args:
          batch_size: sequences in the global batch.
          context: targets per sequence.
        """
        leading, sharding = (batch_size,), NamedSharding(self.mesh, PartitionSpec((DATA, FSDP)))
        if self.strategy == "pmap":
            leading, sharding = (jax.local_device_count(), batch_size // jax.device_count()), None
        make = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
        return Batch(
            make((*leading, context + 1), np.int32),
            make(leading, np.int32),
            make(leading, np.float32),
        )

    def transfer_guard(self):
        """Context for a step: disallows implicit transfers, except with `pmap`, which places the batch itself."""
        return jax.transfer_guard("disallow") if self.strategy == "mesh" else contextlib.nullcontext()

    def compile_train(self, step: Callable, state) -> Callable:
        """Compile `step(state, batch, axis_name=…)` → (state, metrics); the buffers of the old state are donated.

        Args:
          step: a pure function.
          state: a state, or its shapes.
        """
        return self._compile(step, (self.shardings(state), self.replicated), donate_argnums=0)

    def compile_eval(self, step: Callable) -> Callable:
        """Compile `step(params, batch, axis_name=…)` → sums over the global batch."""
        return self._compile(step, self.replicated)

    def _compile(self, step, out_shardings, **options):
        if self.strategy == "mesh":
            return jax.jit(step, out_shardings=out_shardings, **options)
        # The state is not mapped: its shapes are those on one device, on disk, and with the mesh strategy.
        step, devices = functools.partial(step, axis_name=DATA), self.mesh.devices.ravel().tolist()
        return jax.pmap(step, DATA, in_axes=(None, 0), out_axes=None, devices=devices, **options)


def make(strategy: str, data: int = -1, fsdp: int = 1, devices: Sequence[jax.Device] | None = None) -> Parallel:
    """Choose the devices of a run.

    Args:
      strategy: "pmap" or "mesh".
      data: devices along the axis "data"; −1 for all available devices.
      fsdp: devices along the axis "fsdp", which also split the state.
      devices: the available devices; `jax.devices()` when None.

    Raises:
      UserError: more devices than are available, or not all of them with `pmap` or several processes.

    >>> make("mesh", data=1).mesh.shape["data"]
    1
    """
    try:
        devices = jax.devices() if devices is None else list(devices)
    except RuntimeError as error:  # JAX_PLATFORMS names a missing platform
        raise UserError(f"JAX finds no device: {str(error).splitlines()[0]}") from error
    available = len(devices)
    if fsdp < 1 or available % fsdp or (strategy == "pmap" and fsdp > 1):
        raise UserError(
            f"config.parallel.mesh.fsdp = {fsdp}, but there are {available} devices: use a number that divides them"
            + (", with config.parallel.strategy=mesh" if strategy == "pmap" else "")
        )
    data, given = (available // fsdp, data) if data == -1 else (data, data)
    count = data * fsdp
    if not 1 <= count <= available or (count != available and (jax.process_count() > 1 or strategy == "pmap")):
        raise UserError(
            f"config.parallel.mesh.data = {given}, but there are {available} devices: use −1 for all"
            + (" (pmap always takes all)" if strategy == "pmap" else f", or 1 to {available // fsdp}")
        )
    types = (AxisType.Auto,) * 2
    return Parallel(strategy, jax.make_mesh((data, fsdp), (DATA, FSDP), axis_types=types, devices=devices[:count]))


def from_config(config: ConfigDict, devices: Sequence[jax.Device] | None = None) -> Parallel:
    """Choose the devices of a run, and check its batch and model width against them.

    Args:
      config: the config of a run.
      devices: the available devices; `jax.devices()` when None.

    Raises:
      UserError: as for `make`; a batch or width that the devices do not divide.
    """
    parallel = make(config.parallel.strategy, **config.parallel.mesh, devices=devices)
    check_batch(config.batch_size, parallel.mesh.devices.size, config.optimizer.accumulation)
    check_width(config.model.width, config.parallel.mesh.fsdp)
    return parallel


def from_first_process(number: int) -> int:
    """Broadcast the first process' number to all processes. Every process must call it.

    >>> from_first_process(7)
    7
    """
    return int(multihost_utils.broadcast_one_to_all(np.int32(number))) if jax.process_count() > 1 else int(number)


def check_width(width: int, fsdp: int) -> None:
    """Raise UserError when parameters cannot be split evenly along the model's width."""
    if width % fsdp:
        raise UserError(f"config.model.width = {width} is not divisible by config.parallel.mesh.fsdp = {fsdp}")


def check_batch(batch_size: int, devices: int, accumulation: int) -> None:
    """Raise UserError when the global batch cannot be split evenly over devices and accumulation steps."""
    share = devices * accumulation
    if batch_size % share:
        below = batch_size // share * share
        choices = " or ".join(str(size) for size in (below, below + share) if size)
        raise UserError(
            f"config.batch_size = {batch_size} is not divisible by devices × accumulation = {devices} × "
            f"{accumulation} = {share}: use {choices}, or fewer devices (config.parallel.mesh.data)"
        )
