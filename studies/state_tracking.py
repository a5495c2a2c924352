"""A delta rule can track parity beyond the trained lengths if, and only if, its update may have negative eigenvalues.

After each bit of a sequence the model says whether the number of ones so far is odd: a one-bit state, flipped by each
one. The delta rule multiplies its state by I − βkkᵀ, with eigenvalue 1 − β at k: with β ≤ 1 that can shrink a state,
but never flip it; with β ≤ 2 it can. A model is an embedding, one block of the mixer under test and a feed-forward
layer, trained on sequences of 3 to 20 bits with an answer at each. The measure is the share of right answers in the
second half of sequences of 20, 40 and 80 bits. As in the paper the best seed counts, also for the controls, because
some models learn the trained lengths by heart; the verdict says how many seeds track parity. The controls, with the
same data, steps and sizes, are the same model with β ≤ 1, and softmax attention, whose weights are positive and sum to
1. Chance is one half.

After Grazzi et al. 2025, "Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues" (arXiv 2411.12537),
table 3. Theirs have two layers, 3 to 40 bits and an answer only at the last bit, which takes many times the steps.
"""

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int
from matplotlib.figure import Figure

from attnlab import plots
from attnlab.data.tasks import TEST, running_sums
from attnlab.masks import Causal
from attnlab.nn import Block, GatedDeltaNet, Mlp, MultiHeadAttention
from attnlab.nn.rotations import Rotary
from attnlab.results.statistics import Interval
from attnlab.study.fitting import adamw, fit_seeds
from attnlab.study.report import Options, Verdict, table
from attnlab.types import Array

SHORTEST, LONGEST, TIMES = 3, 20, (1, 2, 4)
SOFTMAX, POSITIVE, NEGATIVE = "softmax attention", "delta rule, β ≤ 1", "delta rule, β ≤ 2"
SOLVED, FAILED = 0.95, 0.75
WIDTH, HEADS, LEARNING_RATE = 32, 2, 5e-3
delta = functools.partial(GatedDeltaNet, HEADS, decay=False, gate=False)
MIXERS = {
    SOFTMAX: functools.partial(MultiHeadAttention, num_heads=HEADS, mask=Causal(), rotary=Rotary()),
    POSITIVE: delta,
    NEGATIVE: functools.partial(delta, negative_eigenvalues=True),
}


class Size(NamedTuple):
    """Size of the study."""

    seeds: int  # models for each mixer
    steps: int  # training steps
    batch_size: int
    examples: int  # held-out sequences of each length


FAST, FULL = Size(2, 700, 64, 128), Size(6, 1500, 64, 512)


class Model(nn.Module):
    """Logits of the parity after each bit."""

    mixer: str  # one of `MIXERS`

    @nn.compact
    def __call__(self, bits: Int[Array, "B T"]) -> Float[Array, "B T 2"]:
        """Logits for bits `[B, T]`, where −1 is padding."""
        x = nn.Embed(2, WIDTH, name="embed")(jnp.maximum(bits, 0))
        x = Block(MIXERS[self.mixer](), Mlp(), name="block")(x)
        return nn.Dense(2, name="output")(nn.LayerNorm(name="norm")(x))


def measure(options: Options) -> list[dict]:
    """One row for each mixer, seed and length: the share of right answers in the second half."""
    size = FAST if options.fast else FULL
    advance = options.progress(len(MIXERS) * size.seeds * size.steps)
    rows = []
    for mixer in MIXERS:
        params = _train(Model(mixer), size, advance)
        for times in TIMES:
            length = times * LONGEST
            test = running_sums(TEST, batch_size=size.examples, base=2, shortest=length, longest=length)
            answers = jax.jit(jax.vmap(Model(mixer).apply, in_axes=(0, None)))(params, test.tokens).argmax(-1)
            right = np.asarray(answers == test.targets)[..., length // 2 :]
            for seed, share in enumerate(right.mean((1, 2))):
                rows.append({"mixer": mixer, "seed": seed, "times": times, "right": float(share)})
    return rows


def _train(model, size, advance):
    def loss(params, batch):
        logits = jax.nn.log_softmax(model.apply(params, batch.tokens))
        counted = batch.targets >= 0
        losses = -jnp.take_along_axis(logits, jnp.maximum(batch.targets, 0)[..., None], axis=-1)[..., 0]
        return (losses * counted).sum() / counted.sum()

    def batches(step, seed):
        return running_sums(step, batch_size=size.batch_size, base=2, shortest=SHORTEST, longest=LONGEST, seed=seed)

    def init(key):
        return model.init(key, jnp.zeros((1, LONGEST), jnp.int32))

    optimizer = adamw(size.steps, LEARNING_RATE)
    ((_, params),) = fit_seeds(
        loss, init, batches, optimizer, seeds=range(size.seeds), looks=[size.steps], advance=advance
    )
    return params


def judge(rows: list[dict]) -> Verdict:
    """Held if a model with β ≤ 2 answers sequences four times as long, and no control does."""
    most = max(TIMES)

    def at(mixer, times):
        return [r["right"] for r in rows if r["mixer"] == mixer and r["times"] == times]

    def in_words(mixer):
        known, far = Interval.of(at(mixer, 1)), at(mixer, most)
        tracked = sum(share >= SOLVED for share in far)
        return (
            f"{mixer} answers {known:.2f} at the trained length; at {most} times that, the best seed {max(far):.2f}, "
            f"and {tracked} of {len(far)} seeds {SOLVED} or more"
        )

    return Verdict.of(
        (max(at(NEGATIVE, most)) >= SOLVED, in_words(NEGATIVE)),
        *((max(at(mixer, most)) <= FAILED, in_words(mixer)) for mixer in (POSITIVE, SOFTMAX)),
    )


def draw(rows: list[dict]) -> Figure:
    """The share of right answers in the second half of a sequence against its length; bands: deviations over seeds.

    Chance is 0.5. At the trained length the share shows what is learnt; at longer lengths it shows what generalizes.
    """
    curves = {mixer: table([r for r in rows if r["mixer"] == mixer], "times", "right") for mixer in MIXERS}
    panel = {
        "series": {
            mixer: ([LONGEST * times for times in curve], [np.mean(v) for v in curve.values()])
            for mixer, curve in curves.items()
        },
        "spread": {mixer: [np.std(v) for v in curve.values()] for mixer, curve in curves.items()},
        "x": "bits of a sequence",
        "y": "right answers (share)",
        "log": "x",
    }
    title = "With β ≤ 2 the delta rule can track parity beyond the trained lengths, with β ≤ 1 it cannot"
    return plots.panels({f"trained on {SHORTEST} to {LONGEST} bits": panel}, judge(rows).title(title), columns=1)
