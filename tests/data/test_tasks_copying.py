"""The task of copying within one sequence: its tokens and targets, and impossible sizes."""

import jax
import jax.numpy as jnp
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


@EACH
def test_copies_are_a_pure_function_of_step_and_seed_traced_or_not(kind):
    first = batch(kind, 3, seed=1)
    traced = jax.jit(lambda step, seed: batch(kind, step, seed=seed))(jnp.int32(3), jnp.uint32(1))
    jax.tree.map(np.testing.assert_array_equal, first, traced)
    assert not np.array_equal(first.tokens, batch(kind, 4, seed=1).tokens)
    assert not np.array_equal(first.tokens, batch(kind, 3, seed=2).tokens)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"kind": "sort"}, "kind = 'sort'"),
        ({"lengths": []}, r"lengths = \[\]"),
        ({"lengths": [0, 2]}, r"lengths = \[0, 2\]"),
        ({"vocab_size": 3}, "vocab_size = 3: .*4"),
        ({"batch_size": 0}, "batch_size = 0"),
    ],
)
def test_copies_of_impossible_sizes_is_one_line(change, message):
    with pytest.raises(ValueError, match=message):
        batch(**change)
