"""One pure step on all devices: replicated by `jax.pmap`, or sharded by `jax.jit` over a named mesh."""

import contextlib
import functools
import re
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from attnlab.data.batches import Batch
from attnlab.errors import UserError

DATA, FSDP = "data", "fsdp"

# Which axis of a parameter lies split over which axis of the mesh; all others, biases and norms, are on every device.
# A tensor axis would join at the heads, and at the wide side of the MLP.
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
      mesh: the devices, along the axes "data" and "fsdp": both split the batch, the second the state as well (Zhao et
        al. 2023, Rajbhandari et al. 2020).
    """

    strategy: str
    mesh: jax.sharding.Mesh

    @property
    def replicated(self) -> NamedSharding:
        """The same on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def shardings(self, state):
        """Where each leaf of a state lies, by `RULES`; the optimizer's moments lie where their parameters do."""

        def place(path, _):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            axes = next((axes for rule, axes in RULES if re.search(rule, name)), ())
            return NamedSharding(self.mesh, PartitionSpec(*axes))

        return jax.tree_util.tree_map_with_path(place, state)

    def create_state(self, create: Callable):
        """The state that `create()` makes; where it is split, no device ever holds more of it than its share."""
        if self.mesh.shape[FSDP] == 1:  # on one device first: several that run out of memory wait for each other
            return jax.device_put(create(), self.replicated)
        return jax.jit(create, out_shardings=self.shardings(jax.eval_shape(create)))()

    def over_processes(self, state):
        """The state as arrays that span all processes, as they are saved: those of `pmap` know this one's devices."""
        if self.strategy == "mesh" or jax.process_count() == 1:
            return state

        def span(x):
            shards = [shard.data for shard in x.addressable_shards]
            return jax.make_array_from_single_device_arrays(x.shape, self.replicated, shards)

        return jax.tree.map(span, state)

    def on_every_device(self, tree):
        """Copies of a sharded tree; asked for in every process."""
        if self.mesh.shape[FSDP] == 1:
            return tree
        return jax.jit(lambda tree: tree, out_shardings=self.replicated)(tree)

    def place_batch(self, batch: Batch) -> Batch:
        """This process' rows of a global batch, split over its devices."""
        if self.strategy == "pmap":
            local = jax.local_device_count()
            return jax.tree.map(lambda x: x.reshape(local, -1, *x.shape[1:]), batch)
        rows = NamedSharding(self.mesh, PartitionSpec((DATA, FSDP)))
        return jax.tree.map(functools.partial(jax.make_array_from_process_local_data, rows), batch)

    def transfer_guard(self):
        """For a step: nothing goes to or from the devices in it, but the rows that `pmap` itself brings to its own."""
        return jax.transfer_guard("disallow") if self.strategy == "mesh" else contextlib.nullcontext()

    def compile_train(self, step: Callable, state) -> Callable:
        """`step(state, batch, axis_name=…)` → (state, metrics), compiled; the old state's buffers are reused.

        Args:
          step: pure.
          state: one, or its shapes.
        """
        return self._compile(step, (self.shardings(state), self.replicated), donate_argnums=0)

    def compile_eval(self, step: Callable) -> Callable:
        """`step(params, batch, axis_name=…)` → sums over the global batch, compiled."""
        return self._compile(step, self.replicated)

    def _compile(self, step, out_shardings, **options):
        if self.strategy == "mesh":
            return jax.jit(step, out_shardings=out_shardings, **options)
        # Not mapped over the state: it keeps the shape it has on one device, on disk, and in the other strategy.
        step, devices = functools.partial(step, axis_name=DATA), self.mesh.devices.ravel().tolist()
        return jax.pmap(step, DATA, in_axes=(None, 0), out_axes=None, devices=devices, **options)


def make(strategy: str, data: int = -1, fsdp: int = 1) -> Parallel:
    """The devices of a run.

    Args:
      strategy: "pmap" or "mesh".
      data: devices along the axis "data"; −1 for all there are.
      fsdp: devices along the axis "fsdp", over which the state is split as well.

    Raises:
      UserError: more devices than there are, or fewer while there are several processes.

    >>> make("mesh", data=1).mesh.shape["data"]
    1
    """
    try:
        there = jax.device_count()
    except RuntimeError as error:  # JAX_PLATFORMS names what is not there
        raise UserError(f"JAX finds no device: {str(error).splitlines()[0]}") from error
    if fsdp < 1 or there % fsdp or (strategy == "pmap" and fsdp > 1):
        raise UserError(
            f"config.parallel.mesh.fsdp = {fsdp}, but there are {there} devices: use a number that divides them"
            + (", with config.parallel.strategy=mesh" if strategy == "pmap" else "")
        )
    data, given = (there // fsdp, data) if data == -1 else (data, data)
    count = data * fsdp
    if not 1 <= count <= there or (count != there and (jax.process_count() > 1 or strategy == "pmap")):
        raise UserError(
            f"config.parallel.mesh.data = {given}, but there are {there} devices: use −1 for all"
            + (" (pmap always takes all)" if strategy == "pmap" else f", or 1 to {there // fsdp}")
        )
    types, devices = (AxisType.Auto,) * 2, jax.devices()[:count]
    return Parallel(strategy, jax.make_mesh((data, fsdp), (DATA, FSDP), axis_types=types, devices=devices))


def from_first_process(number: int) -> int:
    """What the first of several processes says, in all of them, when all have asked.

    >>> from_first_process(7)
    7
    """
    return int(multihost_utils.broadcast_one_to_all(np.int32(number))) if jax.process_count() > 1 else int(number)


def check_width(width: int, fsdp: int) -> None:
    """Raises UserError when parameters cannot be split evenly along the model's width."""
    if width % fsdp:
        raise UserError(f"config.model.width = {width} is not divisible by config.parallel.mesh.fsdp = {fsdp}")


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
