"""With weight decay, modular addition is memorised first and grokked later, in few Fourier frequencies.

One layer without norms, as in Nanda et al. (2023), learns (a + b) mod 59 from 40 % of all pairs, all of them in every
update: four heads from "=" to a, b and itself, then an MLP of 256 units, 64 features wide; AdamW with weight decay 1.
Theirs has p = 113, width 128, 30 % of the pairs and a learning rate of 10⁻³; ours is 10⁻², to be quick. During
training, the study measures accuracy on training and held-out pairs, and the share of the number embedding's power in
its five strongest of 29 frequencies. The controls are the embedding before training, which is random, and the same run
without weight decay. Both runs are repeated with Grokfast (Lee et al. 2024), which adds to each gradient twice the
moving average of the gradients so far (decay 0.98), and reported separately. Seeds differ widely: all are shown, with
the first measured step at which 90 % of the held-out pairs are right.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Int
from matplotlib.figure import Figure

from attnlab import plots
from attnlab.data.tasks.task_draws import Number, compiled, key_of
from attnlab.nn import Mlp, MultiHeadAttention
from attnlab.results.statistics import Interval
from attnlab.study.fitting import Size, fit_seeds
from attnlab.study.report import Options, Verdict, table
from attnlab.types import Array

P, SHARE, WIDTH, HEADS, RATE = 59, 0.4, 64, 4, 1e-2
STRONGEST, LOOKS = 5, 25
KINDS = {  # (weight decay, gain of Grokfast)
    "weight decay": (1.0, 0.0),
    "no decay": (0.0, 0.0),
    "weight decay, Grokfast": (1.0, 2.0),
    "no decay, Grokfast": (0.0, 2.0),
}
DECAY, NO_DECAY, DECAY_FAST, NO_DECAY_FAST = KINDS
GROKKED = 0.9


FAST, FULL = Size(2, 1500), Size(6, 2000)


class Sums(NamedTuple):
    """Pairs of numbers, with their sums as targets."""

    tokens: Int[Array, "N 3"]  # int32 [N, 3]: a, b, and p for "="
    targets: Int[Array, " N"]  # int32 [N], (a + b) mod p


@compiled
def modular_sums(p: int, *, train: float, seed: Number = 0) -> tuple[Sums, Sums]:
    """All p² pairs (a, b) with (a + b) mod p, split at random (Power et al. 2022).

    Args:
      p: the modulus.
      train: share of the pairs in the first part.

    Returns:
      The pairs for training, and the held-out pairs.
    """
    count = round(train * p * p) if p > 0 else 0
    if not 0 < count < p * p:
        raise ValueError(f"p = {p} and train = {train} leave a part without pairs: raise p, or train between 0 and 1")
    a, b = jnp.divmod(jax.random.permutation(key_of(0, seed), p * p).astype(jnp.int32), p)
    tokens = jnp.stack([a, b, jnp.full_like(a, p)], axis=-1)
    sums = Sums(tokens, (a + b) % p)
    return jax.tree.map(lambda x: x[:count], sums), jax.tree.map(lambda x: x[count:], sums)


class Adder(nn.Module):
    """One layer of attention and an MLP, without norms; predicts at the last token."""

    @nn.compact
    def __call__(self, tokens):
        """Logits `[B, P]` of tokens `[B, 3]`."""
        normal = nn.initializers.normal(WIDTH**-0.5)
        x = self.param("embedding", normal, (P + 1, WIDTH))[tokens] + self.param("positions", normal, (3, WIDTH))
        attention = MultiHeadAttention(HEADS, use_bias=False, impl="dense", name="attention")
        last = (x[:, -1:] + attention(x[:, -1:], x))[:, 0]
        last = last + Mlp(activation="relu", name="mlp")(last)
        return nn.Dense(P, use_bias=False, name="unembed")(last)


MODEL = Adder()


def grokfast(decay: float, gain: float) -> optax.GradientTransformation:
    """Add `gain` times the gradients' moving average to each gradient (Lee et al. 2024)."""

    def update(gradient, average, params=None):
        average = jax.tree.map(lambda mean, g: decay * mean + (1 - decay) * g, average, gradient)
        return jax.tree.map(lambda g, mean: g + gain * mean, gradient, average), average

    return optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def strongest_share(table):
    """The share of the five strongest nonzero frequencies in the power of a table `[P, F]` along its first axis."""
    power = (jnp.abs(jnp.fft.rfft(table, axis=0)[1:]) ** 2).sum(1)
    return jax.lax.top_k(power, STRONGEST)[0].sum() / power.sum()


def measure(options: Options) -> list[dict]:
    """One row per seed, kind and number of updates."""
    size = FAST if options.fast else FULL
    advance = options.progress(len(KINDS) * size.seeds * size.steps)
    looks = sorted({size.steps * n // LOOKS for n in range(LOOKS + 1)})
    split = jax.vmap(lambda seed: modular_sums(P, train=SHARE, seed=seed))(jnp.arange(size.seeds))
    look = jax.jit(jax.vmap(_look))
    rows = []
    for kind, (weight_decay, gain) in KINDS.items():
        rate = optax.linear_schedule(0, RATE, 10)
        adamw = optax.adamw(rate, b2=0.98, weight_decay=weight_decay)
        optimizer = optax.chain(grokfast(0.98, gain), adamw) if gain else adamw
        fitted = fit_seeds(
            _loss,
            lambda key: MODEL.init(key, jnp.zeros((1, 3), jnp.int32)),
            lambda step, seed: modular_sums(P, train=SHARE, seed=seed)[0],
            optimizer,
            seeds=range(size.seeds),
            looks=looks,
            advance=advance,
        )
        for step, params in fitted:
            for seed, values in enumerate(zip(*map(np.asarray, look(params, *split)))):
                names = ("train accuracy", "held-out accuracy", "share of five")
                rows.append({"seed": seed, "kind": kind, "step": step} | dict(zip(names, map(float, values))))
    return rows


def _loss(params, batch):
    return optax.softmax_cross_entropy_with_integer_labels(MODEL.apply(params, batch.tokens), batch.targets).mean()


def _look(params, train, held_out):
    accuracies = ((MODEL.apply(params, part.tokens).argmax(-1) == part.targets).mean() for part in (train, held_out))
    return *accuracies, strongest_share(params["params"]["embedding"][:P])


def first_steps(rows: list[dict], kind: str, value: str, least: float) -> list[int | None]:
    """For each seed, the first measured step at which a value is at least `least`; None if it never is."""
    reached = table([r for r in rows if r["kind"] == kind], "seed", value)
    steps = table([r for r in rows if r["kind"] == kind], "seed", "step")
    return [next((n for n, v in zip(steps[s], values) if v >= least), None) for s, values in reached.items()]


def judge(rows: list[dict]) -> Verdict:
    """Held if all seeds memorise, then grok, with more power in five frequencies than controls; no control groks."""
    last = max(r["step"] for r in rows)

    def at(kind, step, value):
        return [r[value] for r in rows if (r["kind"], r["step"]) == (kind, step)]

    learned = first_steps(rows, DECAY, "train accuracy", 0.99)
    grokked = {kind: first_steps(rows, kind, "held-out accuracy", GROKKED) for kind in KINDS}
    shares = {kind: at(kind, last, "share of five") for kind in KINDS}
    random = at(DECAY, 0, "share of five")
    ends = {kind: Interval.of(at(kind, last, "held-out accuracy")) for kind in KINDS}
    when = {kind: ", ".join("never" if n is None else f"{n:,}" for n in steps) for kind, steps in grokked.items()}
    delayed = [a is not None and b is not None and a < b for a, b in zip(learned, grokked[DECAY])]
    return Verdict.of(
        (
            all(delayed),
            f"99 % of the training pairs are right by step {', '.join(map(str, learned))}, 90 % of those held out by "
            f"{when[DECAY]} (by seed; accuracy at {last:,}: {ends[DECAY]:.2f})",
        ),
        # "Few" means that five of 29 frequencies have most of the power.
        (
            min(shares[DECAY]) > max(0.5, *random),
            f"five frequencies then have {Interval.of(shares[DECAY]):.2f} of the embedding's power, "
            f"{Interval.of(random):.2f} before training",
        ),
        (
            min(shares[DECAY]) > max(shares[NO_DECAY]),
            f"without weight decay they have {Interval.of(shares[NO_DECAY]):.2f}",
        ),
        (
            all(n is None for n in grokked[NO_DECAY]),
            f"without it, 90 % are reached at step: {when[NO_DECAY]} (accuracy at {last:,}: {ends[NO_DECAY]:.2f}); "
            f"with Grokfast, {when[DECAY_FAST]} with decay and {when[NO_DECAY_FAST]} without (accuracy "
            f"{ends[DECAY_FAST]:.2f} and {ends[NO_DECAY_FAST]:.2f}; five frequencies have "
            f"{Interval.of(shares[NO_DECAY_FAST]):.2f} of the power without)",
        ),
    )


def draw(rows: list[dict]) -> Figure:
    """Accuracies and the share of five frequencies through training: means, and a faint line per seed.

    Grokking is the delay between the rise of a curve in the middle panel and its rise in the left one.
    """
    drawn = {
        "held-out pairs": ("held-out accuracy", "accuracy (%)", 100),
        "pairs trained on": ("train accuracy", "accuracy (%)", 100),
        "five strongest of 29 frequencies": ("share of five", "share of the embedding's power", 1),
    }
    panels = {}
    for title, (value, y, scale) in drawn.items():
        series = {}
        for kind in KINDS:
            grouped = table([r for r in rows if r["kind"] == kind], "step", value)
            series[kind] = (list(grouped), [scale * float(np.mean(v)) for v in grouped.values()])
        panels[title] = {"series": series, "x": "step (updates)", "y": y, "markers": False}
    figure = plots.panels(panels, judge(rows).title("Weight decay makes modular addition grok"), columns=3)
    for axes, (value, _, scale) in zip(figure.axes, drawn.values()):
        if value != "train accuracy":  # only that panel has room for the legend
            axes.get_legend().remove()
        for kind, color in zip(KINDS, plots.COLORS):
            chosen = [r for r in rows if r["kind"] == kind]
            steps = sorted({r["step"] for r in chosen})
            for values in table(chosen, "seed", value).values():
                axes.plot(steps, scale * np.array(values), color=color, alpha=0.3, linewidth=0.8)
    return figure
