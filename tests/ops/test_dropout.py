"""Dropout by a hash of key and indices: its rate, its independence, and the same elements for any layout."""

import functools

import jax
import numpy as np
import pytest

from attnlab.ops import dropout

INDICES = np.ogrid[:4, :128, :256]


@functools.partial(jax.jit, static_argnums=(1, 2))
def keep(seed, rate, count=None):
    """Kept elements for the key of `seed`, or for `count` keys split from it."""
    key = jax.random.key(seed)
    return dropout.keep(key if count is None else jax.random.split(key, count), rate, *INDICES)


def test_share_of_dropped_elements_is_the_rate():
    rate = 0.1
    kept = np.asarray(keep(0, rate, 4))
    # 524,288 independent draws: five standard deviations of their mean.
    assert abs(kept.mean() - (1 - rate)) < 5 * np.sqrt(rate * (1 - rate) / kept.size)


def test_neighbouring_elements_drop_independently():
    centred = np.asarray(keep(1, 0.5), np.float64) - 0.5
    for axis in range(3):
        pairs = centred.take(range(1, centred.shape[axis]), axis) * centred.take(range(centred.shape[axis] - 1), axis)
        assert abs(pairs.mean() / 0.25) < 5 / np.sqrt(pairs.size)


def test_element_depends_on_its_own_indices_alone():
    @jax.jit
    def run():
        keys = jax.random.split(jax.random.key(2), 3)
        some = np.array(2), np.arange(64, 128)[:, None], np.arange(7, 9)
        return dropout.keep(keys, 0.5, *INDICES), dropout.keep(keys[1], 0.5, *some)

    whole, part = run()
    np.testing.assert_array_equal(part, np.asarray(whole)[1, 2, 64:, 7:9])


def test_new_and_raw_keys_give_the_same_bits():
    @jax.jit
    def run():
        new, raw = jax.random.key(3), jax.random.PRNGKey(3)
        several = [dropout.per_example(key, (2, 3)) for key in (new, raw)]
        bits = [dropout.keep(key, 0.5, *INDICES) for key in (new, raw)]
        return bits, (jax.random.key_data(several[0]), several[1])

    for new_bits, raw_bits in run():
        np.testing.assert_array_equal(new_bits, raw_bits)


def test_kept_elements_are_scaled_to_keep_the_mean():
    run = jax.jit(lambda x: dropout.dropout(x, jax.random.split(jax.random.key(0), 4), 0.25))
    x = np.asarray(run(np.ones((4, 64, 64), np.float32)))
    assert set(np.unique(x).round(4)) == {0, np.float32(1.3333)}
    assert abs(x.mean() - 1) < 0.02


def test_keys_with_wrong_batch_axes_raise():
    with pytest.raises(ValueError, match=r"batch axes \(3,\), .*\(2,\)"):
        jax.eval_shape(lambda: dropout.per_example(jax.random.split(jax.random.key(0), 3), (2,)))
