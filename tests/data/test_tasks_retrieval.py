"""Finding the largest item."""

import jax
import numpy as np

from attnlab.data.tasks import largest_of


def test_target_is_the_class_of_the_largest_real_item():
    batch = jax.tree.map(np.asarray, largest_of(0, batch_size=300, items=9, fewest=2, classes=4))
    for values, classes, real, largest, target in zip(*batch):
        assert largest == max(np.flatnonzero(real), key=lambda i: values[i]) and target == classes[largest]
        assert real[: real.sum()].all()  # shorter sets are padded at their end
    assert set(batch.real.sum(1)) == set(range(2, 10)) and set(batch.classes.flat) == set(range(4))


def test_set_of_fixed_size_has_no_padding():
    assert largest_of(0, batch_size=5, items=3).real.all()
