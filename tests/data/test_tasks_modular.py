"""Modular addition: all pairs, split in two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.data.tasks import modular_sums


def test_each_pair_is_in_one_part_with_its_sum():
    train, held_out = modular_sums(7, train=0.3)
    tokens, targets = (np.concatenate(parts) for parts in zip(train, held_out))
    assert len(train.targets) == 15  # 0.3 · 49, rounded
    assert {tuple(pair) for pair in tokens[:, :2]} == {(a, b) for a in range(7) for b in range(7)}
    assert (tokens[:, 2] == 7).all() and (targets == tokens[:, :2].sum(1) % 7).all()


def test_modular_split_is_a_pure_function_of_a_traced_seed():
    first, _ = modular_sums(7, train=0.3, seed=1)
    again, _ = jax.jit(lambda seed: modular_sums(7, train=0.3, seed=seed))(jnp.uint32(1))
    np.testing.assert_array_equal(first.tokens, again.tokens)
    assert not np.array_equal(first.tokens, modular_sums(7, train=0.3, seed=2)[0].tokens)


@pytest.mark.parametrize(("p", "train"), [(0, 0.5), (5, 0.0), (5, 1.0), (2, 0.01)])
def test_modular_split_without_pairs_is_one_line(p, train):
    with pytest.raises(ValueError, match=f"p = {p} and train = {train} "):
        modular_sums(p, train=train)
