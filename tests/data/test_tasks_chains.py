"""Markov chains, and a chain that triggers interrupt."""

import inspect

import jax
import numpy as np
import pytest

from attnlab.data.tasks import backcopy, backcopy_chain, chains


@pytest.mark.parametrize("states", [3, *(pytest.param(states, marks=pytest.mark.slow) for states in (2, 5))])
def test_chain_follows_its_transitions(states):
    drawn = chains(0, batch_size=8, length=4001, states=states)
    tokens, transitions = np.asarray(drawn.tokens), np.asarray(drawn.transitions, np.float64)
    for sequence, matrix in zip(tokens, transitions):
        counts = np.zeros((states, states))
        np.add.at(counts, (sequence[:-1], sequence[1:]), 1)
        total = counts.sum(1, keepdims=True)
        # A share of n draws has a standard deviation of at most ½ / √n; five of them are exceeded by chance in one of
        # a million.
        assert (np.abs(counts / np.maximum(total, 1) - matrix) <= 2.5 / np.sqrt(np.maximum(total, 1))).all()


def test_first_states_are_uniform_and_rows_are_flat_dirichlet():
    drawn = chains(0, batch_size=3000, length=1)
    shares = np.bincount(np.asarray(drawn.tokens)[:, 0], minlength=3) / 3000
    np.testing.assert_allclose(shares, 1 / 3, atol=5 * 0.5 / 3000**0.5)
    # The flat Dirichlet distribution of three has the variance 1/18 (mean 1/3, marginals Beta(1, 2)).
    entries = np.asarray(drawn.transitions)
    np.testing.assert_allclose(entries.mean((0, 1)), 1 / 3, atol=0.02)
    np.testing.assert_allclose(entries.var((0, 1)), 1 / 18, atol=0.005)


@pytest.mark.parametrize("states", [3, *(pytest.param(states, marks=pytest.mark.slow) for states in (2, 4))])
def test_doubly_stochastic_matrices_have_columns_that_sum_to_one(states):
    matrices = np.asarray(chains(0, batch_size=500, length=1, states=states, doubly_stochastic=True).transitions)
    np.testing.assert_allclose(matrices.sum(-1), 1, atol=1e-6)
    # Balancing converges more slowly the closer a matrix is to one with zeros: a few of 500 are.
    apart = np.abs(matrices.sum(-2) - 1).max(-1)
    assert np.median(apart) < 1e-5 and (apart < 0.05).all()


def test_token_after_a_trigger_is_the_one_before_it():
    tokens = np.asarray(backcopy(5, batch_size=64, length=50, triggers=2, seed=3))
    assert (tokens[:, 0] == 0).all() and (tokens[:, 1:] > 0).all() and tokens.max() < 64
    sequence, place = np.nonzero((tokens[:, 1:-1] >= 1) & (tokens[:, 1:-1] <= 2))
    assert len(place) and (tokens[sequence, place + 2] == tokens[sequence, place]).all()
    assert (tokens[:, 1] > 2).all(), "a trigger after the first token would have to copy it"


def test_token_after_others_follows_the_chain():
    tokens, chain = (
        np.asarray(backcopy(0, batch_size=512, length=64, seed=1)),
        np.asarray(jax.jit(backcopy_chain)(1), np.float64),
    )
    np.testing.assert_allclose(chain.sum(1), 1, atol=1e-6)
    counts = np.zeros((64, 64))
    np.add.at(counts, (tokens[:, :-1].ravel(), tokens[:, 1:].ravel()), 1)
    counts[1:4] = 0  # triggers
    total = np.maximum(counts.sum(1, keepdims=True), 1)
    followed = counts.sum(1) > 0
    # Five standard deviations of a share of `total` draws, at most ½ / √total.
    assert (np.abs(counts / total - chain) <= 2.5 / np.sqrt(total))[followed].all()
    assert counts[followed][:, 1:4].sum() / counts[4:].sum() == pytest.approx(0.2, abs=0.01)


def test_backcopy_and_its_chain_have_the_same_defaults():
    drawn, chain = (inspect.signature(function).parameters for function in (backcopy, backcopy_chain))
    assert all(chain[name].default == drawn[name].default for name in ("vocab_size", "triggers", "rate"))
    assert jax.eval_shape(backcopy_chain, 0).shape == (64, 64)
