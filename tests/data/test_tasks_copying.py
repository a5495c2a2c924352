"""The task of copying within one sequence: its tokens and targets, and impossible sizes."""

import numpy as np
import pytest

from attnlab.data.tasks import KINDS, copies

LENGTHS = (1, 2, 5)
EACH = pytest.mark.parametrize("kind", KINDS)


def batch(kind="copy", step=0, **options):
    return copies(kind, step, **({"batch_size": 200, "lengths": LENGTHS, "vocab_size": 12} | options))


@EACH
def test_copies_have_source_separator_output_and_end(kind):
    tokens, targets, lengths = map(np.asarray, batch(kind))
    assert tokens.shape == targets.shape == (200, 12) and set(lengths) == set(LENGTHS)
    assert tokens.dtype == targets.dtype == np.int32
    for row, wanted, n in zip(tokens, targets, lengths):
        source = row[1 : n + 1]
        output = source if kind == "copy" else source[::-1]
        rest = [0] * (10 - 2 * n)
        assert (source >= 3).all() and (source < 12).all()
        np.testing.assert_array_equal(row, [1, *source, 2, *output, *rest])
        np.testing.assert_array_equal(wanted, [*[-1] * (n + 1), *output, 0, *[-1] * len(rest)])


def test_copies_draw_all_symbols_and_lengths_evenly():
    tokens, _, lengths = map(np.asarray, batch(batch_size=9000, lengths=[1, 2, 3]))
    # 3,000 ± 45 sequences of each length, and 1,000 ± 30 first symbols of each kind (one deviation): five of them.
    np.testing.assert_allclose(np.bincount(lengths)[1:], 3000, atol=5 * 45)
    np.testing.assert_allclose(np.bincount(tokens[:, 1])[3:], 1000, atol=5 * 30)
