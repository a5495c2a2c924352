"""Masks against their formulas, their composition, and their tiles under transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlab.masks import Causal, Dense, Padding, SlidingWindow
from attnlab.score_mods import ALiBi, ScoreFn, SoftCap
from attnlab.testing import AttentionCall
from attnlab.testing.reference import visible


def leaf_masks():
    windows = st.builds(SlidingWindow, st.integers(0, 8), st.integers(0, 8))
    paddings = st.builds(Padding, st.integers(0, 9))
    arrays = st.integers(0, 2**32 - 1).map(
        lambda seed: Dense(jnp.asarray(np.random.default_rng(seed).random((7, 7)) < 0.5))
    )
    return st.one_of(st.just(Causal()), windows, paddings, arrays)


@given(leaf_masks(), leaf_masks())
def test_masks_combine_like_booleans_of_their_formulas(a, b):
    x = np.zeros((7, 1, 1), np.float32)
    visible_a, visible_b = (visible(AttentionCall(x, x, x, mask=mask))[0] for mask in (a, b))
    np.testing.assert_array_equal((a & b).dense(7, 7), visible_a & visible_b)
    np.testing.assert_array_equal((a | b).dense(7, 7), visible_a | visible_b)
    np.testing.assert_array_equal((~a).dense(7, 7), ~visible_a)


def test_numbers_are_static_and_arrays_are_leaves():
    assert jax.tree.leaves(SlidingWindow(3) & Padding(4)) == []
    assert len(jax.tree.leaves(Padding(jnp.array([1, 2])) & Causal())) == 1
    assert jax.tree.leaves((SoftCap(2.0), ScoreFn(max))) == []
    assert len(jax.tree.leaves((ALiBi(np.ones(2)), ScoreFn(max, jnp.ones(2)), SoftCap(jnp.array(2.0))))) == 3


def test_causal_uses_positions_and_padding_uses_indices():
    late = jnp.array([5, 6])
    assert Causal().dense(2, 7, q_positions=late, kv_positions=jnp.arange(7)).sum(axis=1).tolist() == [6, 7]
    assert Padding(3).dense(2, 7).sum(axis=1).tolist() == [3, 3]


def test_positions_may_differ_per_example():
    q_positions = jnp.array([[0], [2]])
    drawn = Causal().dense(1, 3, q_positions=q_positions, kv_positions=jnp.arange(3))
    assert drawn[:, 0, 0].astype(int).tolist() == [[1, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(2), ~Causal(), Padding(2) & Causal(), Padding(2) | Causal()])
def test_different_lengths_without_positions_are_rejected(mask):
    for compute in (lambda: mask.dense(2, 5), lambda: mask.tiles(2, 5, (1, 1))):
        with pytest.raises(ValueError, match=r"Tq = 2 and Tk = 5"):
            compute()


@pytest.mark.parametrize("left, right", [(-1, 0), (1.5, 0), (2, -1)])
def test_window_of_bad_size_is_rejected(own_errors, left, right):
    with pytest.raises(ValueError, match="SlidingWindow .* = .*integer"):
        SlidingWindow(left, right)


def test_combining_with_an_array_is_rejected():
    with pytest.raises(TypeError, match=r"masks\.Dense"):
        Causal() & jnp.ones((2, 2), bool)


@pytest.mark.parametrize(
    "expression, remedy",
    [
        (lambda: Causal() and Padding(3), r"&, \| and ~"),
        (lambda: Padding(3) or Causal(), r"&, \| and ~"),
        (lambda: not Causal(), r"&, \| and ~"),
        (lambda: 1 if ~Causal() & Padding(3) else 0, r"&, \| and ~"),
        (lambda: SoftCap(2.0) and SoftCap(3.0), "tuple"),
        (lambda: not ALiBi(jnp.ones(2)), "tuple"),
    ],
)
def test_truth_value_of_a_mask_or_score_mod_is_rejected(expression, remedy):
    with pytest.raises(TypeError, match=rf"^\w+ has no truth value: .*{remedy}.*$"):
        expression()
