"""Trained on linear regression in context, one layer of linear attention becomes one step of gradient descent.

The input is ten points (x_i, y_i) of a linear function of ten inputs, then a query (x, 0). The query's last entry after
one head of linear attention, without normalisation or biases, is the prediction (von Oswald et al. 2023, section 3).
The exact oracle is one step of gradient descent from w = 0 on Σ(w·x_i − y_i)²/2, which predicts η Σ y_i x_i·x; the
study finds the best η for held-out tasks by least squares. On other held-out tasks it measures the gap between the
losses, and the cosine between the sensitivities of the predictions to the query, d prediction / dx. The controls are
one head of softmax attention trained the same way, both layers untrained, and a step of half the best η.

Differences from theirs: no skip connection (it adds 0 to the prediction), the query also attends to itself, the head
has 32 features instead of 11 (with 11 and their initial weights, two of eight seeds stay at 1.9 times the loss for
2,000 updates), and Adam's learning rate, 10⁻³, decays to 0.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float
from matplotlib.figure import Figure

from attnlab import plots
from attnlab.data.tasks import TEST
from attnlab.data.tasks.task_draws import Number, check_least, compiled, key_of
from attnlab.masks import Causal
from attnlab.nn import LinearAttention, MultiHeadAttention
from attnlab.results.statistics import Interval
from attnlab.study.fitting import Size, fit_seeds
from attnlab.study.report import Options, Verdict, table
from attnlab.types import Array

POINTS, INPUTS, BATCH = 10, 10, 512
EVALUATED = 10_000  # held-out tasks
LOOKS = 10
OPTIONS = {"num_heads": 1, "use_bias": False, "kernel_init": jax.nn.initializers.normal(0.05)}
LAYERS = {
    "linear attention": LinearAttention(key_dim=32, feature_map=lambda x: x, normalize=False, **OPTIONS),
    "softmax attention": MultiHeadAttention(head_dim=32, mask=Causal(), impl="dense", **OPTIONS),
}
LINEAR, SOFTMAX = LAYERS
STEP, HALF = "gradient step", "half a step"


FAST, FULL = Size(2, 1000), Size(6, 3000)


class Regressions(NamedTuple):
    """Linear regression tasks, each with a query."""

    tokens: Float[Array, "B T F1"]  # float32 [B, N + 1, F + 1], the points (x_i, y_i), then the query (x, 0)
    targets: Float[Array, " B"]  # float32 [B], w·x of the query
    weights: Float[Array, "B F"]  # float32 [B, F], w of each task


@compiled
def regressions(step: Number, *, batch_size: int, points: int = 10, inputs: int = 10, seed: Number = 0) -> Regressions:
    """Draw linear regression tasks (von Oswald et al. 2023, section 3): x uniform in (−1, 1), w normal, y = w·x.

    Args:
      points: N, points in the context.
      inputs: F, size of x.
    """
    check_least(batch_size=batch_size, points=points, inputs=inputs)
    weight_key, input_key = jax.random.split(key_of(step, seed))
    weights = jax.random.normal(weight_key, (batch_size, inputs))
    x = jax.random.uniform(input_key, (batch_size, points + 1, inputs), minval=-1, maxval=1)
    y = (x * weights[:, None]).sum(-1)
    tokens = jnp.concatenate([x, y.at[:, -1].set(0)[..., None]], axis=-1)
    return Regressions(tokens, y[:, -1], weights)


def predictions(layer, params, tokens):
    """The layer's predictions `[B]` for tasks `[B, N + 1, F + 1]`."""
    return layer.apply(params, tokens)[:, -1, -1]


def descent(tokens):
    """Predictions `[B]` of one step with a learning rate of 1: Σ y_i x_i·x."""
    x, y, query = tokens[:, :-1, :-1], tokens[:, :-1, -1:], tokens[:, -1, :-1]
    return ((y * x).sum(1) * query).sum(-1)


def best_rate(tokens, targets):
    """The learning rate that minimizes the squared error after one step on these tasks."""
    step = descent(tokens)
    return (step * targets).sum() / (step**2).sum()


def sensitivities(predict, tokens):
    """d prediction / d x of the query, `[B, F]`."""
    return jax.grad(lambda tokens: predict(tokens).sum())(tokens)[:, -1, :-1]


def half_squares(predicted, targets):
    """The loss of von Oswald et al.: half of the mean squared error."""
    return ((predicted - targets) ** 2).mean() / 2


def measure(options: Options) -> list[dict]:
    """One row per seed, predictor and number of updates; the gradient steps have one row per seed."""
    size = FAST if options.fast else FULL
    advance = options.progress(len(LAYERS) * size.seeds * size.steps)
    seeds = range(size.seeds)
    looks = [size.steps * n // LOOKS for n in range(LOOKS + 1)]
    tuning, test = (jax.vmap(functools.partial(_held_out, TEST + n))(jnp.arange(size.seeds)) for n in range(2))
    rates = jax.vmap(best_rate)(tuning.tokens, tuning.targets)
    losses = jax.vmap(lambda rate, test: half_squares(rate * descent(test.tokens), test.targets))
    rows = []
    for name, share in ((STEP, 1.0), (HALF, 0.5)):
        for seed, (rate, loss) in enumerate(zip(share * rates, losses(share * rates, test))):
            rows.append({"seed": seed, "predictor": name, "step": 0, "loss": float(loss), "rate": float(rate)})
    for name, layer in LAYERS.items():
        fitted = fit_seeds(
            functools.partial(_loss, layer),
            lambda key, layer=layer: layer.init(key, jnp.zeros((1, POINTS + 1, INPUTS + 1))),
            lambda step, seed: regressions(step, batch_size=BATCH, points=POINTS, inputs=INPUTS, seed=seed),
            optax.adam(optax.cosine_decay_schedule(1e-3, size.steps)),
            seeds=seeds,
            looks=looks,
            advance=advance,
        )
        compare = jax.jit(jax.vmap(functools.partial(_compare, layer)))
        for step, params in fitted:
            for seed, (loss, cosine) in enumerate(zip(*map(np.asarray, compare(params, test)))):
                measured = {"loss": float(loss), "cosine": float(cosine)}
                rows.append({"seed": seed, "predictor": name, "step": step} | measured)
    return rows


def _held_out(step, seed):
    return regressions(step, batch_size=EVALUATED, points=POINTS, inputs=INPUTS, seed=seed)


def _loss(layer, params, batch):
    return half_squares(predictions(layer, params, batch.tokens), batch.targets)


def _compare(layer, params, test):
    """A layer's loss, and the mean cosine of its sensitivities with the sensitivities of gradient descent."""
    predict = functools.partial(predictions, layer, params)
    ours, theirs = sensitivities(predict, test.tokens), sensitivities(descent, test.tokens)
    return half_squares(predict(test.tokens), test.targets), optax.losses.cosine_similarity(
        ours, theirs, epsilon=1e-12
    ).mean()


def _gaps(rows, predictor, step=None) -> list[float]:
    """By seed, how many per cent a predictor's loss is above the loss of the best gradient step."""
    chosen = [r for r in rows if r["predictor"] == predictor]
    step = max(r["step"] for r in chosen) if step is None else step
    best = {r["seed"]: r["loss"] for r in rows if r["predictor"] == STEP}
    return [100 * (r["loss"] / best[r["seed"]] - 1) for r in chosen if r["step"] == step]


def judge(rows: list[dict]) -> Verdict:
    """Held if linear attention is within 1 % of the best gradient step for every seed, and the controls are not."""
    last = max(r["step"] for r in rows)
    cosines = {name: [r["cosine"] for r in rows if (r["predictor"], r["step"]) == (name, last)] for name in LAYERS}
    gaps = {name: _gaps(rows, name) for name in (LINEAR, SOFTMAX, HALF)}
    untrained = {name: Interval.of(_gaps(rows, name, 0)) for name in LAYERS}
    rate = Interval.of([r["rate"] for r in rows if r["predictor"] == STEP])
    return Verdict.of(
        (
            max(map(abs, gaps[LINEAR])) <= 1,
            f"linear attention: loss {Interval.of(gaps[LINEAR]):+.2f} % above one gradient step with the best rate, "
            f"{rate:.4f} (largest gap of a seed: {max(gaps[LINEAR], key=abs):+.2f} %)",
        ),
        # The cosine has the same 1 %: equal predictions have sensitivities with cosine 1.
        (min(cosines[LINEAR]) >= 0.99, f"the cosine of its sensitivities is {Interval.of(cosines[LINEAR]):.4f}"),
        (
            min(gaps[SOFTMAX]) > 1,
            f"softmax attention ends {Interval.of(gaps[SOFTMAX]):.0f} % above it, "
            f"cosine {Interval.of(cosines[SOFTMAX]):.2f}",
        ),
        (
            min(gaps[HALF] + [untrained[name].low for name in LAYERS]) > 1,
            f"a step of half that rate is {Interval.of(gaps[HALF]):.0f} % above, linear attention untrained "
            f"{untrained[LINEAR]:.0f} %, softmax untrained {untrained[SOFTMAX]:.0f} %",
        ),
    )


def draw(rows: list[dict]) -> Figure:
    """Losses and cosines through training; bands are standard deviations over seeds.

    Left, a layer makes the gradient step if its curve meets the dashed line. Right, a cosine of 1 means that the
    predictions of layer and step depend on the query in the same direction.
    """
    panels = {}
    for value, title, y in (
        ("loss", "held-out tasks", "loss (half of the mean squared error)"),
        ("cosine", "sensitivities to the query", "cosine with those of the gradient step"),
    ):
        series, spread = {}, {}
        for name in LAYERS:
            grouped = table([r for r in rows if r["predictor"] == name], "step", value)
            series[name] = (list(grouped), [float(np.mean(v)) for v in grouped.values()])
            spread[name] = [float(np.std(v)) for v in grouped.values()]
        panels[title] = {"series": series, "x": "step (updates)", "y": y, "spread": spread, "markers": False}
    steps = panels["held-out tasks"]["series"][LINEAR][0]
    for name in (HALF, STEP):
        loss = np.mean([r["loss"] for r in rows if r["predictor"] == name])
        panels["held-out tasks"]["series"][name] = ([steps[0], steps[-1]], [loss, loss])
    panels["held-out tasks"]["dashed"] = (STEP,)
    return plots.panels(panels, judge(rows).title("Linear attention learns to make one step of gradient descent"))
