"""One pure step on all devices: replicated by `jax.pmap`, or sharded by `jax.jit` over a named mesh."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from attnlab.data.batches import Batch
from attnlab.errors import UserError

AXIS = "data"


class Parallel(NamedTuple):
    """How a run uses its devices.

    Attributes:
      strategy: "pmap" or "mesh".
      mesh: the devices, along the axis "data".
    """

    strategy: str
    mesh: jax.sharding.Mesh

    @property
    def replicated(self) -> NamedSharding:
        """The same on every device: where the state lives under both strategies."""
        return NamedSharding(self.mesh, PartitionSpec())

    def place_state(self, state):
        """The state, from the host or any device, on all devices."""
        return jax.device_put(state, self.replicated)

    def place_batch(self, batch: Batch) -> Batch:
        """This process' rows of a global batch, split over its devices."""
        if self.strategy == "pmap":
            local = jax.local_device_count()
            return jax.tree.map(lambda x: x.reshape(local, -1, *x.shape[1:]), batch)
        rows = NamedSharding(self.mesh, PartitionSpec(AXIS))
        return jax.tree.map(functools.partial(jax.make_array_from_process_local_data, rows), batch)

    def compile_train(self, step: Callable) -> Callable:
        """`step(state, batch, axis_name=…)` → (state, metrics), compiled; the old state's buffers are reused."""
        return self._compile(step, donate_argnums=0)

    def compile_eval(self, step: Callable) -> Callable:
        """`step(params, batch, axis_name=…)` → sums over the global batch, compiled."""
        return self._compile(step)

    def _compile(self, step, **options):
        if self.strategy == "mesh":
            return jax.jit(step, out_shardings=self.replicated, **options)
        # Not mapped over the state: it keeps the shape it has on one device, on disk, and in the other strategy.
        step, devices = functools.partial(step, axis_name=AXIS), self.mesh.devices.tolist()
        return jax.pmap(step, AXIS, in_axes=(None, 0), out_axes=None, devices=devices, **options)


def make(strategy: str, data: int = -1) -> Parallel:
    """The devices of a run.

    Args:
      strategy: "pmap" or "mesh".
      data: devices along the axis "data"; −1 for all there are.

    Raises:
      UserError: more devices than there are, or fewer while there are several processes.

    >>> make("mesh", data=1).mesh.shape["data"]
    1
    """
    try:
        there = jax.device_count()
    except RuntimeError as error:  # JAX_PLATFORMS names what is not there
        raise UserError(f"JAX finds no device: {str(error).splitlines()[0]}") from error
    count = there if data == -1 else data
    if not 1 <= count <= there or (count != there and (jax.process_count() > 1 or strategy == "pmap")):
        raise UserError(
            f"config.parallel.mesh.data = {data}, but there are {there} devices: use −1 for all"
            + (" (pmap always takes all)" if strategy == "pmap" else f", or 1 to {there}")
        )
    devices = jax.devices()[:count]
    return Parallel(strategy, jax.make_mesh((count,), (AXIS,), axis_types=(AxisType.Auto,), devices=devices))


def from_first_process(number: int) -> int:
    """What the first of several processes says, in all of them."""
    return int(multihost_utils.broadcast_one_to_all(np.int32(number))) if jax.process_count() > 1 else int(number)


def check_batch(batch_size: int, devices: int, accumulation: int) -> None:
    """Raises UserError when the global batch does not fall evenly on devices and accumulation steps."""
    share = devices * accumulation
    if batch_size % share:
        below = batch_size // share * share
        choices = " or ".join(str(size) for size in (below, below + share) if size)
        raise UserError(
            f"config.batch_size = {batch_size} is not divisible by devices × accumulation = {devices} × "
            f"{accumulation} = {share}: use {choices}, or fewer devices by config.parallel.mesh.data"
        )
