"""Dropout by a hash of key and indices: its rate, its independence, and the same elements for any layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.ops import dropout

INDICES = jnp.ogrid[:4, :128, :256]


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_share_of_dropped_elements_is_the_rate(rate):
    kept = dropout.keep(jax.random.split(jax.random.key(0), 4), rate, *INDICES)
    # 524,288 fair draws: five standard deviations of their mean.
    assert abs(kept.mean() - (1 - rate)) < 5 * np.sqrt(rate * (1 - rate) / kept.size)


def test_neighbouring_elements_drop_independently():
    kept = np.asarray(dropout.keep(jax.random.key(1), 0.5, *INDICES), np.float64) - 0.5
    for axis in range(3):
        pairs = kept.take(range(1, kept.shape[axis]), axis) * kept.take(range(kept.shape[axis] - 1), axis)
        assert abs(pairs.mean() / 0.25) < 5 / np.sqrt(pairs.size)


def test_element_depends_on_its_own_indices_alone():
    keys = jax.random.split(jax.random.key(2), 3)
    whole = dropout.keep(keys, 0.5, *INDICES)
    part = dropout.keep(keys[1], 0.5, jnp.array(2), jnp.arange(64, 128)[:, None], jnp.arange(7, 9))
    np.testing.assert_array_equal(part, whole[1, 2, 64:, 7:9])


def test_new_and_raw_keys_give_the_same_bits():
    new, raw = jax.random.key(3), jax.random.PRNGKey(3)
    np.testing.assert_array_equal(dropout.keep(new, 0.5, *INDICES), dropout.keep(raw, 0.5, *INDICES))
    np.testing.assert_array_equal(
        jax.random.key_data(dropout.per_example(new, (2, 3))), dropout.per_example(raw, (2, 3))
    )


def test_other_keys_drop_other_elements():
    a, b = (dropout.keep(jax.random.key(seed), 0.5, *INDICES) for seed in (0, 1))
    assert abs((a == b).mean() - 0.5) < 0.01


def test_kept_elements_are_scaled_to_keep_the_mean():
    x = dropout.dropout(jnp.ones((4, 64, 64)), jax.random.split(jax.random.key(0), 4), 0.25)
    assert set(np.unique(x).round(4)) == {0, np.float32(1.3333)}
    assert abs(x.mean() - 1) < 0.02


def test_keys_with_other_axes_raise():
    with pytest.raises(ValueError, match=r"batch axes \(3,\), expected \(\) or \(2,\)"):
        dropout.per_example(jax.random.split(jax.random.key(0), 3), (2,))
