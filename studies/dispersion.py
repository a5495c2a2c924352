"""An attention head trained to find the largest of up to 16 items disperses over more, because its logits are bounded.

A set has n items, each with a value in [0, 1) and one of ten classes; the task is to name the class of the largest item
(max retrieval, Veličković et al. 2024, section 3). Like theirs, the model is one attention head from a query to the
items, after an MLP on each item and before one that predicts the class. Trained on n ≤ 16, it is tested on n up to
4,096: largest weight, how often that weight is on the right item, and accuracy. Two oracles come from the head's own
logits, on a grid of all values and classes. Lemma 2.1: no weight exceeds e^(M − m) / n, where M and m are the largest
and smallest logits. A sharper one, for items drawn at random: as n grows, the sum of e^logit tends to n times its mean,
so the largest weight tends to e^M / (n mean e^logit). Controls: the same parameters with the adaptive temperature of
the paper (figure 4: logits are multiplied by a polynomial of the entropy of the weights), and with logits times log n /
log 16 beyond 16 items. Our model differs in its size, its learned query, and its training on sets of 1 to 16 items.
"""

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Bool, Float, Int
from matplotlib.figure import Figure

from attnlab import plots
from attnlab.data.tasks import TEST
from attnlab.data.tasks.task_draws import Number, check_least, compiled, key_of
from attnlab.masks import Padding
from attnlab.nn import Mlp, MultiHeadAttention
from attnlab.results.statistics import Interval
from attnlab.study.fitting import adamw, fit_seeds
from attnlab.study.report import Options, Verdict, table
from attnlab.types import Array

ITEMS, CLASSES, WIDTH, BATCH = 16, 10, 64, 128
LENGTHS = tuple(2**n for n in range(4, 13))
POLYNOMIAL = (-0.037, 0.481, -2.3, 4.917, -1.791)  # Veličković et al. 2024, figure 4
PLAIN, ADAPTIVE, LOGARITHMIC = KINDS = ("softmax", "adaptive temperature", "logits · log n / log 16")
PIECE = 16  # sets evaluated at a time, to limit memory
GRID = 2000  # values in the grid of `logit_range`


class Items(NamedTuple):
    """Sets of items, each with a value and a class."""

    values: Float[Array, "B N"]  # float32 [B, N], in [0, 1)
    classes: Int[Array, "B N"]  # int32 [B, N]
    real: Bool[Array, "B N"]  # bool [B, N], False where a set is shorter than N
    largest: Int[Array, " B"]  # int32 [B], index of the item of largest value
    targets: Int[Array, " B"]  # int32 [B], the class of that item


@compiled
def largest_of(
    step: Number, *, batch_size: int, items: int, fewest: int | None = None, classes: int = 10, seed: Number = 0
) -> Items:
    """Draw sets of items with uniform values; targets are classes of the largest (Veličković et al. 2024, section 3).

    Args:
      items: N, the most items of a set.
      fewest: the fewest items of a set; sizes are uniform from `fewest` to N. None: all sets have N items.
      classes: number of classes.
    """
    fewest = items if fewest is None else fewest
    check_least(batch_size=batch_size, fewest=fewest, classes=classes)
    check_least(fewest, items=items)
    value_key, class_key, size_key = jax.random.split(key_of(step, seed), 3)
    values = jax.random.uniform(value_key, (batch_size, items))
    drawn = jax.random.randint(class_key, (batch_size, items), 0, classes, jnp.int32)
    sizes = jax.random.randint(size_key, (batch_size, 1), fewest, items + 1)
    real = jnp.arange(items) < sizes
    largest = jnp.where(real, values, -1).argmax(-1).astype(jnp.int32)
    return Items(values, drawn, real, largest, jnp.take_along_axis(drawn, largest[:, None], axis=1)[:, 0])


class Size(NamedTuple):
    """Size of the study: seeds, updates, and sets of each length tested (a multiple of PIECE)."""

    seeds: int
    steps: int
    sets: int


FAST, FULL = Size(2, 3000, 128), Size(6, 6000, 256)


class Finder(nn.Module):
    """Predicts the class of the largest item, by one head of attention from a learned query."""

    @nn.compact
    def __call__(self, values, classes, lengths, sharpness=1.0):
        """Logits `[B, CLASSES]` of sets `[B, N]` with `lengths` `[B]`; `sharpness` `[B]` scales the scores."""
        items = jnp.concatenate([values[..., None], jax.nn.one_hot(classes, CLASSES)], axis=-1)
        items = nn.Dense(WIDTH, name="items")(items)
        items = items + Mlp(hidden=WIDTH, name="encoder")(items)
        query = self.param("query", nn.initializers.normal(1.0), (WIDTH,))
        query = jnp.ones((len(values), 1, 1)) * jnp.reshape(sharpness, (-1, 1, 1)) * query
        attention = MultiHeadAttention(num_heads=1, qkv_bias=False, mask=Padding(lengths), impl="dense")
        pooled = attention(query, items)[:, 0]
        return nn.Dense(CLASSES, name="classes")(pooled + Mlp(hidden=WIDTH, name="decoder")(pooled))


MODEL = Finder()


def attend(params, batch, sharpness=1.0):
    """Predictions `[B, CLASSES]` and attention weights `[B, N]` of a batch of `largest_of`."""
    logits, sown = MODEL.apply(
        params, batch.values, batch.classes, batch.real.sum(-1), sharpness, mutable=["intermediates"]
    )
    (weights,) = jax.tree.leaves(sown)
    return logits, weights[:, 0, 0]


def temperatures(weights, length: int):
    """The factors `[KINDS, B]` that scale the logits, computed from the weights `[B, N]` of plain softmax."""
    entropy = -(weights * jnp.log(weights + 1e-9)).sum(-1)
    polynomial = jnp.maximum(jnp.polyval(jnp.array(POLYNOMIAL), entropy), 1.0)
    adaptive = jnp.where(entropy > 0.5, polynomial, 1.0)  # as in the paper, which does not sharpen heads of low entropy
    plain = jnp.ones_like(entropy)
    return jnp.stack([plain, adaptive, plain * max(1.0, np.log(length) / np.log(ITEMS))])


def evaluate(params, step, seed, *, length: int, sets: int):
    """For each kind: the mean largest weight, how often it is on the right item, and the accuracy; three `[KINDS]`."""

    def piece(number):
        batch = largest_of(step + number, batch_size=PIECE, items=length, classes=CLASSES, seed=seed)
        _, weights = attend(params, batch)
        predicted, weights = jax.vmap(lambda sharpness: attend(params, batch, sharpness))(temperatures(weights, length))
        right = predicted.argmax(-1) == batch.targets, weights.argmax(-1) == batch.largest
        return weights.max(-1).mean(-1), right[1].mean(-1), right[0].mean(-1)

    return jax.tree.map(lambda x: x.mean(0), jax.lax.map(piece, jnp.arange(sets // PIECE)))


def logit_range(params):
    """M − m, and e^M divided by the mean of e^logit, for the head's logits on a grid of all values and classes."""
    values = jnp.tile(jnp.linspace(0, 1, GRID), CLASSES)[None]
    classes = jnp.repeat(jnp.arange(CLASSES), GRID)[None]
    lengths = jnp.array([values.size])
    less = 1 / 16  # logits are log weights up to a constant; scaled down, no weight underflows
    _, sown = MODEL.apply(params, values, classes, lengths, less, mutable=["intermediates"])
    logits = jnp.log(jax.tree.leaves(sown)[0]) / less
    below = logits.max() - logits
    return below.max(), 1 / jnp.exp(-below).mean()


def measure(options: Options) -> list[dict]:
    """One row per seed, kind and number of items."""
    size = FAST if options.fast else FULL
    advance = options.progress(size.seeds * size.steps)
    seeds = range(size.seeds)
    first = largest_of(0, batch_size=1, items=ITEMS, classes=CLASSES)
    ((_, params),) = fit_seeds(
        _loss,
        lambda key: MODEL.init(key, first.values, first.classes, first.real.sum(-1)),
        lambda step, seed: largest_of(step, batch_size=BATCH, items=ITEMS, fewest=1, classes=CLASSES, seed=seed),
        adamw(size.steps, 3e-3),
        seeds=seeds,
        looks=[size.steps],
        advance=advance,
    )
    spread, limit = map(np.asarray, jax.jit(jax.vmap(logit_range))(params))
    rows = []
    for length in LENGTHS:
        test = jax.jit(functools.partial(evaluate, length=length, sets=size.sets))
        for seed in seeds:
            measured = map(np.asarray, test(jax.tree.map(lambda x, seed=seed: x[seed], params), TEST, seed))
            for kind, weight, on_largest, right in zip(KINDS, *measured):
                row = {"seed": seed, "kind": kind, "items": length, "largest weight": float(weight)}
                row |= {"on the largest": float(on_largest), "accuracy": float(right), "spread": float(spread[seed])}
                rows.append(row | {"limit": float(limit[seed]) / length})
    return rows


def _loss(params, batch):
    logits = MODEL.apply(params, batch.values, batch.classes, batch.real.sum(-1))
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets).mean()


def _at(rows, kind, items, value) -> list[float]:
    """A measurement for each seed."""
    return [r[value] for r in rows if (r["kind"], r["items"]) == (kind, items)]


def judge(rows: list[dict]) -> Verdict:
    """Held if each seed is sharp and right at 16 items and less so at 4,096, as predicted, and both remedies help."""
    few, many = LENGTHS[0], LENGTHS[-1]
    plain = [r for r in rows if r["kind"] == PLAIN]
    spread = Interval.of(_at(rows, PLAIN, many, "spread"))
    exceeded = sum(np.log(r["largest weight"] * r["items"]) > r["spread"] + 1e-3 for r in plain)  # rounding
    ratio = Interval.of([r["largest weight"] / r["limit"] for r in plain if r["items"] == many])
    weight = {n: _at(rows, PLAIN, n, "largest weight") for n in (few, many)}
    right = {kind: {n: _at(rows, kind, n, "accuracy") for n in (few, many)} for kind in KINDS}
    on_largest = Interval.of(_at(rows, PLAIN, many, "on the largest"))
    remedies = []
    for kind, name in ((ADAPTIVE, "adaptive temperature"), (LOGARITHMIC, f"logits times log n / log {ITEMS}")):
        better = all(a > b for a, b in zip(right[kind][many], right[PLAIN][many]))
        remedied = Interval.of(_at(rows, kind, many, "largest weight"))
        text = f"{name}, {many:,} items: largest weight {remedied:.3f}, accuracy {Interval.of(right[kind][many]):.2f}"
        remedies.append((better, text))
    return Verdict.of(
        # Sharp: most of the weight on one item.
        (
            min(weight[few]) > 0.5 and min(right[PLAIN][few]) > 0.9,
            f"{few} items: largest weight {Interval.of(weight[few]):.2f}, "
            f"accuracy {Interval.of(right[PLAIN][few]):.2f}",
        ),
        (
            max(weight[many]) < 0.5 and max(right[PLAIN][many]) < min(right[PLAIN][few]),
            f"{many:,} items: largest weight {Interval.of(weight[many]):.3f}, accuracy "
            f"{Interval.of(right[PLAIN][many]):.2f}, though it is on the right item in {on_largest:.2f}",
        ),
        (
            exceeded == 0,
            f"the bound e^(M − m) / n is exceeded in {exceeded} of {len(plain)} rows, but M − m is {spread:.0f}: "
            f"it binds only from e^{spread.mean:.0f} items on",
        ),
        # The limit is for many items near the largest logit; with 4,096 items the error is some per cent.
        (
            abs(ratio.mean - 1) < 0.2,
            f"e^M / (n mean e^logit) predicts the largest weight at {many:,}: measured over predicted is {ratio:.2f}",
        ),
        *remedies,
    )


def draw(rows: list[dict]) -> Figure:
    """Largest weight and accuracy over the number of items; bands are standard deviations over seeds.

    The head was trained on up to 16 items; the dashed curve is the largest weight that its logits predict for many.
    """
    panels = {}
    for value, y in (("largest weight", "largest weight"), ("accuracy", "accuracy (%)")):
        scale = 100 if value == "accuracy" else 1
        series, spread = {}, {}
        for kind in KINDS:
            grouped = table([r for r in rows if r["kind"] == kind], "items", value)
            series[kind] = (list(grouped), [scale * float(np.mean(v)) for v in grouped.values()])
            spread[kind] = [scale * float(np.std(v)) for v in grouped.values()]
        x = {"x": "items (n)", "log": "x"}
        panels[f"trained on n ≤ {ITEMS}: {value}"] = {"series": series, "y": y, "spread": spread} | x
    grouped = table([r for r in rows if r["kind"] == PLAIN], "items", "limit")
    limit = {n: float(np.mean(v)) for n, v in grouped.items() if np.mean(v) <= 1}
    first = next(iter(panels.values()))
    first["series"]["e^M / (n mean e^logit)"] = (list(limit), list(limit.values()))
    first["dashed"] = ("e^M / (n mean e^logit)",)
    return plots.panels(panels, judge(rows).title("A head that finds the largest of 16 items disperses over thousands"))
