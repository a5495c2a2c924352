"""With softmax attention a fixed width recalls any number of pairs; with linear attention the width has to grow.

Multi-query associative recall: a sequence shows n key–value pairs, then asks for the values of keys. A model is an
embedding, a convolution that mixes each token with the previous one, so that a value's position also knows its key (the
same in all models), and a layer of the mixer under test: one head of softmax attention, one of linear attention, a GRU,
or a gated convolution over all positions. Each is trained on fresh sequences with all numbers of pairs, because a small
fixed set would be memorised. The measure is the share of values recalled, for each number of pairs and width, and from
it the smallest width at which a mixer recalls 0.9 on average over the seeds. The softmax model is the control: the same
data, layers and steps.

After Arora et al. 2023, "Zoology: Measuring and Improving Recall in Efficient Language Models" (arXiv 2312.04927),
figure 2, and its code. Their models have two layers of attention with learned positions, or four of another mixer, a
vocabulary of 8,192, one number of pairs each, and the best of four learning rates. Ours have a vocabulary of 256, all
numbers of pairs, and the convolution in place of the first layer, which saves most of the steps and needs no positions;
the learning rate is 0.01 for all, not tuned for each. Linear attention, with the feature map elu + 1, is not among the
mixers of their figure. All models are measured after the same number of steps: a GRU or a convolution that recalls
nothing by then might do so later.
"""

import functools
import math
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
from attnlab.masks import Causal
from attnlab.nn import GRU, Block, CausalConv, LinearAttention, MultiHeadAttention
from attnlab.results.statistics import Interval
from attnlab.study.fitting import adamw, fit_seeds
from attnlab.study.report import Options, Verdict, table
from attnlab.types import Array

VOCABULARY, PAIRS = 256, (4, 8, 16)
ENOUGH = 0.9
SOFTMAX, LINEAR, RECURRENT, CONVOLUTION = "softmax attention", "linear attention", "GRU", "gated convolution"


class GatedConv(nn.Module):
    """A causal filter as long as the sequence for each feature, times a gate: the BaseConv of Arora et al. 2023."""

    @nn.compact
    def __call__(self, x: Float[Array, "B T F"], **_) -> Float[Array, "B T F"]:
        """The product of convolution and gate, projected; other arguments have no effect."""
        length, width = x.shape[1:]
        filters = self.param("kernel", nn.initializers.normal(length**-0.5), (length, width))
        distance = jnp.arange(length)[:, None] - jnp.arange(length)
        convolved = jnp.einsum("ijf,bjf->bif", jnp.where(distance[..., None] >= 0, filters[distance], 0), x)
        return nn.Dense(width, name="out")(convolved * nn.Dense(width, name="gate")(x))


MIXERS = {
    SOFTMAX: functools.partial(MultiHeadAttention, num_heads=1, mask=Causal()),
    LINEAR: LinearAttention,
    RECURRENT: GRU,
    CONVOLUTION: GatedConv,
}
LEARNING_RATE = 1e-2


class Size(NamedTuple):
    """Size of the study."""

    seeds: int  # models for each mixer and width
    steps: int  # training steps
    widths: tuple[int, ...]
    widths_of_others: tuple[int, ...]  # for the GRU and the convolution
    batch_size: int
    examples: int  # held-out sequences


FAST = Size(seeds=2, steps=350, widths=(16, 64), widths_of_others=(), batch_size=32, examples=512)
FULL = Size(6, 400, widths=(16, 32, 64, 96), widths_of_others=(32,), batch_size=32, examples=2048)


class Model(nn.Module):
    """Logits of the values of the queried keys."""

    mixer: str  # one of `MIXERS`
    width: int  # width of all layers

    @nn.compact
    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B P V"]:
        """Logits `[B, P, V]` of the last P of tokens `[B, 3·P]`."""
        x = nn.Embed(VOCABULARY, self.width, embedding_init=nn.initializers.normal(0.02), name="embed")(tokens)
        x = Block(CausalConv(kernel_size=2), name="pairing")(x)
        x = Block(MIXERS[self.mixer](), name="mixing")(x)
        return nn.Dense(VOCABULARY, name="output")(nn.LayerNorm(name="norm")(x[:, -(tokens.shape[1] // 3) :]))


def measure(options: Options) -> list[dict]:
    """One row per mixer, width, seed and number of pairs: the share of values recalled."""
    size = FAST if options.fast else FULL
    runs = [
        (mixer, width)
        for mixer in MIXERS
        for width in (size.widths if mixer in (SOFTMAX, LINEAR) else size.widths_of_others)
    ]
    advance = options.progress(len(runs) * size.seeds * size.steps)
    test = recall(TEST, batch_size=size.examples, pairs=PAIRS, vocab_size=VOCABULARY)
    rows = []
    for mixer, width in runs:
        params = _train(Model(mixer, width), size, advance)
        right = _right(Model(mixer, width), params, test)
        for seed in range(size.seeds):
            for pairs in PAIRS:
                share = right[seed, np.asarray(test.pairs) == pairs].mean()
                rows.append({"mixer": mixer, "width": width, "seed": seed, "pairs": pairs, "recalled": float(share)})
    return rows


def _train(model, size, advance):
    def loss(params, batch):
        logits = model.apply(params, batch.tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets).mean()

    def batches(step, seed):
        return recall(step, batch_size=size.batch_size, pairs=PAIRS, vocab_size=VOCABULARY, seed=seed)

    def init(key):
        return model.init(key, jnp.zeros((1, 3 * max(PAIRS)), jnp.int32))

    optimizer, looks = adamw(size.steps, LEARNING_RATE), [size.steps]
    # Under vmap the products of a GRU's or a convolution's steps are slow on CPUs: train one seed per device.
    at_once = size.seeds if model.mixer in (SOFTMAX, LINEAR) else len(jax.local_devices())
    fitted = []
    for first in range(0, size.seeds, at_once):
        seeds = range(first, min(first + at_once, size.seeds))
        fitted += [p for _, p in fit_seeds(loss, init, batches, optimizer, seeds=seeds, looks=looks, advance=advance)]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *fitted)


def _right(model, params, test):
    """Which values each seed's model recalls, `[seeds, B, P]`."""
    predicted = jax.jit(jax.vmap(lambda params: model.apply(params, test.tokens).argmax(-1)))(params)
    return np.asarray(predicted == test.targets)


def needed(rows: list[dict], mixer: str) -> dict[int, int | float]:
    """For each number of pairs, the smallest width whose mean recall is at least `ENOUGH`; infinity if none is."""
    chosen = [r for r in rows if r["mixer"] == mixer]
    widths = {}
    for pairs in sorted({r["pairs"] for r in chosen}):
        shares = table([r for r in chosen if r["pairs"] == pairs], "width", "recalled")
        widths[pairs] = next((width for width, values in shares.items() if np.mean(values) >= ENOUGH), math.inf)
    return widths


def judge(rows: list[dict]) -> Verdict:
    """Held if softmax attention always needs one width, linear attention more for more pairs, and the others more."""
    widths = {mixer: needed(rows, mixer) for mixer in MIXERS}
    soft, linear = (list(widths[mixer].values()) for mixer in (SOFTMAX, LINEAR))
    most = max(PAIRS)
    narrow = min(r["width"] for r in rows if r["mixer"] == LINEAR)

    def at(mixer, width, pairs):
        chosen = [r for r in rows if (r["mixer"], r["width"], r["pairs"]) == (mixer, width, pairs)]
        return Interval.of([r["recalled"] for r in sorted(chosen, key=lambda r: r["seed"])])

    parts = [
        (
            len(set(soft)) == 1 and math.isfinite(soft[0]),
            f"{SOFTMAX} reaches a recall of {ENOUGH} {_in_words(rows, widths, SOFTMAX)}",
        ),
        (
            linear == sorted(linear) and linear[0] < linear[-1],
            f"{LINEAR} {_in_words(rows, widths, LINEAR)}",
        ),
        (
            at(LINEAR, narrow, min(PAIRS)).mean > at(LINEAR, narrow, most).mean,
            f"at width {narrow}, {LINEAR} recalls {at(LINEAR, narrow, min(PAIRS)):.2f} of {min(PAIRS)} pairs and "
            f"{at(LINEAR, narrow, most):.2f} of {most}",
        ),
    ]
    for mixer in _others(rows):
        widest = max(r["width"] for r in rows if r["mixer"] == mixer)  # must reach softmax attention's width
        parts.append(
            (widths[mixer][most] > soft[-1] and widest >= soft[-1], f"{mixer} {_in_words(rows, widths, mixer)}")
        )
    return Verdict.of(*parts)


def _measured(rows) -> list[str]:
    """The mixers of the rows: softmax and linear attention, and the others, which --fast leaves out."""
    return [mixer for mixer in MIXERS if any(r["mixer"] == mixer for r in rows)]


def _others(rows) -> list[str]:
    return [mixer for mixer in _measured(rows) if mixer not in (SOFTMAX, LINEAR)]


def _in_words(rows, widths, mixer):
    """The widths that a mixer needs: "at width 16 (4 pairs), 64 (8 pairs)"."""
    largest = max(r["width"] for r in rows if r["mixer"] == mixer)
    by_pairs = widths[mixer]
    if set(by_pairs.values()) == {math.inf}:
        widest = [r for r in rows if (r["mixer"], r["width"]) == (mixer, largest)]
        best = np.mean(table(widest, "pairs", "recalled")[min(PAIRS)])
        return f"at no width up to {largest} (there {best:.2f} of {min(PAIRS)} pairs)"
    words = (f"{width if math.isfinite(width) else f'over {largest}'} ({n} pairs)" for n, width in by_pairs.items())
    return f"at width {', '.join(words)}"


def draw(rows: list[dict]) -> Figure:
    """The share of values recalled against the width, one panel per number of pairs; bands: deviations over seeds.

    A mixer needs the width at which its curve passes 0.9. Bands are wide where only some seeds have learned the task
    within the training steps.
    """
    panels = {}
    for pairs in PAIRS:
        chosen = [r for r in rows if r["pairs"] == pairs]
        by_mixer = {mixer: [r for r in chosen if r["mixer"] == mixer] for mixer in _measured(rows)}
        grouped = {mixer: table(mixer_rows, "width", "recalled") for mixer, mixer_rows in by_mixer.items()}
        panels[f"{pairs} pairs"] = {
            "series": {name: (list(curve), [np.mean(v) for v in curve.values()]) for name, curve in grouped.items()},
            "spread": {name: [np.std(v) for v in curve.values()] for name, curve in grouped.items()},
            "x": "width of the model (features)",
            "y": "values recalled (share)",
            "log": "x",
        }
    title = "The more pairs, the more width linear attention needs to recall them; softmax attention needs no more"
    return plots.panels(panels, judge(rows).title(title), columns=3)
