"""The task of associative recall: its answers, its order, and impossible sizes."""

import numpy as np
import pytest

from attnlab.data.tasks import recall, spread_recall

PAIRS = (1, 3, 6)


def batch(step=0, **options):
    return recall(step, **({"batch_size": 300, "pairs": PAIRS, "vocab_size": 20} | options))


def test_recall_targets_are_the_values_of_the_keys_asked_for():
    drawn = batch()
    tokens, targets, pairs = map(np.asarray, drawn)
    assert tokens.shape == (300, 18) and targets.shape == (300, 6) and set(pairs) == set(PAIRS)
    assert {leaf.dtype for leaf in (tokens, targets, pairs)} == {np.dtype(np.int32)}
    for row, wanted, n in zip(tokens, targets, pairs):
        blanks, shown, asked = np.split(row, [12 - 2 * n, 12])
        keys, values = shown[::2], shown[1::2]
        assert (blanks == 0).all() and len(set(keys)) == len(set(values)) == n
        assert (keys >= 1).all() and (keys <= 9).all() and (values >= 10).all() and (values <= 18).all()
        value_of = dict(zip(keys, values))
        np.testing.assert_array_equal([value_of[key] for key in asked], wanted)
        for start in range(0, 6, n):  # all keys, before any once more
            assert len(set(asked[start : start + n])) == len(asked[start : start + n])


def test_recall_order_of_questions_is_uniform():
    first = np.asarray(batch(batch_size=6000, pairs=[3]).tokens)
    asked = (first[:, 0:6:2] == first[:, 6:7]).argmax(1)
    # Of 6,000 draws a third, 2,000 ± 37 (one deviation): five of them.
    np.testing.assert_allclose(np.bincount(asked), 2000, atol=5 * 37)


@pytest.mark.parametrize("noise", [False, True])
def test_spread_recall_asks_for_each_key_once_at_an_even_distance_from_the_pairs(noise):
    drawn = spread_recall(1, batch_size=200, pairs=3, length=15, vocab_size=20, noise=noise)
    tokens, targets = map(np.asarray, drawn)
    assert tokens.shape == targets.shape == (200, 15) and tokens.dtype == targets.dtype == np.int32
    for row, wanted in zip(tokens, targets):
        value_of, (places,) = dict(row[:6].reshape(3, 2).tolist()), np.nonzero(wanted >= 0)
        assert len(value_of) == len(set(value_of.values())) == 3
        assert max(value_of) <= 9 < min(value_of.values()) and max(value_of.values()) <= 18
        assert (places >= 6).all() and (places % 2 == 0).all() and sorted(row[places]) == sorted(value_of)
        assert wanted[places].tolist() == [value_of[key] for key in row[places]]
    filler = tokens[:, 6:][targets[:, 6:] < 0]
    # Of 1,200 draws from 20 tokens each is missing with probability e^−60.
    assert set(filler) == (set(range(20)) if noise else {0})


def test_spread_recall_asks_soon_more_often_by_its_law():
    targets = np.asarray(spread_recall(0, batch_size=20000, pairs=1, length=12, vocab_size=9).targets)
    found = (targets >= 0)[:, 2::2].mean(0)
    weights = (1.0 + np.arange(5)) ** -0.99
    expected = weights / weights.sum()
    assert (np.abs(found - expected) < 5 * (expected * (1 - expected) / 20000) ** 0.5).all()
