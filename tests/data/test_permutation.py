"""The order of windows: a permutation, equal to Grain's, so that a run does not depend on which of them computed it."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from attnlab.data.permutation import permuted


@given(size=st.integers(1, 2**45), place=st.floats(0, 1), seed=st.integers(0, 2**32 - 1))
@example(size=2**14 + 1, place=1.0, seed=5)
@example(size=2**17 + 1, place=1.0, seed=5)  # the last index has 18 bits, although its logarithm is 17
def test_permuted_index_equals_grains(size, place, seed):
    index_shuffle = pytest.importorskip("grain.experimental").index_shuffle
    index = min(int(place * size), size - 1)
    expected = index_shuffle(index, max_index=size - 1, seed=seed, rounds=4) if size > 1 else 0
    assert permuted(np.array([index]), size, seed) == [expected]


@pytest.mark.parametrize("size", [1, 2, 1000, 4**8 + 1])  # for the last size, Grain gives one index twice
def test_permuted_range_is_a_permutation(size):
    indices = permuted(np.arange(size), size, seed=7)
    np.testing.assert_array_equal(np.sort(indices), np.arange(size))
