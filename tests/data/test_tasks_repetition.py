"""Random tokens that repeat."""

import numpy as np

from attnlab.data.tasks import repeats


def test_repeats_draws_a_period_for_each_sequence():
    tokens = np.asarray(repeats(0, batch_size=200, length=24, vocab_size=1000))
    periods = [next(p for p in range(1, 25) if (row[p:] == row[:-p]).all()) for row in tokens]
    assert tokens.shape == (200, 24) and set(periods) == set(range(6, 13))
