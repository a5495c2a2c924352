"""The study of heads that can be removed."""

import jax
import numpy as np
import pytest

from attnlab._studies import _quickstart as quickstart
from attnlab._studies import pruning
from attnlab._studies.pruning import COUNT, FEWER, GREEDY, HALF, RANDOM, SINGLE, ZERO
from tests.parameters import parameters
from tests.studies import claims

FREE = {GREEDY: 12, SINGLE: 11, RANDOM: 4, ZERO: 11}  # heads whose removal costs nothing


def made(fewer=1.2, **free):
    """Rows of three seeds: the loss rises from 1 to 3, in equal steps once the free heads are gone."""
    rows = []
    for seed in range(3):
        for order, count in (FREE | free).items():
            for kept in range(COUNT + 1):
                gone = max(COUNT - kept - count, 0) / (COUNT - count)
                rows.append({"seed": seed, "order": order, "kept": kept, "loss": 1 + 2 * gone + 0.01 * seed})
        rows.append({"seed": seed, "order": FEWER, "kept": HALF, "loss": fewer + 0.01 * seed})
    return rows


def test_pruning_claim():
    changes = {
        "half stay": (0, {GREEDY: 5, RANDOM: 2, "fewer": 2.0}),
        "random order is as good": (1, {RANDOM: 12}),
        "trained with fewer is better": (2, {"fewer": 0.9}),
    }
    refuted = {name: (part, made(**change)) for name, (part, change) in changes.items()}
    claims.check(pruning, made(), refuted, "")


def test_removable_heads_are_counted_up_to_a_tenth():
    # Of 16 heads 6 cost nothing, and each of the others a tenth of the whole: one more may go, rounding decides.
    assert set(pruning.removable(made(**{GREEDY: 6}), GREEDY)) <= {6, 7}
    assert pruning.removable(made(), GREEDY) == [12, 12, 12], "each of the last four costs a quarter"


@pytest.fixture(scope="module")
def model():
    model = quickstart.gpt(10)
    tokens = np.random.default_rng(0).integers(0, 10, (4, 9)).astype(np.int32)
    return model, parameters(model, tokens[:, :-1]), tokens


def test_loss_of_kept_heads_is_the_models_own_without_the_output_matrices_of_the_others(model):
    """Zeros in place of a head's output, against zeros in its rows of the output projection."""
    model, params, tokens = model
    keep = np.ones((2, 4, 4), bool)
    keep[1, 1, 2] = keep[1, 3, 0] = False

    @jax.jit
    def losses(params, keep):
        without = jax.tree.map(lambda leaf: leaf, params)
        for layer in range(4):
            without["params"][f"block_{layer}"]["attention"]["out"]["kernel"] *= keep[layer][:, None, None]
        own = model.apply(without, tokens[:, :-1], targets=tokens[:, 1:]).mean()
        return own, pruning.loss(model, params, tokens, keep, pruning.nothing(model))

    (own, all_heads), (expected, removed) = (losses(params, each) for each in keep)
    assert float(all_heads) == pytest.approx(float(own), abs=1e-6)
    # Losses of size 3 from float32 sums in another order.
    assert float(removed) == pytest.approx(float(expected), abs=1e-5)
    assert abs(float(removed) - float(own)) > 1e-3


def test_best_first_order_matches_a_search_by_hand(model):
    model, params, tokens = model
    order, alone = jax.device_get(pruning._best_first(model, params, tokens, pruning.nothing(model)))
    assert sorted(order.tolist()) == list(range(COUNT))
    losses = jax.jit(lambda keep: pruning.loss(model, params, tokens, keep.reshape(4, 4), pruning.nothing(model)))
    keep = np.ones(COUNT, bool)
    for place, gone in enumerate(order.tolist()[:3]):
        tried = {head: float(losses(keep & (np.arange(COUNT) != head))) for head in np.flatnonzero(keep)}
        assert tried[gone] <= min(tried.values()) + 1e-5, "rounding alone may decide otherwise"
        if place == 0:
            np.testing.assert_allclose(alone, [tried[head] for head in range(COUNT)], atol=1e-5)
        keep[gone] = False
