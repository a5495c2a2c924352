"""The examples that studies train and test on: each has the property that its study rests on."""

import jax
import numpy as np
import pytest

from attnlab._studies import alignment, copying, dispersion, gradient_step, grokking, induction, markov, roles, sinks
from attnlab.study import fitting
from attnlab.study.report import Options
from attnlab.support.errors import UserError

TEXT = "x" * 64 + ' he said "well" and the cat is new, a new cat is "old", says the dog ' * 3


@pytest.mark.parametrize("kind", alignment.KINDS)
def test_targets_follow_the_alignment_then_end(kind):
    batch = alignment.pairs(kind, 3, batch_size=50, lengths=[2, 5, 9])
    assert batch.source.shape == (50, 9) and batch.targets.shape == batch.inputs.shape == (50, 10)
    assert set(batch.lengths) == {2, 5, 9}
    for source, length, inputs, targets, aligned in zip(*batch):
        expected = source[:length] if kind == "copy" else source[:length][::-1]
        np.testing.assert_array_equal(targets, [*expected, *[0] * (10 - length)])
        np.testing.assert_array_equal(inputs, [0, *targets[:-1]])
        np.testing.assert_array_equal(source[aligned[:length]], expected)
        assert (aligned[length:] == -1).all() and (source[length:] == 0).all() and (source[:length] > 0).all()


def test_held_out_sources_never_appear_in_training():
    def sources(**options):
        batches = (alignment.pairs("copy", n, batch_size=64, lengths=[2], **options).source for n in range(20))
        return {tuple(row) for batch in batches for row in batch}

    shown, held = sources(), sources(held_out=True)
    assert len(shown) > 500 and len(held) > 50 and not shown & held


@pytest.mark.parametrize(
    ("change", "field"),
    [({"lengths": [0, 2]}, "lengths = 0"), ({"lengths": [3], "vocab_size": 2, "held_out": True}, "vocab_size = 2")],
)
def test_task_without_sources_raises_one_line(change, field):
    with pytest.raises(ValueError, match=field):
        alignment.pairs("copy", 0, **({"batch_size": 2, "lengths": [3]} | change))


@pytest.mark.parametrize("kind", copying.KINDS)
def test_copies_have_source_separator_output_and_end(kind):
    batch = copying.copies(kind, 0, batch_size=200, lengths=(1, 2, 5), vocab_size=12)
    tokens, targets, lengths = map(np.asarray, batch)
    assert tokens.shape == targets.shape == (200, 12) and set(lengths) == {1, 2, 5}
    for row, wanted, n in zip(tokens, targets, lengths):
        source, rest = row[1 : n + 1], [0] * (10 - 2 * n)
        output = source if kind == "copy" else source[::-1]
        assert (source >= 3).all() and (source < 12).all()
        np.testing.assert_array_equal(row, [1, *source, 2, *output, *rest])
        np.testing.assert_array_equal(wanted, [*[-1] * (n + 1), *output, 0, *[-1] * len(rest)])


def test_target_is_the_class_of_the_largest_real_item():
    batch = jax.tree.map(np.asarray, dispersion.largest_of(0, batch_size=300, items=9, fewest=2, classes=4))
    for values, classes, real, largest, target in zip(*batch):
        assert largest == max(np.flatnonzero(real), key=lambda i: values[i]) and target == classes[largest]
        assert real[: real.sum()].all()  # shorter sets are padded at the end
    assert set(batch.real.sum(1)) == set(range(2, 10)) and set(batch.classes.flat) == set(range(4))


def test_regression_points_and_query_are_of_one_linear_function():
    batch = gradient_step.regressions(0, batch_size=500, points=6, inputs=3)
    x, y = np.asarray(batch.tokens[..., :-1]), np.asarray(batch.tokens[..., -1])
    assert batch.tokens.shape == (500, 7, 4) and (y[:, -1] == 0).all()
    expected = np.einsum("btf,bf->bt", x, batch.weights)
    np.testing.assert_allclose(y[:, :-1], expected[:, :-1], atol=1e-6)  # float32 sums of three terms
    np.testing.assert_allclose(batch.targets, expected[:, -1], atol=1e-6)
    # The mean squares of 10,500 uniform and 1,500 normal numbers have standard errors of 0.003 and 0.037: four of each.
    assert abs((x**2).mean() - 1 / 3) < 0.012 and abs((np.asarray(batch.weights) ** 2).mean() - 1) < 0.15


def test_each_pair_is_in_one_part_with_its_sum():
    train, held_out = grokking.modular_sums(7, train=0.3)
    tokens, targets = (np.concatenate(parts) for parts in zip(train, held_out))
    assert len(train.targets) == 15  # 0.3 · 49, rounded
    assert {tuple(pair) for pair in tokens[:, :2]} == {(a, b) for a in range(7) for b in range(7)}
    assert (tokens[:, 2] == 7).all() and (targets == tokens[:, :2].sum(1) % 7).all()


def test_held_out_induction_text_is_predictable_after_one_period():
    text = induction.held_out(8)
    for row, mixed, repeated in zip(text.tokens, text.shuffled, text.repeated):
        period = 1 + int(repeated.argmax())
        assert period in induction.PERIODS and repeated[period - 1 :].all()
        np.testing.assert_array_equal(row[1:][repeated], row[repeated.nonzero()[0] + 1 - period])
        np.testing.assert_array_equal(mixed[:period], row[:period])
        np.testing.assert_array_equal(np.sort(mixed), np.sort(row))


def test_chain_follows_its_transitions():
    drawn = markov.chains(0, batch_size=8, length=4001)
    tokens, transitions = np.asarray(drawn.tokens), np.asarray(drawn.transitions, np.float64)
    for sequence, matrix in zip(tokens, transitions):
        counts = np.zeros((3, 3))
        np.add.at(counts, (sequence[:-1], sequence[1:]), 1)
        total = np.maximum(counts.sum(1, keepdims=True), 1)
        # A share of n draws has a standard deviation of at most ½ / √n; five of them are exceeded by chance in one of
        # a million.
        assert (np.abs(counts / total - matrix) <= 2.5 / np.sqrt(total)).all()


def test_doubly_stochastic_matrices_have_columns_that_sum_to_one():
    matrices = np.asarray(markov.chains(0, batch_size=500, length=1, doubly_stochastic=True).transitions)
    np.testing.assert_allclose(matrices.sum(-1), 1, atol=1e-6)
    # Balancing converges more slowly the closer a matrix is to one with zeros: a few of 500 are.
    apart = np.abs(matrices.sum(-2) - 1).max(-1)
    assert np.median(apart) < 1e-5 and (apart < 0.05).all()


def test_trigger_copies_the_token_before_and_others_follow_the_chain():
    tokens = np.asarray(sinks.backcopy(0, batch_size=512, length=64, seed=1))
    chain = np.asarray(jax.jit(sinks.backcopy_chain)(1), np.float64)
    assert (tokens[:, 0] == 0).all() and (tokens[:, 1:] > 0).all() and tokens.max() < 64
    assert (tokens[:, 1] > 3).all(), "a trigger after the first token would have to copy it"
    sequence, place = np.nonzero((tokens[:, 1:-1] >= 1) & (tokens[:, 1:-1] <= 3))
    assert len(place) and (tokens[sequence, place + 2] == tokens[sequence, place]).all()

    np.testing.assert_allclose(chain.sum(1), 1, atol=1e-6)
    counts = np.zeros((64, 64))
    np.add.at(counts, (tokens[:, :-1].ravel(), tokens[:, 1:].ravel()), 1)
    counts[1:4] = 0  # triggers
    total, followed = np.maximum(counts.sum(1, keepdims=True), 1), counts.sum(1) > 0
    # Five standard deviations of a share of `total` draws, at most ½ / √total.
    assert (np.abs(counts / total - chain) <= 2.5 / np.sqrt(total))[followed].all()
    assert counts[followed][:, 1:4].sum() / counts[4:].sum() == pytest.approx(0.2, abs=0.01)


def test_role_pairs_have_the_earlier_part_as_key_and_valid_controls():
    pairs = roles.find(TEXT, roles.PATTERNS["en"]["adjective → noun"])
    first = pairs[0]
    assert TEXT[first.key : first.key_end] == "new" and TEXT[first.query : first.query_end] == "cat"
    others = roles.controls(TEXT, pairs, {pair.query for pair in pairs}, np.random.default_rng(0))
    assert others and not {o.query for o in others} & {p.query for p in pairs}
    for other in others:
        words = TEXT[other.key : other.key_end], TEXT[other.query : other.query_end]
        assert all(len(word) == 3 and word.isalpha() for word in words)
        assert not TEXT[other.query_end].isalpha() and not TEXT[other.key - 1].isalpha()


def test_text_without_pairs_raises_one_line(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("nothing to find here, " * 40, encoding="utf-8")
    with pytest.raises(UserError, match="fewer than 30 pairs"):
        roles.measure(Options(fast=True, path=str(path)))


def test_language_of_a_text_is_detected(tmp_path):
    path = tmp_path / "texto.txt"
    path.write_text("dijo que el gato que vio no era el que él decía. " * 40, encoding="utf-8")
    assert fitting.read(str(path)).language == "es"
