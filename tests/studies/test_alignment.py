"""The study `alignment`: targets, alignments and held-out sources of its task."""

import numpy as np
import pytest

from attnlab._studies.alignment import KINDS, pairs

LENGTHS = [2, 5, 9]
EACH = pytest.mark.parametrize("kind", KINDS)


@EACH
def test_targets_follow_the_alignment_then_end(kind):
    batch = pairs(kind, 3, batch_size=50, lengths=LENGTHS)
    assert batch.source.shape == (50, 9) and batch.targets.shape == batch.inputs.shape == (50, 10)
    assert set(batch.lengths) == set(LENGTHS)
    for source, length, inputs, targets, alignment in zip(*batch):
        expected = source[:length] if kind == "copy" else source[:length][::-1]
        np.testing.assert_array_equal(targets, [*expected, *[0] * (10 - length)])
        np.testing.assert_array_equal(inputs, [0, *targets[:-1]])
        np.testing.assert_array_equal(source[alignment[:length]], expected)
        assert (alignment[length:] == -1).all() and (source[length:] == 0).all() and (source[:length] > 0).all()


def test_held_out_sources_never_appear_in_training():
    shown = {tuple(row) for step in range(20) for row in pairs("copy", step, batch_size=64, lengths=[2]).source}
    held = {tuple(r) for s in range(20) for r in pairs("copy", s, batch_size=64, lengths=[2], held_out=True).source}
    assert len(shown) > 500 and len(held) > 50 and not shown & held


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": [0, 2]}, "lengths = 0"),
        ({"vocab_size": 1}, "vocab_size = 1"),
        ({"lengths": [3], "vocab_size": 2, "held_out": True}, "raise vocab_size = 2"),
        ({"lengths": [10], "vocab_size": 2}, "too few training sources"),
    ],
)
def test_task_without_sources_is_one_line(change, message):
    with pytest.raises(ValueError, match=message):
        pairs("copy", 0, **({"batch_size": 2, "lengths": [3]} | change))
