"""The study of attention sinks."""

import inspect

import jax
import numpy as np
import pytest

from attnlab._studies import sinks
from attnlab._studies.sinks import SGD, SIGMOID, SINK, SOFTMAX, backcopy, backcopy_chain
from attnlab.data.tasks import TEST
from tests.parameters import parameters
from tests.studies import claims

TRAINED = {
    "first, triggers": 0.1,
    "first, elsewhere": 0.9,
    "first of all, triggers": 0.1,
    "first of all, elsewhere": 0.9,
    "previous, triggers": 0.85,
    "previous, elsewhere": 0.05,
    "uniform, triggers": 0.06,
    "uniform, elsewhere": 0.06,
    "excess, triggers": 0.05,
    "excess, elsewhere": 0.02,
    "worth, triggers": 3.0,
    "worth, elsewhere": 0.05,
    "value ratio": 0.2,
}
WITHOUT_SINK = TRAINED | {"first, elsewhere": 0.1, "first of all, elsewhere": 0.2, "value ratio": 1.0}
UNTRAINED = TRAINED | {
    "first, elsewhere": 0.06,
    "first, triggers": 0.06,
    "previous, triggers": 0.06,
    "value ratio": 1.0,
}


def made(condition=SOFTMAX, **changed):
    """Rows of three seeds, untrained and trained; `changed` of the trained models of one condition."""
    rows = []
    for name in sinks.CONDITIONS:
        trained = (TRAINED if name == SOFTMAX else WITHOUT_SINK) | (changed if name == condition else {})
        for seed in range(3):
            at = {"condition": name, "seed": seed}
            rows += [
                at | {"step": 0} | UNTRAINED,
                at | {"step": 100} | {k: v + 1e-4 * seed for k, v in trained.items()},
            ]
    return rows


def test_sinks_claim():
    changes = {
        "no sink": (0, SOFTMAX, {"first, elsewhere": 0.4}),
        "no copying": (1, SOFTMAX, {"previous, triggers": 0.3}),
        "always a sink": (1, SOFTMAX, {"first, triggers": 0.6}),
        "of use elsewhere": (2, SOFTMAX, {"worth, elsewhere": 2.0}),
        "value": (3, SOFTMAX, {"value ratio": 0.8}),
        "sink logit": (4, SINK, {"first, elsewhere": 0.7}),
        "sigmoid": (5, SIGMOID, {"first, elsewhere": 0.7}),
        "SGD": (6, SGD, {"first, elsewhere": 0.95}),
    }
    refuted = {name: (part, made(condition, **change)) for name, (part, condition, change) in changes.items()}
    claims.check(sinks, made(), refuted, "")


@pytest.mark.parametrize("condition", [SOFTMAX, SINK, SIGMOID])
def test_measurements_match_numpy(condition, monkeypatch):
    """Weights are those that make the head's output, and losses the cross-entropy by the chain, one query at a time."""
    monkeypatch.setattr(sinks, "HELD_OUT", 8)
    model, seed = sinks.Model(condition), 1

    @jax.jit
    def computed(params):
        tokens = backcopy(TEST, batch_size=8, length=65, seed=seed)
        logits, sown = model.apply(params, tokens[:, :-1], mutable=["intermediates"])
        weights = sown["intermediates"]["attention"]["attention_weights"][0][:, 0]
        return sinks._look(model, params, seed), tokens, logits, backcopy_chain(seed), weights

    looked, tokens, *computed = jax.device_get(computed(parameters(model, np.zeros((1, 2), np.int32))))
    logits, chain, weights = (x.astype(np.float64) for x in computed)
    found = {"triggers": [], "elsewhere": []}
    for sequence, query in np.ndindex(8, 64):
        is_trigger = 1 <= tokens[sequence, query] <= 3
        if query == 0:
            continue
        exact = np.eye(64)[tokens[sequence, query - 1]] if is_trigger else chain[tokens[sequence, query]]
        log_q = logits[sequence, query] - np.log(np.exp(logits[sequence, query]).sum())
        excess = (exact[exact > 0] * (np.log(exact[exact > 0]) - log_q[exact > 0])).sum()
        row = weights[sequence, query]
        found["triggers" if is_trigger else "elsewhere"].append((row[0], row[query - 1], excess, 1 / (query + 1)))
    for name, values in found.items():
        names = (f"first, {name}", f"previous, {name}", f"excess, {name}", f"uniform, {name}")
        for key, expected in zip(names, np.mean(values, axis=0)):
            # float32 means of some 100 values of size 4 at most.
            assert float(looked[key]) == pytest.approx(expected, abs=1e-5), key


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
