"""The global batch is a pure function of (seed, step), however many processes read it."""

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlab.data.batches import EvalBatches, TrainBatches, interleave, prefetched
from attnlab.support.errors import UserError

# Long, because few windows are slow to permute: each is permuted among 2^16 numbers until it is in range.
TEXT = np.arange(100_000)


def train(tokens=TEXT, context=8, batch_size=6, seed=0, **shares):
    return TrainBatches(tokens, context=context, batch_size=batch_size, seed=seed, **shares)


def test_batch_depends_only_on_seed_and_step():
    forwards = [train()[step].tokens for step in range(30)]
    fresh = train()
    backwards = [fresh[step].tokens for step in reversed(range(30))][::-1]
    np.testing.assert_array_equal(forwards, backwards)
    assert not np.array_equal(train(seed=1)[0].tokens, forwards[0])
    assert not np.array_equal(forwards[0], forwards[1])


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_processes_share_the_same_global_batch(processes):
    documents = [np.arange(0, 100_000, 7), np.arange(0, 50_000, 3)]
    mixture = functools.partial(train, [TEXT, 100_000 + TEXT[:50_000]], weights=[3, 1], documents=documents)
    held_out = functools.partial(EvalBatches, TEXT, context=8, batch_size=6, windows=20)
    for make, steps, fields in ((train, (0, 5, 77), 3), (mixture, (0, 5, 77), 4), (held_out, (0, 1, 2, 3), 3)):
        shares = [make(process_index=i, process_count=processes) for i in range(processes)]
        for step in steps:
            full, parts = make()[step], [share[step] for share in shares]
            for field in ("tokens", "example", "weight", "segments")[:fields]:
                joined = np.concatenate([getattr(part, field) for part in parts])
                np.testing.assert_array_equal(joined, getattr(full, field))


@given(st.sampled_from([1, 3000, 9000]), st.integers(0, 13), st.integers(1, 8), st.integers(0, 2**40))
def test_windows_are_contiguous_text(windows, more, context, seed):
    length = context + 1 + (more % (2 * context - 1) if windows == 1 else windows * context + more)
    batches = train(np.arange(length), context=context, batch_size=5, seed=seed)
    for step in (0, 1, 7, 1000):
        tokens = batches[step].tokens
        assert tokens.shape == (5, context + 1)
        assert (np.diff(tokens, axis=1) == 1).all() and tokens.min() >= 0 and tokens.max() < length


def test_epoch_shows_each_token_once():
    batches, steps = train(TEXT[:1000], batch_size=4), (1000 - 8) // 8 // 4
    for epoch in (0, 1):
        rows = np.concatenate([batches[step].tokens[:, 1:] for step in range(steps * epoch, steps * (epoch + 1))])
        assert len(np.unique(rows)) == rows.size


def test_epochs_differ_in_offset():
    batches = train(batch_size=1)
    windows = (len(TEXT) - 8) // 8
    cuts = {int(batches[epoch * windows].tokens[0, 0]) % 8 for epoch in range(20)}
    assert len(cuts) > 3


def test_prefetched_batches_equal_direct_reads():
    for start in (0, 7):
        ahead = list(prefetched(train(), start, 12))
        assert len(ahead) == 12 - start
        for step, batch in enumerate(ahead, start):
            np.testing.assert_array_equal(batch.tokens, train()[step].tokens)
    assert list(prefetched(train(), 12, 12)) == []


@given(length=st.integers(9, 300), windows=st.integers(1, 50), batch_size=st.integers(1, 7))
def test_evaluation_windows_are_adjacent_or_evenly_spaced(length, windows, batch_size):
    batches = EvalBatches(np.arange(length), context=8, batch_size=batch_size, windows=windows)
    tokens = [batch.tokens[batch.weight == 1] for batch in batches]
    starts = np.concatenate(tokens)[:, 0]
    assert len(starts) == batches.windows == min(windows, (length - 1) // 8)
    gaps = np.diff(starts)
    if batches.windows < windows or windows == (length - 1) // 8:
        assert (gaps == 8).all() and starts[0] == 0
    else:
        assert gaps.size == 0 or gaps.max() - gaps.min() <= 1
    assert starts.max() + 8 < length
    assert {batch.tokens.shape for batch in batches} == {(batch_size, 9)}


def test_impossible_batches_say_what_to_change():
    held_out = functools.partial(EvalBatches, context=8, windows=5, batch_size=2)
    for call, message in (
        (lambda: train(np.arange(8)), r"training text .* 8 tokens.*model\.context \+ 1 = 9"),
        (lambda: train([TEXT, TEXT[:5]], weights=[1, 1]), "training text has 5 tokens"),
        (lambda: held_out(np.arange(8)), "validation text .* 8 tokens.*data.validation_fraction"),
        (lambda: held_out(np.arange(10), part="second"), "second half .* validation text .* 5 tokens"),
        (lambda: train(process_count=4), "batch_size = 6 .* 4 processes"),
    ):
        with pytest.raises(UserError, match=message):
            call()


@given(seed=st.integers(0, 99), context=st.integers(1, 30))
def test_segments_number_the_documents_of_a_window(seed, context):
    """For documents of 1 to 40 tokens."""
    sizes = np.random.default_rng(seed).integers(1, 41, 5000)
    length, documents = int(sizes.sum()), np.cumsum(sizes) - sizes
    owner = np.repeat(np.arange(5000), sizes)
    batches = train(np.arange(length), context=context, batch_size=7, seed=seed, documents=documents)
    held_out = EvalBatches(np.arange(length), context=context, batch_size=7, windows=9, documents=documents)
    for batch in (batches[0], batches[5], *held_out):
        expected = owner[batch.tokens] - owner[batch.tokens[:, :1]]
        np.testing.assert_array_equal(batch.segments, expected)
        assert batch.segments.dtype == np.int32
    assert not train(documents=np.zeros(1, np.int64))[0].segments.any() and train()[0].segments is None


@given(weights=st.lists(st.integers(1, 50), min_size=1, max_size=5), start=st.integers(0, 10**12))
def test_interleaving_is_exact_over_every_period(weights, start):
    period = sum(weights)
    start -= start % period
    interleaved = list(zip(*interleave(np.arange(start, start + period), weights)))
    for text, weight in enumerate(weights):
        numbers = [number for which, number in interleaved if which == text]
        assert numbers == list(range(start // period * weight, start // period * weight + weight))


def test_mixture_shows_each_window_of_a_text_once_an_epoch():
    texts = [TEXT, 100_000 + np.arange(200)]
    batches = train(texts, context=8, batch_size=8, weights=[3, 1])
    tokens = np.concatenate([batches[step].tokens[:, 1:] for step in range(12)])
    second = tokens[tokens[:, 0] >= 100_000]
    assert len(second) == 24 == (200 - 8) // 8
    assert len(np.unique(second)) == second.size
    alone = train(context=8, batch_size=8)
    first = np.concatenate([alone[step].tokens for step in range(9)])
    np.testing.assert_array_equal(tokens[tokens[:, 0] < 100_000], first[:, 1:])


def test_texts_of_a_mixture_have_different_orders():
    batches = train([TEXT, TEXT], batch_size=40, weights=[1, 1])
    tokens = batches[0].tokens[:, 0]
    chosen = interleave(np.arange(40), [1, 1])[0]
    assert not np.array_equal(tokens[chosen == 0], tokens[chosen == 1])


def test_evaluation_windows_are_allotted_by_weight():
    texts = [TEXT[:1000], 1000 + TEXT[:1000], 2000 + np.arange(17)]
    batches = EvalBatches(texts, context=8, batch_size=7, windows=60, weights=[3, 2, 1])
    assert batches.windows_of_texts == [30, 20, 2] and batches.windows == 52
    starts = np.concatenate([batch.tokens[batch.weight == 1][:, 0] for batch in batches])
    assert np.bincount(starts // 1000).tolist() == [30, 20, 2]


def test_more_windows_may_be_requested_than_exist():
    options = {"context": 1, "batch_size": 8, "windows": 2**31 - 1}
    assert EvalBatches(np.zeros(3_000_000, np.uint8), **options).windows == 2_999_999
    assert EvalBatches([TEXT[:1000], TEXT[:10]], **options, weights=[1, 5]).windows_of_texts == [999, 9]
    rare = EvalBatches([TEXT, TEXT], context=8, batch_size=7, windows=60, weights=[1, 999])
    assert rare.windows_of_texts == [1, 60]  # at least one


@pytest.mark.parametrize("windows", [3, 100])
def test_halves_of_a_text_are_evaluated_separately(windows):
    def tokens(part):
        eval_batches = EvalBatches(np.arange(103), context=4, batch_size=2, windows=windows, part=part)
        batches = [batch.tokens[batch.weight > 0] for batch in eval_batches]
        assert sum(map(len, batches)) == eval_batches.windows <= windows
        return set(np.concatenate(batches).ravel().tolist())

    first, second, whole = map(tokens, ("first", "second", "all"))
    assert max(first) <= 50 and min(second) == 51 and not first & second
    assert max(second) > 95 and min(first) == 0 and max(whole) > 95
