"""Modular addition: all pairs, split in two."""

import numpy as np

from attnlab.data.tasks import modular_sums


def test_each_pair_is_in_one_part_with_its_sum():
    train, held_out = modular_sums(7, train=0.3)
    tokens, targets = (np.concatenate(parts) for parts in zip(train, held_out))
    assert len(train.targets) == 15  # 0.3 · 49, rounded
    assert {tuple(pair) for pair in tokens[:, :2]} == {(a, b) for a in range(7) for b in range(7)}
    assert (tokens[:, 2] == 7).all() and (targets == tokens[:, :2].sum(1) % 7).all()
