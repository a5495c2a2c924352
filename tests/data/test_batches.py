"""The global batch is a pure function of (seed, step), however many processes read it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlab.data.batches import EvalBatches, TrainBatches, prefetched
from attnlab.errors import UserError

TEXT = np.arange(1000)


def train(tokens=TEXT, context=8, batch_size=6, seed=0, **shares):
    return TrainBatches(tokens, context=context, batch_size=batch_size, seed=seed, **shares)


def test_batch_depends_only_on_seed_and_step():
    forwards = [train()[step].tokens for step in range(30)]
    fresh = train()
    backwards = [fresh[step].tokens for step in reversed(range(30))][::-1]
    np.testing.assert_array_equal(forwards, backwards)
    assert not np.array_equal(train(seed=1)[0].tokens, forwards[0])
    assert not np.array_equal(forwards[0], forwards[1])


@pytest.mark.parametrize("processes", [1, 2, 3, 6])
def test_processes_share_the_same_global_batch(processes):
    shares = [train(process_index=i, process_count=processes)[5] for i in range(processes)]
    full = train()[5]
    for field in full._fields:
        np.testing.assert_array_equal(np.concatenate([getattr(share, field) for share in shares]), getattr(full, field))


@given(length=st.integers(9, 200), context=st.integers(1, 8), seed=st.integers(0, 2**40))
def test_windows_are_contiguous_text(length, context, seed):
    batches = train(np.arange(length), context=context, batch_size=5, seed=seed)
    for step in (0, 1, 7, 1000):
        tokens = batches[step].tokens
        assert tokens.shape == (5, context + 1)
        assert (np.diff(tokens, axis=1) == 1).all() and tokens.min() >= 0 and tokens.max() < length


def test_epoch_shows_each_token_once():
    batches = train(batch_size=4)
    windows = (1000 - 8) // 8
    for epoch in (0, 1):
        rows = np.concatenate(
            [batches[step].tokens[:, 1:] for step in range(windows // 4 * epoch, windows // 4 * (epoch + 1))]
        )
        assert len(np.unique(rows)) == rows.size


def test_epochs_differ_in_offset():
    batches = train(batch_size=124)  # one epoch per batch
    assert (1000 - 8) // 8 == 124
    cuts = {int(batches[epoch].tokens[0, 0]) % 8 for epoch in range(20)}
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
    kept = [batch.tokens[batch.weight == 1] for batch in batches]
    starts = np.concatenate(kept)[:, 0]
    assert len(starts) == batches.windows == min(windows, (length - 1) // 8)
    gaps = np.diff(starts)
    if batches.windows < windows or windows == (length - 1) // 8:
        assert (gaps == 8).all() and starts[0] == 0
    else:
        assert gaps.size == 0 or gaps.max() - gaps.min() <= 1
    assert starts.max() + 8 < length
    assert {batch.tokens.shape for batch in batches} == {(batch_size, 9)}


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_share_evaluation_batches(processes):
    options = {"context": 8, "batch_size": 6, "windows": 20}
    shares = [EvalBatches(TEXT, **options, process_index=i, process_count=processes) for i in range(processes)]
    full = EvalBatches(TEXT, **options)
    for index in range(len(full)):
        joined = np.concatenate([share[index].tokens for share in shares])
        np.testing.assert_array_equal(joined, full[index].tokens)


def test_text_of_one_window_is_enough():
    np.testing.assert_array_equal(train(np.arange(9))[3].tokens, np.tile(np.arange(9), (6, 1)))
    assert EvalBatches(np.arange(9), context=8, batch_size=2, windows=5).windows == 1


def test_too_short_text_says_what_to_change():
    with pytest.raises(UserError, match=r"training text has 8 tokens, shorter than model\.context \+ 1 = 9"):
        train(np.arange(8))
    with pytest.raises(UserError, match="validation text has 8 tokens.*larger data.validation_fraction"):
        EvalBatches(np.arange(8), context=8, batch_size=2, windows=5)


def test_batch_size_must_be_divisible_by_processes():
    with pytest.raises(UserError, match="batch_size = 6 must be a multiple of the 4 processes"):
        train(process_count=4)
