"""The study `rank`: exact arithmetic of nearly equal tokens, the bound, and the verdict."""

from decimal import Decimal, localcontext

import jax
import numpy as np
import pytest

from attnlab._studies import rank
from attnlab._studies.rank import ALONE, BOTH, CAUSAL, KINDS, MLPS, SKIPS, Tokens, Weights
from attnlab.masks import Causal
from attnlab.nn import Mlp, MultiHeadAttention
from tests.studies import claims


def random_layer(rng, width, hidden=6):
    shapes = [(width, width), (width, width), (width, hidden), (hidden, width)]
    return Weights(*(rng.normal(size=shape) / shape[0] ** 0.5 for shape in shapes))


def brute_force(x, layers, kind, digits=120):
    """log10 of the relative distance after each layer, in decimals of so many digits, of X itself."""

    def product(a, b):
        return [[sum((p * q for p, q in zip(row, column)), Decimal(0)) for column in zip(*b)] for row in a]

    def plus(a, b):
        return [[p + q for p, q in zip(*rows)] for rows in zip(a, b)]

    def size(a):
        return (max(sum(map(abs, c)) for c in zip(*a)) * max(sum(map(abs, r)) for r in a)).sqrt()

    def exact(a):
        return [[Decimal(float(value)) for value in row] for row in a]

    with localcontext() as context:
        context.prec, logs = digits, []
        x = exact(x)
        for layer in layers:
            query_key, value_out, up, down = map(exact, layer)
            p = []
            for i, logits in enumerate(product(product(x, query_key), [list(column) for column in zip(*x)])):
                seen = [v.exp() if kind != CAUSAL or j <= i else Decimal(0) for j, v in enumerate(logits)]
                p.append([v / sum(seen) for v in seen])
            attended = product(product(p, x), value_out)
            x = plus(x, attended) if kind in (SKIPS, BOTH) else attended
            if kind in (MLPS, BOTH):
                fed = product([[max(v, Decimal(0)) for v in row] for row in product(x, up)], down)
                x = plus(x, fed) if kind == BOTH else fed
            mean = [sum(column) / len(x) for column in zip(*x)]
            rest = [[v - m for v, m in zip(row, mean)] for row in x]
            logs.append(float((size(rest) / size(x)).log10()))
    return logs


@pytest.mark.parametrize("kind", KINDS)
def test_distance_equals_that_in_decimals_of_120_digits(kind):
    rng = np.random.default_rng(3)
    x, layers = rng.normal(size=(4, 3)), [random_layer(rng, 3) for _ in range(4)]
    tokens, logs = Tokens.of(np.zeros(3), x, 0.0), []
    for layer in layers:
        tokens = rank.apply(kind, tokens, layer)
        logs.append(tokens.log_distance() / np.log(10))
    # Rounding of float64 (1e-16) is tripled with the logarithm by each layer, and grows with 4·3 terms a product.
    np.testing.assert_allclose(logs, brute_force(x, layers, kind), rtol=1e-11, atol=1e-11)


def test_attention_alone_falls_below_the_smallest_float():
    rng = np.random.default_rng(0)
    tokens = Tokens.of(np.zeros(4), 0.5 * rng.normal(size=(5, 4)), 0.0)
    for _ in range(9):
        before, tokens = tokens.log_size, rank.apply(ALONE, tokens, random_layer(rng, 4))
    assert tokens.log_size < -745  # exp(-745) is 0 in float64
    assert tokens.log_size / before == pytest.approx(3, abs=0.02)


def test_layers_equal_the_modules_of_the_same_key():
    x, layers = rank.draw_weights(0)
    single, tokens = x[None].astype(np.float32), Tokens.of(np.zeros(rank.WIDTH), x, 0.0)
    modules = [MultiHeadAttention(1, use_bias=False, mask=mask, impl="dense") for mask in (None, Causal())]
    modules.append(Mlp(activation="relu", use_bias=False))

    @jax.jit
    def outputs(key):
        keys = jax.random.split(key, 2 * rank.LAYERS + 1)
        return [module.init_with_output(keys[at], single)[0][0] for module, at in zip(modules, (1, 1, 2))]

    attended = (rank.apply(kind, tokens, layers[0]) for kind in (ALONE, CAUSAL))
    found = [t.centre + np.exp(t.log_size) * t.deviations for t in attended]
    centre, deviations = rank.feed(tokens, layers[0])
    found.append(centre + np.exp(tokens.log_size) * deviations)
    for actual, expected in zip(found, outputs(jax.random.key(0)), strict=True):
        np.testing.assert_allclose(actual, expected, atol=2e-5)  # float32: 1e-7 times some 64 terms of size 1 to 3


def test_bound_is_kept_by_random_layers_within_its_assumption():
    rng, kept = np.random.default_rng(1), 0
    for size in np.geomspace(0.01, 2, 60):
        layer = random_layer(rng, 5)
        tokens = Tokens.of(rng.normal(size=5), size * rng.normal(size=(6, 5)), 0.0)
        bound, spread = rank.log_bound(tokens, layer)
        if spread <= rank.SPREAD:
            kept += 1
            assert rank.apply(ALONE, tokens, layer).log_size <= bound
    assert kept > 20


LOGS = {  # of the distance after 0 to 5 layers
    ALONE: (0, -0.1, -1, -3.7, -11.8, -36.1),
    MLPS: (0, -0.2, -2, -7.4, -23.6, -72.2),
    SKIPS: (0, -0.1, -0.1, -0.2, -0.2, -0.3),
    BOTH: (0, 0, -0.1, -0.1, -0.1, -0.2),
    CAUSAL: (0, -0.2, -0.5, -0.8, -1.1, -1.4),
}


def make_rows(monkeypatch, logs=LOGS, slack=2.0, spread=0.5):
    monkeypatch.setattr(rank, "LAYERS", 5)
    rows = []
    for seed in range(2):
        for kind, values in logs.items():
            for layer, log in enumerate(values):
                log = log * (1 + 0.001 * seed)
                bound = {"log bound": log + 1 + slack, "spread": spread} if kind == ALONE and layer else {}
                sizes = {"log distance": log, "log residual": log + 1}
                rows.append({"seed": seed, "kind": kind, "layer": layer, **sizes, **bound})
    return rows


def test_rank_claim(monkeypatch):
    assert "exceeded in 0 of 10" in rank.judge(make_rows(monkeypatch)).parts[1][1]
    changes = {
        "exponential": (0, {"logs": LOGS | {ALONE: (0, -0.5, -1, -1.5, -2, -2.5)}}),
        "bound exceeded": (1, {"slack": -0.1}),
        "assumption never holds": (1, {"spread": 2.0}),
        "skips collapse": (2, {"logs": LOGS | {SKIPS: LOGS[ALONE]}}),
        "skips and MLPs collapse": (3, {"logs": LOGS | {BOTH: LOGS[MLPS]}}),
        "MLPs slow the decay": (4, {"logs": LOGS | {MLPS: LOGS[CAUSAL]}}),
        "causal collapses": (5, {"logs": LOGS | {CAUSAL: LOGS[ALONE]}}),
        "causal grows": (5, {"logs": LOGS | {CAUSAL: (0, 0.1, 0.2, 0.3, 0.4, 0.5)}}),
    }
    refuted = {name: (part, make_rows(monkeypatch, **change)) for name, (part, change) in changes.items()}
    claims.check(rank, make_rows(monkeypatch), refuted, "Attention alone cubes")
