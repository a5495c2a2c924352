"""The study of attention sinks."""

import jax
import numpy as np
import pytest

from attnlab._studies import sinks
from attnlab._studies.sinks import SGD, SIGMOID, SINK, SOFTMAX
from attnlab.data.tasks import TEST, backcopy, backcopy_chain
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
