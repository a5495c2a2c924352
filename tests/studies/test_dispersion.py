"""The study `dispersion`: temperatures, the bound and the limit, and the verdict."""

import jax
import numpy as np
import pytest

from attnlab._studies import dispersion
from attnlab._studies.dispersion import ADAPTIVE, LENGTHS, LOGARITHMIC, MODEL, PLAIN, largest_of
from tests.parameters import parameters
from tests.studies import claims

attend = jax.jit(dispersion.attend)


def untrained(seed=0, sharper=1.0):
    values = np.zeros((1, 3), np.float32)
    params = parameters(MODEL, values, np.zeros((1, 3), np.int32), np.full(1, 3), seed=seed)
    params["params"]["query"] *= 10 * np.float32(sharper)  # of vectors, `parameters` draws a tenth of normal numbers
    return params


def test_temperatures_equal_the_polynomial_of_entropy():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(50, 32)) * rng.uniform(0, 20, (50, 1))
    weights = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    entropy = [-sum(w * np.log(w + 1e-9) for w in row) for row in weights]
    a, b, c, d, e = dispersion.POLYNOMIAL
    expected = [max(a * h**4 + b * h**3 + c * h**2 + d * h + e, 1) if h > 0.5 else 1 for h in entropy]
    assert min(entropy) < 0.5 < max(entropy)
    plain, adaptive, logarithmic = jax.jit(dispersion.temperatures, static_argnums=1)(weights.astype(np.float32), 32)
    # Float32: the polynomial's terms are up to 70 in size.
    np.testing.assert_allclose(adaptive, expected, atol=1e-4)
    assert (np.asarray(plain) == 1).all() and np.allclose(logarithmic, 5 / 4)


def test_sharpness_multiplies_the_logits():
    params, batch = untrained(), largest_of(1, batch_size=4, items=6)
    sharpness = np.array([0.5, 1.0, 2.0, 3.0], np.float32)
    _, plain = attend(params, batch)
    _, sharp = attend(params, batch, sharpness)
    expected = np.asarray(plain) ** sharpness[:, None]
    np.testing.assert_allclose(sharp, expected / expected.sum(1, keepdims=True), rtol=1e-5)  # float32


def test_padding_has_no_weight():
    batch = largest_of(2, batch_size=64, items=9, fewest=1)
    weights = np.asarray(attend(untrained(), batch)[1])
    assert (weights[~np.asarray(batch.real)] == 0).all()
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-6)  # float32 sums of at most nine


logit_range = jax.jit(dispersion.logit_range)


@pytest.mark.parametrize("sharper", [1.0, 5.0], ids=["as initialised", "sharper"])
def test_bound_and_limit_hold_for_an_untrained_head(sharper):
    params = untrained(seed=1, sharper=sharper)
    spread, limit = map(float, logit_range(params))
    for items in (4, 64, 2048):
        weights = np.asarray(attend(params, largest_of(3, batch_size=16, items=items))[1])
        # The grid's extremes are those of a smooth function to 1/GRID: 0.01 covers slopes of up to 20.
        assert np.log(float(weights.max()) * items) <= spread + 0.01
    # Of 2,048 items the mean of e^logit is the integral's to some per cent, and some are near the largest logit.
    assert float(weights.max(1).mean()) * items == pytest.approx(limit, rel=0.15)


def make_rows(few=(0.95, 0.98), many=(0.07, 0.3), adaptive=0.4, logarithmic=0.5, spread=50.0, limit=0.07):
    rows = []
    for seed in range(2):
        for items in LENGTHS:
            share = (np.log2(items) - 4) / 8
            weight, right = ((1 - share) * a + share * b for a, b in zip(few, many))
            for kind, last in ((PLAIN, right), (ADAPTIVE, adaptive), (LOGARITHMIC, logarithmic)):
                row = {"seed": seed, "kind": kind, "items": items, "largest weight": weight + 0.001 * seed}
                accuracy = last if kind == PLAIN or items == LENGTHS[-1] else right
                row |= {"on the largest": 0.9, "accuracy": accuracy - 0.001 * seed, "spread": spread}
                rows.append(row | {"limit": limit * LENGTHS[-1] / items})
    return rows


def test_dispersion_claim():
    changes = {
        "wrong on 16": (0, {"few": (0.95, 0.85)}),
        "sharp on 4,096": (1, {"many": (0.6, 0.3), "limit": 0.6}),
        "bound exceeded": (2, {"spread": 5.0}),
        "limit missed": (3, {"limit": 0.05}),
        "adaptive temperature does nothing": (4, {"adaptive": 0.3}),
        "log n does harm": (5, {"logarithmic": 0.2}),
    }
    refuted = {name: (part, make_rows(**change)) for name, (part, change) in changes.items()}
    claims.check(dispersion, make_rows(), refuted, "A head that finds")


def test_target_is_the_class_of_the_largest_real_item():
    batch = jax.tree.map(np.asarray, largest_of(0, batch_size=300, items=9, fewest=2, classes=4))
    for values, classes, real, largest, target in zip(*batch):
        assert largest == max(np.flatnonzero(real), key=lambda i: values[i]) and target == classes[largest]
        assert real[: real.sum()].all()  # shorter sets are padded at their end
    assert set(batch.real.sum(1)) == set(range(2, 10)) and set(batch.classes.flat) == set(range(4))


def test_set_of_fixed_size_has_no_padding():
    assert largest_of(0, batch_size=5, items=3).real.all()
