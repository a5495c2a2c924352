"""Results: the values of a run, and the effects of edits."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.types import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Run:
    """A forward pass as a pytree: the model's result and the captured values.

    Attributes:
      out: the model's result.
      values: arrays by name, then by site, e.g. `values["pattern"]["block_0/attention"]` `[B, H, Tq, Tk]`.
      order: the paths in the order of the computation.

    >>> run = Run(out=jnp.ones(3), values={"z": {"b": jnp.ones((1, 2)), "a": jnp.zeros((1, 2))}}, order=("b", "a"))
    >>> run.stack("z").shape, run.paths("z")
    ((2, 1, 2), ('b', 'a'))
    """

    out: Any
    values: dict[str, dict[str, Array]]
    order: tuple[str, ...] = dataclasses.field(metadata={"static": True}, default=())

    def paths(self, name: str) -> tuple[str, ...]:
        """The paths at which a value of this name was captured, in the order of the computation."""
        return tuple(path for path in self.order if path in self.values.get(name, {}))

    def stack(self, name: str) -> Array:
        """The values of this name, stacked over the L layers: `[L, …]`.

        Raises:
          ValueError: nothing of that name was captured, or the layers differ in shape.
        """
        layers = [self.values[name][path] for path in self.paths(name)]
        if not layers:
            raise ValueError(f"{name!r} was not captured, only {', '.join(self.values) or 'nothing'}: name it in want=")
        shapes = {path: jnp.shape(self.values[name][path]) for path in self.paths(name)}
        if len(set(shapes.values())) > 1:
            raise ValueError(f"{name!r} differs in shape between layers, {shapes}: use values[{name!r}][path]")
        return jnp.stack(layers)


@dataclasses.dataclass(frozen=True)
class Effects:
    """A metric of the model's result under one edit at a time.

    Attributes:
      values: the metric, with one axis for each of `axes`, e.g. `[L, H]`.
      axes: names of the axes, among "layer", "head" and "position".
      paths: paths of the L sites.
      baseline: the metric of the unedited run.
      target: the metric of the run that the patched values come from; None for `ablate`.

    >>> effects = Effects(np.array([[1.0, 2.0]]), ("layer", "head"), ("block_0/attention",), baseline=1.0, target=3.0)
    >>> effects.change, effects.recovered
    (array([[0., 1.]]), array([[0. , 0.5]]))
    """

    values: np.ndarray
    axes: tuple[str, ...]
    paths: tuple[str, ...]
    baseline: float
    target: float | None = None

    @property
    def change(self) -> np.ndarray:
        """The metric minus the baseline."""
        return self.values - self.baseline

    @property
    def recovered(self) -> np.ndarray:
        """(values − baseline) / (target − baseline): 0 for no effect, 1 for the other run's metric.

        Raises:
          ValueError: there is only one run, as in `ablate`, or both runs have the same metric.
        """
        if self.target is None or self.target == self.baseline:
            raise ValueError(f"recovered needs two runs with different metrics: got {self.baseline} and {self.target}")
        return self.change / (self.target - self.baseline)
