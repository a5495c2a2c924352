"""Runs that are trained as one program: several runs add an axis to states, batches and metrics."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.data.batches import Batches, Stacked
from attnlab.training.state import TrainState


class Population(NamedTuple):
    """n runs that start from the same step and differ only in seed and learning rates.

    A single run has no axis of runs. With several runs, state, batches and metrics have a leading axis of runs, and the
    state is (states, bool `[n]`). The bool of a run becomes False when the run ends, or when a step produces parameters
    that are not finite; from then on its state does not change, while the other runs continue.

    >>> Population().join([3]), Population(2).join([jnp.ones(4), jnp.zeros(4)])[0].shape
    (3, (2, 4))
    """

    n: int = 1

    def join(self, states: Sequence[Any]) -> Any:
        """Return the state of the population; with several runs, free the memory of `states`."""
        if self.n == 1:
            return states[0]
        joined = _joined(states)
        for leaf in jax.tree.leaves(states):
            leaf.delete()
        return joined

    def of_run(self, state, index: int) -> TrainState:
        """The state of one run."""
        return state if self.n == 1 else _row(state[0], index)

    def states(self, state) -> TrainState:
        """The states of the runs, with the axis of runs if there are several."""
        return state if self.n == 1 else state[0]

    def end(self, state, index: int):
        """The state after the end of a run."""
        return state if self.n == 1 else (state[0], state[1].at[index].set(False))

    def stack(self, batches: Sequence[Batches]) -> Batches:
        """Batches of the population by step, from the batches of each run."""
        return batches[0] if self.n == 1 else Stacked(batches)

    def values(self, trees: Sequence[Any]) -> Any:
        """Combine each run's tree of numbers into one tree."""
        return trees[0] if self.n == 1 else jax.tree.map(lambda *x: np.stack(x), *trees)

    def rows(self, metrics) -> dict[str, np.ndarray]:
        """Metrics on the host, `[steps, n]`."""
        return {name: x.reshape(len(x), self.n) for name, x in jax.device_get(metrics).items()}

    def step(self, step: Callable) -> Callable:
        """A step `(state, batch, per_run) → (state, metrics)` of the population, from the step of one run."""
        return step if self.n == 1 else _of_all(step)

    def shapes(self, tree, sharding):
        """A run's tree of `jax.ShapeDtypeStruct`, with an axis of runs if there are several, and with `sharding`."""
        outer = () if self.n == 1 else (self.n,)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*outer, *x.shape), x.dtype, sharding=sharding), tree)

    @property
    def axes(self) -> tuple[int, ...]:
        """Sizes of the leading axes of runs: () or (n,)."""
        return () if self.n == 1 else (self.n,)


@jax.jit
def _joined(states: Sequence[Any]):
    return jax.tree.map(lambda *x: jnp.stack(x), *states), jnp.ones(len(states), bool)


@jax.jit
def _row(states, index):
    return jax.tree.map(lambda x: x[index], states)


def _of_all(step: Callable) -> Callable:
    """A step of several runs; a run ends if its parameters would become non-finite."""

    def step_all(state, batches, per_run):
        before, alive = state
        after, metrics = jax.vmap(step)(before, batches, per_run)
        alive &= jnp.isfinite(metrics["param_norm"])

        def advanced(new, old):
            return jnp.where(alive.reshape(-1, *[1] * (new.ndim - 1)), new, old)

        return (jax.tree.map(advanced, after, before), alive), metrics

    return step_all
