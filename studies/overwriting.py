"""A delta rule replaces the value of a key that is written again; linear attention adds to it, and recalls less.

Associative recall: a sequence shows four key–value pairs, then writes some of the keys again with other values, and
asks for the last value of each key. Linear attention adds up all values written to a key; the delta rule first erases
what its state holds for the key. A model is an embedding, a convolution that mixes each token with the previous one, so
that a value's position also knows its key, and a layer of the mixer under test with one head. The measure is the share
of values recalled against the number of pairs that are written again. The control is the same sequence without
rewrites, where both mixers recall.

After Schlag, Irie and Schmidhuber 2021, "Linear Transformers Are Secretly Fast Weight Programmers" (arXiv 2102.11174),
where keys are drawn with replacement.
"""

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float, Int
from matplotlib.figure import Figure

from attnlab import plots
from attnlab.data.tasks import TEST, recall
from attnlab.nn import Block, CausalConv, GatedDeltaNet, LinearAttention
from attnlab.results.statistics import Interval
from attnlab.study.fitting import adamw, fit_seeds
from attnlab.study.report import Options, Verdict, table
from attnlab.types import Array

PAIRS, VOCABULARY, WIDTH, LEARNING_RATE = 4, 41, 64, 5e-3
LINEAR, DELTA = "linear attention", "delta rule"
MIXERS = {
    LINEAR: LinearAttention,
    DELTA: functools.partial(GatedDeltaNet, conv=0, decay=False, gate=False),
}
ENOUGH, LOSS = 0.9, 0.2


class Size(NamedTuple):
    """Size of the study."""

    seeds: int  # models for each mixer and number of rewrites
    steps: int  # training steps
    rewrites: tuple[int, ...]
    examples: int  # held-out sequences


FAST, FULL = Size(2, 300, (0, 8), 256), Size(6, 600, (0, 4, 8, 16), 1024)


class Model(nn.Module):
    """Logits of the values of the queried keys."""

    mixer: str  # one of `MIXERS`

    @nn.compact
    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B P V"]:
        """Logits of the last P of tokens `[B, 3·P + 2·R]`."""
        x = nn.Embed(VOCABULARY, WIDTH, embedding_init=nn.initializers.normal(0.02), name="embed")(tokens)
        x = Block(CausalConv(kernel_size=2), name="pairing")(x)
        x = Block(MIXERS[self.mixer](), name="mixing")(x)
        return nn.Dense(VOCABULARY, name="output")(nn.LayerNorm(name="norm")(x[:, -PAIRS:]))


def measure(options: Options) -> list[dict]:
    """One row for each mixer, number of rewrites and seed: the share of values recalled."""
    size = FAST if options.fast else FULL
    runs = [(mixer, rewrites) for mixer in MIXERS for rewrites in size.rewrites]
    advance = options.progress(len(runs) * size.seeds * size.steps)
    rows = []
    for mixer, rewrites in runs:
        draw = functools.partial(recall, pairs=(PAIRS,), rewrites=rewrites, vocab_size=VOCABULARY)
        params, test = _train(Model(mixer), draw, size, advance), draw(TEST, batch_size=size.examples)
        answers = jax.jit(jax.vmap(Model(mixer).apply, in_axes=(0, None)))(params, test.tokens).argmax(-1)
        for seed, share in enumerate(np.asarray(answers == test.targets).mean((1, 2))):
            rows.append({"mixer": mixer, "rewrites": rewrites, "seed": seed, "recalled": float(share)})
    return rows


def _train(model, draw, size, advance):
    def loss(params, batch):
        logits = model.apply(params, batch.tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets).mean()

    def batches(step, seed):
        return draw(step, batch_size=32, seed=seed)

    def init(key):
        return model.init(key, jnp.zeros((1, 3 * PAIRS), jnp.int32))

    optimizer, looks = adamw(size.steps, LEARNING_RATE), [size.steps]
    ((_, params),) = fit_seeds(loss, init, batches, optimizer, seeds=range(size.seeds), looks=looks, advance=advance)
    return params


def judge(rows: list[dict]) -> Verdict:
    """Held if both mixers recall pairs written once, and only linear attention fails on pairs written again."""
    none, most = min(r["rewrites"] for r in rows), max(r["rewrites"] for r in rows)

    def at(mixer, rewrites):
        return Interval.of([r["recalled"] for r in rows if (r["mixer"], r["rewrites"]) == (mixer, rewrites)])

    once, again = (min(at(mixer, none).mean for mixer in MIXERS), at(LINEAR, most))
    return Verdict.of(
        (once >= ENOUGH, f"with {none} pairs written again each mixer recalls {once:.2f} or more"),
        (at(DELTA, most).mean >= ENOUGH, f"with {most} the {DELTA} recalls {at(DELTA, most):.2f}"),
        (
            again.mean <= at(LINEAR, none).mean - LOSS and again.high < at(DELTA, most).low,
            f"{LINEAR} recalls {at(LINEAR, none):.2f} with {none}, and {again:.2f} with {most}",
        ),
    )


def draw(rows: list[dict]) -> Figure:
    """The share of values recalled against the number of pairs written again; bands: deviations over seeds."""
    curves = {mixer: table([r for r in rows if r["mixer"] == mixer], "rewrites", "recalled") for mixer in MIXERS}
    panel = {
        "series": {mixer: (list(curve), [np.mean(v) for v in curve.values()]) for mixer, curve in curves.items()},
        "spread": {mixer: [np.std(v) for v in curve.values()] for mixer, curve in curves.items()},
        "x": f"pairs written again, of {PAIRS} keys",
        "y": "last values recalled (share)",
    }
    title = "The delta rule recalls the last value of a key; linear attention a mixture of all"
    return plots.panels({"associative recall": panel}, judge(rows).title(title), columns=1)
