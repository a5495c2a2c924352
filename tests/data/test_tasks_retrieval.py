"""Finding the largest item."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.data.tasks import largest_of


def test_target_is_the_class_of_the_largest_real_item():
    batch = jax.tree.map(np.asarray, largest_of(0, batch_size=300, items=9, fewest=2, classes=4))
    for values, classes, real, largest, target in zip(*batch):
        assert largest == max(np.flatnonzero(real), key=lambda i: values[i]) and target == classes[largest]
        assert real[: real.sum()].all()  # shorter sets are padded at their end
    assert set(batch.real.sum(1)) == set(range(2, 10)) and set(batch.classes.flat) == set(range(4))


def test_set_of_fixed_size_has_no_padding():
    assert largest_of(0, batch_size=5, items=3).real.all()


def test_largest_of_is_a_pure_function_of_traced_numbers():
    first = largest_of(3, batch_size=4, items=5, seed=1)
    again = jax.jit(lambda step, seed: largest_of(step, batch_size=4, items=5, seed=seed))(jnp.int32(3), jnp.uint32(1))
    np.testing.assert_array_equal(first.values, again.values)
    assert not np.array_equal(first.values, largest_of(4, batch_size=4, items=5, seed=1).values)
    assert not np.array_equal(first.values, largest_of(3, batch_size=4, items=5, seed=2).values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"items": 0}, "items = 0"),
        ({"classes": 0}, "classes = 0"),
        ({"fewest": 0}, "fewest = 0: .*items = 5"),
        ({"fewest": 6}, "fewest = 6: .*items = 5"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_largest_of_impossible_sizes_is_one_line(change, message):
    with pytest.raises(ValueError, match=message):
        largest_of(0, **({"batch_size": 2, "items": 5} | change))
