"""A long vector hijacks attention with raw vectors and with trained projections; only QK-norm stops it.

Trained projections to queries, keys and values may seem to be the remedy. But linear maps preserve scale: a vector c
times as long has a projection c times as long, so its score grows with c unless the matrices map its direction to zero.
Here each of twelve vectors has to find the one partner that shares its pattern, while a thirteenth, unrelated vector is
c times as long. Training uses c from 1 to 4. For c up to 64 the study measures the weight on the long vector and how
often the partner gets the largest weight, with scores from the raw vectors, from trained projections, and from trained
projections with QK-norm (Dehghani et al. 2023), which normalises queries and keys. The long vector's direction is
random: about half of the queries point away from it and are not affected.
"""

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from attnlab import attention_weights, plots
from attnlab.masks import Dense
from attnlab.nn import MultiHeadAttention
from attnlab.study.fitting import Size, fit
from attnlab.study.report import Options, Verdict, table

WIDTH, PAIRS, NOISE = 16, 6, 0.3
FACTORS = (1, 2, 4, 8, 16, 32, 64)
KINDS = ("raw", "Q, K trained", "Q, K trained and normalised")
FAST, FULL = Size(seeds=3, steps=300), Size(seeds=8, steps=2000)


def examples(key, count: int, low: float, high: float):
    """Vectors `[count, 2·PAIRS + 1, WIDTH]`: 2i and 2i + 1 share a pattern; the last is unrelated to all others."""
    patterns, noise, unrelated, factor = jax.random.split(key, 4)
    x = jnp.repeat(jax.random.normal(patterns, (count, PAIRS, WIDTH)), 2, axis=1)
    x = x + NOISE * jax.random.normal(noise, x.shape)
    c = jnp.exp(jax.random.uniform(factor, (count, 1, 1), minval=jnp.log(low), maxval=jnp.log(high)))
    return jnp.concatenate([x, c * jax.random.normal(unrelated, (count, 1, WIDTH))], axis=1)


def weights(kind: str, params, x):
    """Weights `[count, 2·PAIRS, 2·PAIRS + 1]` of all queries except the long vector; no vector attends to itself."""
    others = Dense(~jnp.eye(x.shape[1], dtype=bool))
    if kind == "raw":
        w = attention_weights(x[:, :, None], x[:, :, None], mask=others)
    else:
        _, sown = module(kind).apply(params, x, mask=others, mutable=["intermediates"])
        (w,) = sown["intermediates"]["attention_weights"]
    return w[:, 0, :-1]


def module(kind: str) -> MultiHeadAttention:
    """One head with projections; the normalised kind also has QK-norm."""
    return MultiHeadAttention(num_heads=1, use_bias=False, qk_norm=kind == KINDS[2], impl="dense")


def partners():
    """For each query, the index of the vector with the same pattern."""
    return jnp.arange(2 * PAIRS) ^ 1


def measure(options: Options) -> list[dict]:
    """One row per seed, kind and factor."""
    seeds, steps = FAST if options.fast else FULL
    advance = options.progress(seeds * (len(KINDS) - 1) * steps)  # raw attention is not trained
    rows = []
    for seed in range(seeds):
        for kind in KINDS:
            params = _train(kind, seed, steps, advance) if kind != "raw" else None
            for factor in FACTORS:
                key = jax.random.fold_in(jax.random.key(seed), 10**6 + factor)
                x = examples(key, 256, float(factor), float(factor))
                w = weights(kind, params, x)
                hit_rate = (w.argmax(-1) == partners()).mean()
                measured = {"hijacked": float(w[..., -1].mean()), "found": float(hit_rate)}
                rows.append({"seed": seed, "kind": kind, "factor": factor} | measured)
    return rows


def _train(kind, seed, steps, advance):
    key = jax.random.key(seed)

    def loss(params, x):
        w = weights(kind, params, x)
        right = jnp.take_along_axis(w, jnp.broadcast_to(partners()[:, None], (*w.shape[:2], 1)), axis=-1)
        return -jnp.log(right + 1e-9).mean()

    params = module(kind).init(key, examples(key, 1, 1.0, 4.0))
    batches = jax.jit(lambda step: examples(jax.random.fold_in(key, step), 32, 1.0, 4.0))
    return fit(loss, params, batches, steps, learning_rate=1e-2, advance=advance)


def judge(rows: list[dict]) -> Verdict:
    """Held if, at the largest factor, raw and trained attention are hijacked and normalised attention is not."""
    at = {
        kind: {
            value: {f: np.mean(v) for f, v in table([r for r in rows if r["kind"] == kind], "factor", value).items()}
            for value in ("hijacked", "found")
        }
        for kind in KINDS
    }
    top = FACTORS[-1]
    raw, trained, normed = (at[kind] for kind in KINDS)
    return Verdict.of(
        # More than a third of the weight on one of many vectors counts as a hijack; a change below 2 % does not.
        (raw["hijacked"][top] > 0.35, f"raw: {top} times as long, it takes {raw['hijacked'][top]:.0%} of the weight"),
        (
            trained["hijacked"][top] > 0.35,
            f"trained projections: it takes {trained['hijacked'][top]:.0%}; they find the partner in "
            f"{trained['found'][4]:.0%} of cases at c = 4, as in training (raw: {raw['found'][4]:.0%})",
        ),
        (
            abs(normed["hijacked"][top] - normed["hijacked"][1]) < 0.02,
            f"normalised, it takes {normed['hijacked'][1]:.1%} at c = 1 and {normed['hijacked'][top]:.1%} at c = {top}",
        ),
        (normed["found"][top] > 0.85, f"and the partner is found: {normed['found'][top]:.0%} at c = {top}"),
    )


def draw(rows: list[dict]) -> Figure:
    """Weight on the long vector, and partners found, against its length: means over seeds.

    Left, a rising curve means that the long vector hijacks attention. Training used lengths up to 4.
    """

    def panel(value, y):
        series = {}
        for kind in KINDS:
            grouped = table([r for r in rows if r["kind"] == kind], "factor", value)
            series[kind] = (list(grouped), [100 * np.mean(v) for v in grouped.values()])
        return {"series": series, "x": "length of the long vector (times the others')", "y": y, "log": "x"}

    return plots.panels(
        {
            "the long vector's share": panel("hijacked", "mean weight on the long vector (%)"),
            "finding the partner": panel("found", "queries with most weight on their partner (%)"),
        },
        judge(rows).title("Trained projections are hijacked as raw vectors are; normalised ones are not"),
    )
