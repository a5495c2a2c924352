"""The study of in-context Markov chains."""

import itertools

import jax
import numpy as np
import pytest

from attnlab._studies import markov
from attnlab._studies.markov import DOUBLY, ONE, TWO, chains
from tests.studies import claims

STEPS = (0, 100, 200, 300, 400)
CURVES = {  # divergence from uniform, unigrams and bigrams at each look
    TWO: [(0.01, 0.10, 0.20), (0.10, 0.02, 0.13), (0.10, 0.01, 0.12), (0.18, 0.10, 0.02), (0.19, 0.11, 0.01)],
    ONE: [(0.01, 0.10, 0.20), (0.10, 0.02, 0.13), (0.10, 0.02, 0.12), (0.10, 0.02, 0.12), (0.10, 0.02, 0.12)],
    DOUBLY: [(0.01, 0.02, 0.12), (0.05, 0.06, 0.04), (0.10, 0.10, 0.02), (0.10, 0.10, 0.01), (0.10, 0.10, 0.01)],
}


def made(**changed):
    """Rows of two seeds with these curves, those of `changed` in place of their own."""
    return [
        {"condition": condition, "seed": seed, "step": step}
        | dict(zip(markov.PREDICTORS, (value + 0.001 * seed for value in values)))
        | {"uniform from bigram": 0.2, "unigram from bigram": 0.12}
        for condition, curve in (CURVES | changed).items()
        for seed in range(2)
        for step, values in zip(STEPS, curve)
    ]


def test_markov_claim():
    changes = {
        "no plateau": (0, {TWO: [CURVES[TWO][0], *[CURVES[TWO][3]] * 3, CURVES[TWO][4]]}),
        "plateau elsewhere": (1, {TWO: [*CURVES[TWO][:1], (0.1, 0.07, 0.13), (0.1, 0.07, 0.12), *CURVES[TWO][3:]]}),
        "not optimal": (2, {TWO: [*CURVES[TWO][:4], (0.18, 0.10, 0.03)]}),
        "one layer suffices": (3, {ONE: CURVES[TWO]}),
        "same plateau": (4, {DOUBLY: CURVES[TWO]}),
    }
    refuted = {name: (part, made(**change)) for name, (part, change) in changes.items()}
    claims.check(markov, made(), refuted, "optimum", alone=False)


def test_look_back_where_the_curves_cross_is_told_and_refutes_nothing():
    back = [*CURVES[TWO][:3], CURVES[TWO][3], CURVES[TWO][2], CURVES[TWO][3], CURVES[TWO][4]]
    rows = [row | {"step": 10 * at} for seed in range(2) for at, row in enumerate(_seed(made(), seed, back))]
    others = [row for row in made() if row["condition"] != TWO]
    held, text = markov.judge(rows + others).parts[0]
    assert held and "in 2 with a look back" in text


def _seed(rows, seed, curve):
    """Rows of a seed of two layers with this curve."""
    row = next(row for row in rows if (row["condition"], row["seed"]) == (TWO, seed))
    return [row | dict(zip(markov.PREDICTORS, values)) for values in curve]


def test_models_that_never_reach_bigrams_are_said_so():
    assert "sooner as in the paper" in str(markov.judge(made()))
    assert "more than all, not sooner, unlike in the paper" in str(markov.judge(made(**{DOUBLY: CURVES[ONE]})))


predictions = jax.jit(markov.predictions)


def test_predictions_match_counting_by_hand():
    tokens = np.asarray(chains(0, batch_size=4, length=30).tokens)
    said = jax.device_get(predictions(tokens))
    for sequence in range(4):
        for place in range(30):
            seen = tokens[sequence, : place + 1].tolist()
            unigram = np.array([seen.count(state) + 1 for state in range(3)], np.float64)
            pairs = list(itertools.pairwise(seen))
            bigram = np.array([pairs.count((seen[-1], state)) + 1 for state in range(3)], np.float64)
            for name, counts in (("unigram", unigram), ("bigram", bigram), ("uniform", np.ones(3))):
                # Quotients of small integers, which float32 has to 2⁻²⁴ of their size.
                np.testing.assert_allclose(said[name][sequence, place], counts / counts.sum(), rtol=2**-23)


def test_bigram_predictor_is_the_posterior_of_many_chains():
    """Weighing chains from the prior by the likelihood of a sequence gives the same prediction, to sampling error."""
    tokens = np.asarray(chains(5, batch_size=1, length=12).tokens)[0]
    prior = np.random.default_rng(0).dirichlet(np.ones(3), (400_000, 3))
    likelihood = np.prod([prior[:, i, j] for i, j in itertools.pairwise(tokens)], axis=0)
    weights = likelihood / likelihood.sum()
    posterior = weights @ prior[:, tokens[-1]]
    # The error of a weighted mean is √Σw² times a spread of at most ½; five of those.
    atol = 5 * 0.5 * np.sqrt((weights**2).sum())
    assert atol < 0.05
    np.testing.assert_allclose(np.asarray(predictions(tokens[None])["bigram"])[0, -1], posterior, atol=atol)


def test_divergence_matches_numpy():
    draw = np.random.default_rng(0)
    p, q = draw.dirichlet(np.ones(3), (2, 5, 7))
    exact = (p * np.log(p / q)).sum(-1).mean()
    # Sums of three float32 terms of size 1 at most, averaged.
    assert float(jax.jit(markov.divergence)(p, np.log(q))) == pytest.approx(exact, abs=1e-6)


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
