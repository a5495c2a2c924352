"""The study `gradient_step`: the best step of gradient descent, and the verdict."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab._studies import gradient_step
from attnlab._studies.gradient_step import HALF, LAYERS, LINEAR, SOFTMAX, STEP, regressions
from tests.studies import claims


def test_descent_equals_a_gradient_step_by_autodiff():
    batch = regressions(0, batch_size=5, points=4, inputs=3)

    @jax.jit
    def step(task):
        x, y = task[:-1, :-1], task[:-1, -1]
        w = -jax.grad(lambda w: ((x @ w - y) ** 2).sum() / 2)(jnp.zeros(3))
        return task[-1, :-1] @ w

    for task, predicted in zip(np.asarray(batch.tokens), np.asarray(jax.jit(gradient_step.descent)(batch.tokens))):
        assert predicted == pytest.approx(float(step(task)), abs=1e-5)  # float32 sums of a dozen terms


def test_best_rate_has_the_least_loss_of_a_line_search():
    batch = regressions(0, batch_size=300)
    rates = np.linspace(0.05, 0.3, 501)  # 0.0005 apart
    step, targets = (np.asarray(x, np.float64) for x in (jax.jit(gradient_step.descent)(batch.tokens), batch.targets))
    losses = ((rates[:, None] * step - targets) ** 2).mean(1)
    assert float(jax.jit(gradient_step.best_rate)(batch.tokens, batch.targets)) == pytest.approx(
        rates[losses.argmin()],
        abs=0.00026,  # half of the distance
    )


def test_constructed_linear_attention_is_a_gradient_step():
    """The construction of von Oswald et al., proposition 1: W_Q = W_K = diag(1, …, 1, 0), W_V = diag(0, …, 0, η)."""
    layer, rate = LAYERS[LINEAR], 0.15
    batch = regressions(0, batch_size=20)
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
    # Float32, as are the sums of some hundred terms.
    assert float(cosine) == pytest.approx(1, abs=1e-5)
    assert float(loss) == pytest.approx(float(least), rel=1e-4)


def make_rows(linear=0.805, softmax=1.27, half=1.0, untrained=1.6, cosine=0.999):
    rows = []
    for seed in range(2):
        drift = 0.001 * seed
        for name, loss, rate in ((STEP, 0.8, 0.15), (HALF, half, 0.075)):
            rows.append({"seed": seed, "predictor": name, "step": 0, "loss": loss + drift, "rate": rate})
        for name, loss in ((LINEAR, linear), (SOFTMAX, softmax)):
            last = cosine if name == LINEAR else 0.7
            for step, now, along in ((0, untrained, 0.0), (100, loss, last)):
                measured = {"loss": now + drift, "cosine": along}
                rows.append({"seed": seed, "predictor": name, "step": step, **measured})
    return rows


def test_gradient_step_claim():
    assert "+0.62" in gradient_step.judge(make_rows()).parts[0][1]  # 0.805 / 0.8
    changes = {
        "linear attention is worse": (0, {"linear": 0.81}),
        "linear attention is better": (0, {"linear": 0.79}),
        "other sensitivities": (1, {"cosine": 0.98}),
        "softmax does as well": (2, {"softmax": 0.805}),
        "the rate does not matter": (3, {"half": 0.805}),
        "training does not matter": (3, {"untrained": 0.805}),
    }
    refuted = {name: (part, make_rows(**change)) for name, (part, change) in changes.items()}
    claims.check(gradient_step, make_rows(), refuted, "Linear attention learns")


def test_regression_points_and_query_are_of_one_linear_function():
    batch = regressions(0, batch_size=500, points=6, inputs=3)
    x, y = np.asarray(batch.tokens[..., :-1]), np.asarray(batch.tokens[..., -1])
    assert batch.tokens.shape == (500, 7, 4) and (y[:, -1] == 0).all()
    expected = np.einsum("btf,bf->bt", x, batch.weights)
    np.testing.assert_allclose(y[:, :-1], expected[:, :-1], atol=1e-6)  # float32 sums of three terms
    np.testing.assert_allclose(batch.targets, expected[:, -1], atol=1e-6)


def test_regression_inputs_are_uniform_and_weights_normal():
    batch = regressions(0, batch_size=4000, points=4, inputs=5)
    x, w = np.asarray(batch.tokens[..., :-1]), np.asarray(batch.weights)
    assert x.min() >= -1 and x.max() < 1
    # Standard errors of the mean squares of 100,000 and 20,000 numbers are 0.001 and 0.01: four of each.
    assert abs((x**2).mean() - 1 / 3) < 0.004 and abs((w**2).mean() - 1) < 0.04
