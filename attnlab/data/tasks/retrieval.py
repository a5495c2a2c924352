"""Finding the largest of many items."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from attnlab.data.tasks.task_draws import Number, check_least, compiled, key_of
from attnlab.types import Array


class Items(NamedTuple):
    """Sets of items, each with a value and a class."""

    values: Float[Array, "B N"]  # float32 [B, N], in [0, 1)
    classes: Int[Array, "B N"]  # int32 [B, N]
    real: Bool[Array, "B N"]  # bool [B, N], False where a set is shorter than N
    largest: Int[Array, " B"]  # int32 [B], index of the item of largest value
    targets: Int[Array, " B"]  # int32 [B], the class of that item


@compiled
def largest_of(
    step: Number, *, batch_size: int, items: int, fewest: int | None = None, classes: int = 10, seed: Number = 0
) -> Items:
    """Draw sets of items with uniform values; targets are classes of the largest (Veličković et al. 2024, section 3).

    Args:
      items: N, the most items of a set.
      fewest: the fewest, with set sizes uniform between both; None for N.
      classes: number of classes.
    """
    fewest = items if fewest is None else fewest
    check_least(batch_size=batch_size, fewest=fewest, classes=classes)
    check_least(fewest, items=items)
    value_key, class_key, size_key = jax.random.split(key_of(step, seed), 3)
    values = jax.random.uniform(value_key, (batch_size, items))
    drawn = jax.random.randint(class_key, (batch_size, items), 0, classes, jnp.int32)
    sizes = jax.random.randint(size_key, (batch_size, 1), fewest, items + 1)
    real = jnp.arange(items) < sizes
    largest = jnp.where(real, values, -1).argmax(-1).astype(jnp.int32)
    return Items(values, drawn, real, largest, jnp.take_along_axis(drawn, largest[:, None], axis=1)[:, 0])
