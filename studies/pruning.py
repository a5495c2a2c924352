"""Most heads of a trained model can be removed in the right order, at no more cost than training it with fewer.

Voita et al. 2019 ("Analyzing Multi-Head Self-Attention") remove 38 of 48 encoder heads of a translation model for 0.15
BLEU, with trained gates, and Michel et al. 2019 ("Are Sixteen Heads Really Better than One?") remove most by their
importance, without further training. Here the quickstart's GPT, with 16 heads, is trained on a text, and its heads are
removed one by one without further training: always the one whose removal raises the loss least, given those already
removed, because heads take over for others and the effects of single heads do not add up. The order is found on the
first half of the held-out text, and the loss measured on the second. A removed head outputs its mean.

The study counts how many heads can go until the loss has risen by a tenth of what all heads are worth, the rise when
all are gone. The claim needs more than half of the heads, and more than in random order. The last control is a model of
the same size that was trained with only half of the heads. Two more curves are for comparison: zeros in place of mean
outputs, and the order of single effects.
"""

import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from attnlab import plots, see
from attnlab.results.statistics import Interval
from attnlab.study import fitting
from attnlab.study.report import Advance, Options, Verdict

from . import _quickstart as quickstart
from ._quickstart import HEADS, LAYERS

READS_TEXT = True
COUNT, HALF = LAYERS * HEADS, LAYERS * HEADS // 2
GREEDY, SINGLE, RANDOM, ZERO, FEWER = "best first", "by single effects", "random order", "best first, zeros", "fewer"
TENTH = 0.1  # share of the rise in loss when all heads are removed
ORDERS = 3  # random orders to average over
UPDATES = 100  # pruning a model counts as this many updates in the progress


class Size(NamedTuple):
    """Size of the study: seeds, updates, windows for finding the order, and windows for measuring losses."""

    seeds: int
    steps: int
    windows: int
    held_out: int


FAST = Size(seeds=2, steps=100, windows=6, held_out=16)
FULL = Size(seeds=6, steps=500, windows=24, held_out=64)


def measure(options: Options) -> list[dict]:
    """One row per seed, order and number of heads kept, and one per seed for the model trained with fewer heads."""
    size = FAST if options.fast else FULL
    window = quickstart.CONFIG.model.context + 1
    source = fitting.read(options.path, least=2 * window)
    model = quickstart.gpt(source.tokenizer.vocab_size)
    advance = options.progress(size.seeds * (2 * size.steps + UPDATES))
    first, second = np.array_split(source.validation, 2)
    chosen_on = quickstart.evenly_spaced(first, window, size.windows)
    measured_on = quickstart.evenly_spaced(second, window, size.held_out)
    all_heads = np.ones((LAYERS, HEADS), bool)
    half = np.broadcast_to(np.arange(HEADS) < HEADS // 2, (LAYERS, HEADS))
    trained = train(model, source, all_heads, size, advance)
    fewer = train(model, source, half, size, advance)
    rows = []
    for seed in range(size.seeds):
        params, other = (jax.tree.map(operator.itemgetter(seed), each) for each in (trained, fewer))
        for order, losses in _prune(model, params, chosen_on, measured_on, seed).items():
            kept = range(COUNT, -1, -1)
            rows += [{"seed": seed, "order": order, "kept": k, "loss": float(x)} for k, x in zip(kept, losses)]
        (fewer_loss,) = _losses(model, other, measured_on, half.reshape(1, COUNT), nothing(model))
        rows.append({"seed": seed, "order": FEWER, "kept": HALF, "loss": float(fewer_loss)})
        advance(UPDATES)
    return rows


def train(model, source: fitting.StudyText, keep: np.ndarray, size: Size, advance: Advance):
    """Parameters, with an axis for the seeds, of models with only the heads in `keep` `[L, H]`."""
    fitted = fitting.fit_seeds(
        lambda params, tokens: loss(model, params, tokens, jnp.asarray(keep), nothing(model)),
        fitting.next_token(model)["init"],
        source.windows(model.config.context, quickstart.CONFIG.batch_size),
        quickstart.adamw(size.steps),
        seeds=range(size.seeds),
        looks=[size.steps],
        advance=advance,
    )
    ((_, trained),) = fitted
    return trained


def loss(model, params, tokens, keep, replacements):
    """Mean loss of `tokens` `[B, T + 1]`; heads not in `keep` `[L, H]` output `replacements` `[L, H, D]`."""
    edits = {
        f"block_{layer}/attention/z": see.Put(replacements[layer], where=~keep[layer][:, None])
        for layer in range(LAYERS)
    }
    return see.edited(model, params, tokens[:, :-1], targets=tokens[:, 1:], edits=edits).out.mean()


def nothing(model):
    """Zeros in place of the heads' outputs, `[L, H, D]`."""
    return jnp.zeros((LAYERS, HEADS, model.config.width // HEADS))


@functools.partial(jax.jit, static_argnums=0)
def _losses(model, params, tokens, kept, replacements):
    """The loss for each row of `kept` `[N, heads]`."""
    return jax.lax.map(lambda keep: loss(model, params, tokens, keep.reshape(LAYERS, HEADS), replacements), kept)


@functools.partial(jax.jit, static_argnums=0)
def _means(model, params, tokens):
    """The mean output of each head, `[L, H, D]`."""
    return see.capture(model, params, tokens[:, :-1], want=("z",)).stack("z").mean((1, 2))


@functools.partial(jax.jit, static_argnums=0)
def _best_first(model, params, tokens, replacements):
    """The order in which a greedy search removes heads, `[heads]`, and the losses when each is removed alone."""

    def remove(keep, _):
        losses = _losses(model, params, tokens, keep & ~jnp.eye(COUNT, dtype=bool), replacements)
        gone = jnp.argmin(jnp.where(keep, losses, jnp.inf))
        return keep.at[gone].set(False), (gone, losses)

    _, (order, losses) = jax.lax.scan(remove, jnp.ones(COUNT, bool), length=COUNT)
    return order, losses[0]


def _prune(model, params, chosen_on, measured_on, seed: int) -> dict[str, np.ndarray]:
    """For each order, the losses `[heads + 1]` after removing its first 0, 1, 2, … heads."""
    means = _means(model, params, chosen_on)
    order, alone = _best_first(model, params, chosen_on, means)
    order_of_zeros, _ = _best_first(model, params, chosen_on, nothing(model))

    def curve(order, replacements):
        places = np.argsort(order)  # when each head is removed
        return np.asarray(_losses(model, params, measured_on, np.arange(COUNT + 1)[:, None] <= places, replacements))

    draw = np.random.default_rng(seed)
    return {
        GREEDY: curve(order, means),
        SINGLE: curve(np.argsort(alone), means),
        RANDOM: np.mean([curve(draw.permutation(COUNT), means) for _ in range(ORDERS)], axis=0),
        ZERO: curve(order_of_zeros, nothing(model)),
    }


def removable(rows: list[dict], order: str) -> list[float]:
    """For each seed, how many heads can go before the loss rises by a tenth of its rise without any heads."""
    counts = []
    for seed in sorted({row["seed"] for row in rows}):
        by_kept = {row["kept"]: row["loss"] for row in rows if (row["seed"], row["order"]) == (seed, order)}
        losses = np.array([by_kept[kept] for kept in sorted(by_kept, reverse=True)])
        too_much = losses - losses[0] > TENTH * (losses[-1] - losses[0])
        counts.append(float(np.argmax(too_much)) - 1)  # without heads the rise is always too much
    return counts


def losses_of(rows: list[dict], order: str, kept: int) -> list[float]:
    """The loss with `kept` heads, by seed."""
    chosen = [row for row in rows if (row["order"], row["kept"]) == (order, kept)]
    return [row["loss"] for row in sorted(chosen, key=lambda row: row["seed"])]


def rises(rows: list[dict], order: str, kept: int) -> list[float]:
    """For each seed, how much higher the loss is with `kept` heads than with all heads."""
    return [a - b for a, b in zip(losses_of(rows, order, kept), losses_of(rows, GREEDY, COUNT))]


def judge(rows: list[dict]) -> Verdict:
    """Held if in each seed most heads can go, more than at random, and removing half is no worse than training half."""
    free, at_random = removable(rows, GREEDY), removable(rows, RANDOM)
    counts = {order: Interval.of(removable(rows, order)) for order in (GREEDY, SINGLE, RANDOM, ZERO)}
    more = Interval.of([a - b for a, b in zip(free, at_random)])
    worth, pruned = (Interval.of(rises(rows, GREEDY, kept)) for kept in (0, HALF))
    fewer = Interval.of(rises(rows, FEWER, HALF))
    return Verdict.of(
        (
            min(free) > HALF,
            f"{counts[GREEDY]:.1f} of {COUNT} heads can go for a tenth of the {worth:.2f} nats that all are worth",
        ),
        (
            all(a > b for a, b in zip(free, at_random)),
            f"that is {more:.1f} more than in random order ({counts[RANDOM].mean:.1f}); in the order of single effects "
            f"{counts[SINGLE].mean:.1f} can go, with zeros in place of mean outputs {counts[ZERO].mean:.1f}",
        ),
        (
            pruned.mean <= fewer.mean,
            f"without half of its heads the model loses {pruned:.3f} nats, one trained without them {fewer:.3f}",
        ),
    )


def draw(rows: list[dict]) -> Figure:
    """Loss against the heads that are kept, in each order of removal; bands are standard deviations over seeds.

    Heads are removed from right to left: the longer a curve stays low, the more can go. The single point is the
    model that was trained with half of the heads.
    """
    series, spread = {}, {}
    for order in (GREEDY, SINGLE, RANDOM, ZERO):
        losses = [losses_of(rows, order, kept) for kept in range(COUNT + 1)]
        series[order] = (range(COUNT + 1), np.mean(losses, axis=1))
        spread[order] = np.std(losses, axis=1).tolist()
    series["trained with half of them"] = ([HALF], [np.mean(losses_of(rows, FEWER, HALF))])
    return plots.lines(
        series,
        judge(rows).title("In the right order most heads can go, at no more cost than training without them"),
        x=f"heads kept (of {COUNT})",
        y="held-out loss (nats per character)",
        spread=spread,
    )
