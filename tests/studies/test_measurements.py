"""Measurements of the studies, against NumPy, decimals, or models built by hand."""

import itertools
from decimal import Decimal, localcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab import see
from attnlab._studies import _quickstart as quickstart
from attnlab._studies import (
    complexity,
    dispersion,
    gradient_step,
    grokking,
    induction,
    markov,
    pruning,
    rank,
    recall,
    scaling,
    sinks,
)
from attnlab._studies.positions import rotation
from attnlab.data.tasks import TEST
from attnlab.nn import sinusoidal
from tests.parameters import parameters

# rank -----------------------------------------------------------------------------------------------------------------


def random_layer(rng, width, hidden=6):
    shapes = [(width, width), (width, width), (width, hidden), (hidden, width)]
    return rank.Weights(*(rng.normal(size=shape) / shape[0] ** 0.5 for shape in shapes))


def brute_force(x, layers, kind, digits=120):
    """log10 of the relative distance after each layer, from X itself, in decimals of `digits` digits."""
    exact = np.frompyfunc(lambda value: Decimal(float(value)), 1, 1)  # arrays of objects have NumPy's operators

    def size(a):
        return (abs(a).sum(0).max() * abs(a).sum(1).max()).sqrt()

    with localcontext() as context:
        context.prec, logs = digits, []
        x = exact(x)
        for layer in layers:
            query_key, value_out, up, down = map(exact, layer)
            p = np.frompyfunc(Decimal.exp, 1, 1)(x @ query_key @ x.T)
            p = p * exact(np.tri(len(x))) if kind == rank.CAUSAL else p
            attended = p / p.sum(1, keepdims=True) @ x @ value_out
            x = x + attended if kind in (rank.SKIPS, rank.BOTH) else attended
            if kind in (rank.MLPS, rank.BOTH):
                fed = np.maximum(x @ up, Decimal(0)) @ down
                x = x + fed if kind == rank.BOTH else fed
            logs.append(float((size(x - x.sum(0) / len(x)) / size(x)).log10()))
    return logs


@pytest.mark.parametrize("kind", rank.KINDS)
def test_distance_matches_decimals_of_120_digits(kind):
    rng = np.random.default_rng(3)
    x, layers = rng.normal(size=(4, 3)), [random_layer(rng, 3) for _ in range(4)]
    tokens, logs = rank.Tokens.of(np.zeros(3), x, 0.0), []
    for layer in layers:
        tokens = rank.apply(kind, tokens, layer)
        logs.append(tokens.log_distance() / np.log(10))
    # Each layer triples the logarithm and its float64 rounding (1e-16), which grows with the 4·3 terms of a product.
    np.testing.assert_allclose(logs, brute_force(x, layers, kind), rtol=1e-11, atol=1e-11)


def test_bound_holds_for_random_layers_within_its_assumption():
    rng, checked = np.random.default_rng(1), 0
    for size in np.geomspace(0.01, 2, 60):
        layer = random_layer(rng, 5)
        tokens = rank.Tokens.of(rng.normal(size=5), size * rng.normal(size=(6, 5)), 0.0)
        bound, spread = rank.log_bound(tokens, layer)
        if spread <= rank.SPREAD:
            checked += 1
            assert rank.apply(rank.ALONE, tokens, layer).log_size <= bound
    assert checked > 20


# scaling, complexity, positions ---------------------------------------------------------------------------------------


def test_jacobian_norm_matches_autodiff(float64):
    """‖J‖² = Σp² − 2Σp³ + (Σp²)², against automatic differentiation."""
    # The square is a difference of numbers of size 1, off by 2⁻⁵²; its root by 2⁻²⁶ where it is 0.
    jacobian = jax.jit(jax.jacobian(jax.nn.softmax))
    for scale in (0.0, 1.0, 30.0):
        s = scale * np.random.default_rng(0).standard_normal(50)
        exact = np.linalg.norm(jacobian(s))
        weights = np.exp(s - s.max())
        np.testing.assert_allclose(scaling.jacobian_norm(weights / weights.sum()), exact, atol=2**-26)


def test_exponents_of_exact_powers_are_recovered():
    sizes = itertools.product((1, 4, 16), (2, 8), (3, 9))
    rows = [{"layer": "x", "n": n, "d": d, "k or r": r, "flops": 7 * n**2 * d * r**0.5} for n, d, r in sizes]
    np.testing.assert_allclose(complexity.exponents(rows)["x"], (2, 1, 0.5))


@pytest.mark.slow
def test_gru_flops_are_step_times_trips():
    """XLA counts a loop body once, so the study multiplies a step of a GRU; half its products are outside the loop."""
    program = complexity.compiled_for(*complexity.layer_call(complexity.GRU(), 16, 8))
    program_flops, step_flops = map(complexity.count_flops, (program, complexity.gru_step(8)))
    assert program_flops < 0.75 * 16 * step_flops, "if XLA counts trips itself, do not multiply"
    assert complexity.count_trips(program) == 16
    assert step_flops >= 6 * 2 * 8 * 8, "six matrices"


def test_sinusoidal_shift_is_a_rotation():
    shift, places = 11, np.arange(50, dtype=np.int32)
    matrix, encode = rotation(shift, 32), jax.jit(sinusoidal, static_argnums=1)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(32), atol=1e-12)
    # float32 angles of up to 60 are off by half a unit in the last place, 2e-6.
    np.testing.assert_allclose(encode(places + shift, 32), encode(places, 32) @ matrix.T, atol=1e-5)


# dispersion -----------------------------------------------------------------------------------------------------------


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


@pytest.mark.slow
def test_bound_and_limit_hold_for_an_untrained_head():
    attend = jax.jit(dispersion.attend)
    values, classes = np.zeros((1, 3), np.float32), np.zeros((1, 3), np.int32)
    params = parameters(dispersion.MODEL, values, classes, np.full(1, 3), seed=1)
    params["params"]["query"] *= np.float32(50)  # `parameters` draws vectors as a tenth of normal numbers
    spread, limit = map(float, jax.jit(dispersion.logit_range)(params))
    for items in (4, 64, 2048):
        weights = np.asarray(attend(params, dispersion.largest_of(3, batch_size=16, items=items))[1])
        # The grid's extremes are those of a smooth function to 1/GRID: 0.01 covers slopes of up to 20.
        assert np.log(float(weights.max()) * items) <= spread + 0.01
    # With 2,048 items the mean of e^logit is within some per cent of the integral; some are near the largest logit.
    assert float(weights.max(1).mean()) * items == pytest.approx(limit, rel=0.15)


# grokking -------------------------------------------------------------------------------------------------------------


def test_grokfast_equals_a_loop_in_numpy():
    rng = np.random.default_rng(0)
    gradients, average = rng.normal(size=(20, 3)), np.zeros(3)
    filtered = grokking.grokfast(0.9, 2.0)
    state, step = filtered.init(jnp.zeros(3)), jax.jit(filtered.update)
    for gradient in gradients:
        update, state = step(gradient.astype(np.float32), state)
        average = 0.9 * average + 0.1 * gradient
        np.testing.assert_allclose(update, gradient + 2 * average, atol=1e-6)  # float32


def test_share_of_five_equals_projections_on_sines_and_cosines():
    table = np.random.default_rng(1).normal(size=(59, 4))
    at, power = np.arange(59), []
    for frequency in range(1, 30):
        angle = 2 * np.pi * frequency * at / 59
        power.append(((np.cos(angle) @ table) ** 2 + (np.sin(angle) @ table) ** 2).sum())
    expected = sum(sorted(power)[-5:]) / sum(power)
    share = jax.jit(grokking.strongest_share)(table.astype(np.float32))
    assert float(share) == pytest.approx(expected, rel=1e-5)


# sinks ----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_measurements_of_sinks_match_numpy(monkeypatch):
    """Weights as the layer sows them, and losses in excess of the chain's entropy, one query at a time."""
    monkeypatch.setattr(sinks, "HELD_OUT", 8)
    model, seed = sinks.Model(sinks.SINK), 1

    @jax.jit
    def computed(params):
        tokens = sinks.backcopy(TEST, batch_size=8, length=65, seed=seed)
        logits, sown = model.apply(params, tokens[:, :-1], mutable=["intermediates"])
        weights = sown["intermediates"]["attention"]["attention_weights"][0][:, 0]
        return sinks._look(model, params, seed), tokens, logits, sinks.backcopy_chain(seed), weights

    looked, tokens, *computed = jax.device_get(computed(parameters(model, np.zeros((1, 2), np.int32))))
    logits, chain, weights = (x.astype(np.float64) for x in computed)
    measured = {"triggers": [], "elsewhere": []}
    for sequence, query in np.ndindex(8, 64):
        is_trigger = 1 <= tokens[sequence, query] <= 3
        if query == 0:
            continue
        exact = np.eye(64)[tokens[sequence, query - 1]] if is_trigger else chain[tokens[sequence, query]]
        log_q = logits[sequence, query] - np.log(np.exp(logits[sequence, query]).sum())
        excess = (exact[exact > 0] * (np.log(exact[exact > 0]) - log_q[exact > 0])).sum()
        row = weights[sequence, query]
        measured["triggers" if is_trigger else "elsewhere"].append((row[0], row[query - 1], excess, 1 / (query + 1)))
    for name, values in measured.items():
        names = (f"first, {name}", f"previous, {name}", f"excess, {name}", f"uniform, {name}")
        for key, expected in zip(names, np.mean(values, axis=0)):
            # float32 means of some 100 values of size 4 at most.
            assert float(looked[key]) == pytest.approx(expected, abs=1e-5), key


# pruning --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_loss_of_kept_heads_equals_zeroed_output_matrices_of_others():
    """Zeros in place of a head's output, against zeros in its rows of the output projection."""
    model, tokens = quickstart.gpt(10), np.random.default_rng(0).integers(0, 10, (4, 9)).astype(np.int32)
    params, keep = parameters(model, tokens[:, :-1]), np.ones((4, 4), bool)
    keep[1, 2] = keep[3, 0] = False

    @jax.jit
    def losses(params, keep):
        without = jax.tree.map(lambda leaf: leaf, params)
        for layer in range(4):
            without["params"][f"block_{layer}"]["attention"]["out"]["kernel"] *= keep[layer][:, None, None]
        zeroed = model.apply(without, tokens[:, :-1], targets=tokens[:, 1:]).mean()
        return zeroed, pruning.loss(model, params, tokens, keep, pruning.nothing(model))

    expected, removed = losses(params, keep)
    # Losses of size 3 from float32 sums in another order.
    assert float(removed) == pytest.approx(float(expected), abs=1e-5)


# induction ------------------------------------------------------------------------------------------------------------


def test_induction_scores_match_see():
    text, draw = induction.held_out(8), np.random.default_rng(0)
    patterns = np.tril(draw.random((2, 8, 3, 64, 64))).astype(np.float32)
    patterns /= patterns.sum(-1, keepdims=True)
    scored = see.scores(patterns, text.tokens, ("induction",)).values["induction"]
    wanted = see.head_scores.targets("induction", text.tokens)
    ours = jax.jit(lambda patterns: induction.induction_scores(patterns, wanted))(patterns)
    # Sums of up to 64 float32 weights, each rounded to 6e-8 of at most 1.
    np.testing.assert_allclose(ours, scored, atol=64 * 6e-8)


def test_induction_models_have_about_equally_many_parameters():
    def count(depth):
        shapes = jax.eval_shape(induction.gpt(depth).init, jax.random.key(0), np.zeros((1, 2), np.int32))
        return sum(leaf.size for leaf in jax.tree.leaves(shapes))

    assert count(induction.TWO) == 37_760 and count(induction.ONE) == 37_312


# gradient_step --------------------------------------------------------------------------------------------------------


def test_descent_equals_a_gradient_step_by_autodiff():
    batch = gradient_step.regressions(0, batch_size=5, points=4, inputs=3)

    @jax.jit
    def step(task):
        x, y = task[:-1, :-1], task[:-1, -1]
        w = -jax.grad(lambda w: ((x @ w - y) ** 2).sum() / 2)(jnp.zeros(3))
        return task[-1, :-1] @ w

    for task, predicted in zip(np.asarray(batch.tokens), np.asarray(jax.jit(gradient_step.descent)(batch.tokens))):
        assert predicted == pytest.approx(float(step(task)), abs=1e-5)  # float32 sums of a dozen terms


def test_constructed_linear_attention_is_a_gradient_step():
    """The construction of von Oswald et al., proposition 1: W_Q = W_K = diag(1, …, 1, 0), W_V = diag(0, …, 0, η)."""
    layer, rate = gradient_step.LAYERS[gradient_step.LINEAR], 0.15
    batch = gradient_step.regressions(0, batch_size=20)
    shapes = jax.eval_shape(layer.init, jax.random.key(0), batch.tokens)["params"]
    kernels = {name: np.zeros(shape["kernel"].shape, np.float32) for name, shape in shapes.items()}
    for i in range(10):
        kernels["query"][i, 0, i] = kernels["key"][i, 0, i] = 1
    kernels["value"][10, 0, 10], kernels["out"][0, 10, 10] = rate, 1
    params = {"params": {name: {"kernel": kernel} for name, kernel in kernels.items()}}

    @jax.jit
    def computed(params):
        expected = rate * gradient_step.descent(batch.tokens)
        predicted = gradient_step.predictions(layer, params, batch.tokens)
        least = gradient_step.half_squares(expected, batch.targets)
        return predicted, expected, *gradient_step._compare(layer, params, batch), least

    predicted, expected, loss, cosine, least = computed(params)
    np.testing.assert_allclose(predicted, expected, atol=1e-5)
    # Float32 sums of some hundred terms.
    assert float(cosine) == pytest.approx(1, abs=1e-5)
    assert float(loss) == pytest.approx(float(least), rel=1e-4)


# recall, markov -------------------------------------------------------------------------------------------------------


def test_recall_gated_convolution_equals_formula(float64):
    x = np.random.default_rng(0).standard_normal((2, 7, 4))
    out, variables = jax.jit(recall.GatedConv().init_with_output)(jax.random.key(0), x)
    params = jax.tree.map(np.asarray, variables["params"])
    convolved = np.zeros_like(x)
    for i in range(7):
        for j in range(i + 1):
            convolved[:, i] += params["kernel"][i - j] * x[:, j]
    gated = convolved * (x @ params["gate"]["kernel"] + params["gate"]["bias"])
    np.testing.assert_allclose(out, gated @ params["out"]["kernel"] + params["out"]["bias"], rtol=1e-10)


def test_predictions_of_markov_match_counting_by_hand():
    tokens = np.asarray(markov.chains(0, batch_size=4, length=30).tokens)
    said = jax.device_get(jax.jit(markov.predictions)(tokens))
    for sequence, place in np.ndindex(4, 30):
        seen = tokens[sequence, : place + 1].tolist()
        unigram = np.array([seen.count(state) + 1 for state in range(3)], np.float64)
        pairs = list(itertools.pairwise(seen))
        bigram = np.array([pairs.count((seen[-1], state)) + 1 for state in range(3)], np.float64)
        for name, counts in (("unigram", unigram), ("bigram", bigram), ("uniform", np.ones(3))):
            # Quotients of small integers, which float32 rounds by 2⁻²⁴ of their size.
            np.testing.assert_allclose(said[name][sequence, place], counts / counts.sum(), rtol=2**-23)
