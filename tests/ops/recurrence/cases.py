"""Random calls of the linear recurrence: float64 arrays in which each row of the batch is a case."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnlab import linear_recurrence
from attnlab.testing.subject import with_gradients

SCHEDULES = ("chunked", "parallel")


class Shape(NamedTuple):
    """The sizes and terms that a program is compiled for."""

    batch: int
    length: int
    heads: tuple[int, int, int] = (2, 2, 2)  # numbers of query, key and value heads
    features: int = 4
    values: int = 3
    decay: str = "none"
    erasure: str = "none"


def draw(seed: int, shape: Shape, *, strongest=8.0) -> dict:
    """q, k, v, g, beta or erase, state, segment_ids and lengths (from 0) of a call."""
    rng = np.random.default_rng(seed)
    batch, length, (queries, keys, heads), features, values, decay, erasure = shape
    normal, by_head = rng.standard_normal, (batch, length, heads)
    k = unit(normal((batch, length, keys, features)))
    drawn = {"q": normal((batch, length, queries, features)), "k": k, "v": normal((*by_head, values))}
    if decay != "none":
        size = (*by_head, features) if decay == "feature" else by_head
        # Some states hardly decay, others forget at once.
        drawn["g"] = -np.exp(rng.uniform(np.log(1e-4), np.log(strongest), size))
    if erasure == "beta":
        drawn["beta"] = rng.uniform(0, 2, by_head)
    if erasure == "pair":  # e rᵀ of norm at most 1, so that states stay bounded
        e, r = (unit(normal((*by_head, features))) for _ in range(2))
        drawn["erase"] = (e * rng.uniform(0, 1, (*by_head, 1)), r)
    drawn["state"] = normal((batch, heads, features, values)) * (rng.random((batch, 1, 1, 1)) < 0.7)
    drawn["segment_ids"] = np.cumsum(rng.random((batch, length)) < rng.choice([0, 0.05, 0.5], (batch, 1)), axis=1)
    drawn["lengths"] = np.where(rng.random(batch) < 0.3, length, rng.integers(0, length + 1, batch))
    return drawn


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def floating(drawn: dict) -> dict:
    """The floating-point arrays of a call, which have gradients."""
    return {name: x for name, x in drawn.items() if name not in ("segment_ids", "lengths")}


def results(drawn: dict, dtype=np.float64, function=linear_recurrence, **options) -> dict:
    """out, state, and the gradients of all floating arrays, from a call in `dtype`; run it under `jit`."""
    arrays = jax.tree.map(lambda x: jnp.asarray(x, dtype), floating(drawn))
    integers = {name: x for name, x in drawn.items() if name not in arrays}

    def outputs(arrays):
        return dict(zip(("out", "state"), function(**arrays, **integers, **{"return_state": True, **options})))

    return with_gradients(outputs, arrays, weights)


def weights(outputs: dict) -> dict:
    """A weight of at most 1 for each element, so that no two gradients cancel."""
    # The zeros are sharded like the result.
    return {name: jnp.zeros_like(x) + jnp.cos(jnp.arange(x.size)).reshape(x.shape) for name, x in outputs.items()}


def assert_close(actual: dict, expected: dict, tolerance):
    """Assert differences of at most `tolerance` (a number, or one per row) times max(1, the row's largest element)."""
    assert actual.keys() == expected.keys()
    for name in expected:
        for x, y in zip(jax.tree.leaves(actual[name]), jax.tree.leaves(expected[name]), strict=True):
            x, y = np.asarray(x), np.asarray(y)
            largest = np.maximum(1, np.abs(y).max(axis=tuple(range(1, y.ndim)), keepdims=True, initial=0))
            bound = np.reshape(tolerance, (-1, *[1] * (y.ndim - 1))) * largest
            np.testing.assert_array_less(np.abs(x - y), np.broadcast_to(bound, y.shape), err_msg=name)
