"""Drawn tasks: batches as pure functions of step and seed, traced or not; impossible sizes; distributions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab._studies.copying import copies
from attnlab._studies.dispersion import largest_of
from attnlab._studies.gradient_step import regressions
from attnlab._studies.grokking import modular_sums
from attnlab._studies.markov import chains
from attnlab._studies.sinks import backcopy
from attnlab.data import tasks

OPTIONS = {
    "backcopy": {"batch_size": 2, "length": 9},
    "chains": {"batch_size": 4, "length": 9},
    "copies": {"kind": "reverse", "batch_size": 9, "lengths": [2, 4], "vocab_size": 12},
    "inductions": {"batch_size": 4, "length": 9},
    "largest_of": {"batch_size": 4, "items": 5},
    "modular_sums": {"p": 7, "train": 0.3},
    "recall": {"batch_size": 9, "pairs": [1, 3], "vocab_size": 20},
    "regressions": {"batch_size": 4},
    "repeats": {"batch_size": 4, "length": 20},
    "running_sums": {"batch_size": 4, "base": 3, "shortest": 2, "longest": 9},
    "selective_copies": {"batch_size": 4, "length": 9, "symbols": 3},
    "spread_recall": {"batch_size": 4, "pairs": 3, "length": 20, "vocab_size": 20},
}
STUDIES = {draw.__name__: draw for draw in (backcopy, chains, copies, largest_of, modular_sums, regressions)}
DRAWS = vars(tasks) | STUDIES
NAMED = {"inductions", "running_sums", "selective_copies", "spread_recall"}  # tested as tasks of a config


def first_array(drawn) -> np.ndarray:
    return np.asarray(jax.tree.leaves(drawn)[0])


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in STUDIES else []) for name in sorted(OPTIONS.keys() - NAMED)],
)
def test_batch_is_a_pure_function_of_step_and_seed_traced_or_not(name):
    draw = functools.partial(DRAWS[name], **OPTIONS[name])
    draw = draw if name != "modular_sums" else lambda step, seed, drawn=draw: drawn(seed=seed + 10 * step)
    first = first_array(draw(step=3, seed=1))
    traced = jax.jit(lambda step, seed: draw(step=step, seed=seed))(jnp.int32(3), jnp.int32(1))
    np.testing.assert_array_equal(first, first_array(traced))
    assert not np.array_equal(first, first_array(draw(step=4, seed=1)))
    assert not np.array_equal(first, first_array(draw(step=3, seed=2)))


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("backcopy", {"rate": 1.0}, r"rate = 1\.0: expected a rate between 0 and 1"),
        ("backcopy", {"vocab_size": 5}, "vocab_size = 5: expected 6 or more"),
        ("chains", {"states": 1}, "states = 1: expected 2 or more"),
        ("copies", {"kind": "sort"}, "kind = 'sort'"),
        ("copies", {"lengths": [0, 2]}, "lengths = 0: expected 1 or more"),
        ("copies", {"vocab_size": 3}, "vocab_size = 3: expected 4 or more"),
        ("inductions", {"length": 4, "triggers": 2}, "length = 4: expected 6 or more"),
        ("largest_of", {"fewest": 6}, "items = 5: expected 6 or more"),
        ("modular_sums", {"train": 1.0}, r"p = 7 and train = 1\.0 "),
        ("recall", {"pairs": []}, "pairs = 0: expected 1 or more"),
        ("recall", {"pairs": [10]}, "vocab_size = 20: expected 21 or more"),
        ("recall", {"rewrites": -1}, "rewrites = -1: expected 0 or more"),
        ("regressions", {"points": 0}, "points = 0: expected 1 or more"),
        ("repeats", {"periods": [0, 2]}, "periods = 0: expected 1 or more"),
        ("running_sums", {"longest": 1}, "longest = 1: expected 2 or more"),
        ("selective_copies", {"length": 4}, "length = 4: expected 6 or more"),
        ("spread_recall", {"length": 11}, "length = 11: expected 12 or more"),
    ],
)
def test_impossible_size_raises_one_line(name, change, message):
    first = () if name == "modular_sums" else (0,)
    options = OPTIONS[name] | change
    first = (options.pop("kind"), *first) if "kind" in options else first
    with pytest.raises(ValueError, match=message):
        DRAWS[name](*first, **options)


def test_repeats_draws_a_period_for_each_sequence():
    tokens = np.asarray(tasks.repeats(0, batch_size=200, length=24, vocab_size=1000))
    periods = [next(p for p in range(1, 25) if (row[p:] == row[:-p]).all()) for row in tokens]
    assert tokens.shape == (200, 24) and set(periods) == set(range(6, 13))


def test_recall_targets_are_the_values_of_the_queried_keys():
    tokens, targets, pairs = map(np.asarray, tasks.recall(0, batch_size=300, pairs=(1, 3, 6), vocab_size=20))
    assert tokens.shape == (300, 18) and targets.shape == (300, 6) and set(pairs) == {1, 3, 6}
    assert {leaf.dtype for leaf in (tokens, targets, pairs)} == {np.dtype(np.int32)}
    for row, wanted, n in zip(tokens, targets, pairs):
        blanks, shown, queries = np.split(row, [12 - 2 * n, 12])
        keys, values = shown[::2], shown[1::2]
        assert (blanks == 0).all() and len(set(keys)) == len(set(values)) == n
        assert (keys >= 1).all() and (keys <= 9).all() and (values >= 10).all() and (values <= 18).all()
        value_of = dict(zip(keys, values))
        np.testing.assert_array_equal([value_of[key] for key in queries], wanted)
        for start in range(0, 6, n):  # every key once before any repeats
            assert len(set(queries[start : start + n])) == len(queries[start : start + n])


def test_recall_order_of_queries_is_uniform():
    first = np.asarray(tasks.recall(0, batch_size=6000, pairs=[3], vocab_size=20).tokens)
    queried = (first[:, 0:6:2] == first[:, 6:7]).argmax(1)
    # A third of 6,000 draws, 2,000 ± 37 (one standard deviation); five deviations are allowed.
    np.testing.assert_allclose(np.bincount(queried), 2000, atol=5 * 37)


@pytest.mark.parametrize("noise", [False, True])
def test_spread_recall_queries_each_key_once_at_even_distances(noise):
    drawn = tasks.spread_recall(1, batch_size=200, pairs=3, length=15, vocab_size=20, noise=noise)
    tokens, targets = map(np.asarray, drawn)
    assert tokens.shape == targets.shape == (200, 15) and tokens.dtype == targets.dtype == np.int32
    for row, wanted in zip(tokens, targets):
        value_of, (places,) = dict(row[:6].reshape(3, 2).tolist()), np.nonzero(wanted >= 0)
        assert len(value_of) == len(set(value_of.values())) == 3
        assert max(value_of) <= 9 < min(value_of.values()) and max(value_of.values()) <= 18
        assert (places >= 6).all() and (places % 2 == 0).all() and sorted(row[places]) == sorted(value_of)
        assert wanted[places].tolist() == [value_of[key] for key in row[places]]
    filler = tokens[:, 6:][targets[:, 6:] < 0]
    # In 1,200 draws from 20 tokens, each is missing with probability e^−60.
    assert set(filler) == (set(range(20)) if noise else {0})


def test_spread_recall_query_distances_follow_their_power_law():
    targets = np.asarray(tasks.spread_recall(0, batch_size=20000, pairs=1, length=12, vocab_size=9).targets)
    shares = (targets >= 0)[:, 2::2].mean(0)
    weights = (1.0 + np.arange(5)) ** -0.99
    expected = weights / weights.sum()
    assert (np.abs(shares - expected) < 5 * (expected * (1 - expected) / 20000) ** 0.5).all()
