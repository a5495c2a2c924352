"""The study of copying beyond the trained length: exact match, verdict, and a run."""

import jax
import numpy as np
import pytest

from attnlab._studies import copying
from attnlab._studies.copying import KINDS, copies
from attnlab.nn import GPT
from attnlab.nn.fields import POSITIONS
from tests.parameters import parameters
from tests.studies import claims


def rows():
    """Three seeds, trained on lengths 1 and 2 and tested up to 4; without positions they do better beyond."""
    return [
        {
            "task": task,
            "positions": positions,
            "seed": seed,
            "length": length,
            "trained": length <= 2,
            "exact match": 1.0 if length <= 2 else (0.6 if positions == "none" else 0.2) + 0.01 * seed,
        }
        for task in KINDS
        for positions in POSITIONS
        for seed in range(3)
        for length in range(1, 5)
    ]


def changed(value, **match):
    """The rows, with another exact match where they match."""
    return [row | {"exact match": value} if match.items() <= row.items() else row for row in rows()]


def test_copying_claim():
    refuted = {
        "copying untrained": (0, changed(0.8, task="copy", positions="rotary", trained=True)),
        "alibi ahead": (1, changed(0.7, task="copy", positions="alibi", trained=False)),
        "reversing untrained": (2, changed(0.5, task="reverse", positions="none", trained=True)),
        "none behind": (3, changed(0.1, task="reverse", positions="none", trained=False)),
        "lead within the spread": (3, changed(0.0, task="reverse", positions="none", trained=False, seed=1)),
    }
    claims.check(copying, rows(), refuted, "without positions")


@pytest.mark.parametrize("task", KINDS)
def test_copying_exact_match_equals_greedy_decoding(task):
    model = GPT(5, num_layers=1, num_heads=1, width=4, context=6, positions="learned", mlp_ratio=1)
    batch = jax.device_get(copies(task, 0, batch_size=64, lengths=[1, 2], vocab_size=5))
    # Sharper, so that different sequences get different tokens.
    params = jax.tree.map(lambda leaf: 3 * leaf, parameters(model, batch.tokens))
    apply = jax.jit(model.apply)
    targets, lengths = batch.targets, batch.lengths
    # A model that is right by a bias towards its first targets, in half of the sequences.
    one_hot = np.append(np.eye(5, dtype=np.float32), np.zeros((1, 5), np.float32), axis=0)  # of -1: zeros
    biased = np.asarray(apply(params, batch.tokens)) + 1e3 * one_hot[targets] * (np.arange(64) % 2)[:, None, None]
    exact = np.asarray(copying.exact(biased, batch))

    written = batch.tokens.copy()
    for row, n in enumerate(lengths):
        written[row, n + 2 :] = 0
    alive = np.ones(64, bool)
    for at in range(6):
        bias = 1e3 * one_hot[targets[:, at]] * (np.arange(64) % 2)[:, None]
        token = (np.asarray(apply(params, written))[:, at] + bias).argmax(-1)
        asked = targets[:, at] >= 0
        alive &= ~asked | (token == targets[:, at])
        if at + 1 < 6:
            written[:, at + 1] = np.where(asked, token, written[:, at + 1])
    np.testing.assert_array_equal(exact, alive)
    assert exact[1::2].all() and not exact.all()


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
