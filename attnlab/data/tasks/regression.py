"""Linear regression in context: points of an unknown linear function, then a query."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float

from attnlab.data.tasks.task_draws import Number, check_least, compiled, key_of
from attnlab.types import Array


class Regressions(NamedTuple):
    """Linear regression tasks, each with a query."""

    tokens: Float[Array, "B T F1"]  # float32 [B, N + 1, F + 1], the points (x_i, y_i), then the query (x, 0)
    targets: Float[Array, " B"]  # float32 [B], w·x of the query
    weights: Float[Array, "B F"]  # float32 [B, F], w of each task


@compiled
def regressions(step: Number, *, batch_size: int, points: int = 10, inputs: int = 10, seed: Number = 0) -> Regressions:
    """Draw linear regression tasks (von Oswald et al. 2023, section 3): x uniform in (−1, 1), w normal, y = w·x.

    Args:
      points: N, points in the context.
      inputs: F, size of x.
    """
    check_least(batch_size=batch_size, points=points, inputs=inputs)
    weight_key, input_key = jax.random.split(key_of(step, seed))
    weights = jax.random.normal(weight_key, (batch_size, inputs))
    x = jax.random.uniform(input_key, (batch_size, points + 1, inputs), minval=-1, maxval=1)
    y = (x * weights[:, None]).sum(-1)
    tokens = jnp.concatenate([x, y.at[:, -1].set(0)[..., None]], axis=-1)
    return Regressions(tokens, y[:, -1], weights)
