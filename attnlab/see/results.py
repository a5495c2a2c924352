"""Results of looking inside a model: the values of a run, and the effects of edits."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.types import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Run:
    """A forward pass: what the model returned, and the values that were captured on the way.

    A pytree, so it passes through `jit`, `vmap` and `grad`.

    Attributes:
      out: what the model returned.
      values: arrays by name, then by the path of the site, e.g. `values["pattern"]["block_0/attention"]`
        `[B, H, Tq, Tk]`.
      order: the paths in the order in which the model computes them.

    >>> run = Run(out=jnp.ones(3), values={"z": {"b": jnp.ones((1, 2)), "a": jnp.zeros((1, 2))}}, order=("b", "a"))
    >>> run.stack("z").shape, run.paths("z")
    ((2, 1, 2), ('b', 'a'))
    """

    out: Any
    values: dict[str, dict[str, Array]]
    order: tuple[str, ...] = dataclasses.field(metadata={"static": True}, default=())

    def paths(self, name: str) -> tuple[str, ...]:
        """The paths at which values of that name were captured, in the order of the computation."""
        return tuple(path for path in self.order if path in self.values.get(name, {}))

    def stack(self, name: str) -> Array:
        """The values of all layers, `[L, …]`.

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
    """A metric of the model's output under one edit at a time.

    Attributes:
      values: the metric, one axis for each of `axes`, e.g. `[L, H]`.
      axes: names of the axes, of "layer", "head", "position", "receiver layer", "receiver head".
      paths: of the L sites.
      baseline: the metric without an edit, of the run that is edited.
      target: of patching, the metric of the run that values are taken from.

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
        """The metric minus that of the unedited run."""
        return self.values - self.baseline

    @property
    def recovered(self) -> np.ndarray:
        """The share of the difference between the two runs that each edit brings, 0 for none and 1 for all of it.

        Raises:
          ValueError: there is one run alone, as for `ablate`, or the two have the same metric.
        """
        if self.target is None or self.target == self.baseline:
            raise ValueError(f"recovered needs two runs of different metrics: got {self.baseline} and {self.target}")
        return self.change / (self.target - self.baseline)
