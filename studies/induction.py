"""Two layers of attention learn to continue a repeated text, suddenly and by induction heads; one layer cannot.

Each sequence of random tokens repeats with its own period, so that from the second period on each token can be
predicted by finding its predecessor in the first period and copying what came after it. (With one period for all, a
head that attends to a fixed distance would do as well.) Attention-only models of one and of two layers, with about
equally many parameters, are trained on fresh sequences. At many steps the study measures loss and accuracy within the
first period and from the second on, and the induction score: the share of a head's weight on keys that follow an
earlier occurrence of the query's token, for the head with the highest share. Controls: the model before training; one
layer; the same sequences with the tokens after the first period shuffled, which keeps their frequencies but leaves
nothing to continue. Finally the outputs of the induction heads, those that `attnlab.see.scores` finds above the
untrained model, are replaced by their mean; for comparison, so are those of every choice of as many other heads.

Olsson et al. 2022, "In-context Learning and Induction Heads" (transformer-circuits.pub), find that these heads form
where the loss falls, and ablate them. Their models are trained on text, and their loss shows a bump; ours are trained
only on repeats, so that the loss itself falls.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Bool, Float, Int
from matplotlib.figure import Figure

from attnlab import plots, see
from attnlab.data.tasks import TEST, repeats
from attnlab.nn import GPT
from attnlab.results.statistics import Interval
from attnlab.see.head_scores import targets
from attnlab.study.fitting import fit_seeds, next_token
from attnlab.study.report import Options, Verdict, table
from attnlab.types import Array

VOCABULARY, LENGTH, HEADS = 64, 64, 4
PERIODS = tuple(range(LENGTH // 4, LENGTH // 2 + 1))
LEARNING_RATE = 4e-3
TWO, ONE = "two layers", "one layer"
WIDTHS = {TWO: 64, ONE: 88}  # 37,760 and 37,312 parameters
INTACT, SHUFFLED, WITHOUT, CONTROL = "intact", "shuffled", "without induction heads", "without as many others"


class Size(NamedTuple):
    """Size of the study."""

    seeds: int  # models of each depth
    steps: int  # training steps
    looks: int  # measurements during training, not counting the untrained model
    batch_size: int
    examples: int  # held-out sequences


FAST = Size(seeds=2, steps=600, looks=24, batch_size=32, examples=64)
FULL = Size(seeds=6, steps=1000, looks=40, batch_size=32, examples=128)


def gpt(depth: str) -> GPT:
    """The attention-only model of this depth."""
    layers = 2 if depth == TWO else 1
    sizes = {"num_layers": layers, "num_heads": HEADS, "width": WIDTHS[depth], "context": LENGTH, "mlp_ratio": 0.0}
    return GPT.of(vocab_size=VOCABULARY, **sizes, use_bias=True, attention={"qk_norm": False})


class Text(NamedTuple):
    """Held-out sequences, each repeated with its period."""

    tokens: Int[np.ndarray, "B T"]
    shuffled: Int[np.ndarray, "B T"]  # the tokens after the first period are in random order
    repeated: Bool[np.ndarray, "B T-1"]  # whether the next token is in the second period or a later one


def held_out(examples: int) -> Text:
    """Sequences that no model is trained on."""
    tokens = np.asarray(repeats(TEST, batch_size=examples, length=LENGTH, vocab_size=VOCABULARY, periods=PERIODS))
    draw = np.random.default_rng(0)
    shuffled, repeated = tokens.copy(), np.zeros((examples, LENGTH - 1), bool)
    for row, mixed, later in zip(tokens, shuffled, repeated):
        period = next(p for p in PERIODS if (row[p:] == row[:-p]).all())
        mixed[period:] = draw.permutation(row[period:])
        later[period - 1 :] = True
    return Text(tokens, shuffled, repeated)


def measure(options: Options) -> list[dict]:
    """One row per seed, depth, step and text, and for the trained models of two layers also per ablation."""
    size = FAST if options.fast else FULL
    advance = options.progress(len(WIDTHS) * size.seeds * size.steps)
    text = held_out(size.examples)
    rows = []
    for depth in WIDTHS:
        model, untrained = gpt(depth), None
        look = jax.jit(jax.vmap(functools.partial(_look, model, text)))
        for step, params in _train(model, size, advance):
            untrained = params if untrained is None else untrained
            for what, measured in look(params).items():
                for seed in range(size.seeds):
                    values = {name: float(value[seed]) for name, value in measured.items()}
                    rows.append({"seed": seed, "model": depth, "step": step, "what": what} | values)
        if depth == TWO:
            for seed in range(size.seeds):
                common = {"seed": seed, "model": depth, "step": step}
                rows += [common | row for row in _ablations(model, _of(seed, params), _of(seed, untrained), text)]
    return rows


def _of(seed, params):
    return jax.tree.map(lambda leaf: leaf[seed], params)


def _train(model, size, advance):
    # With a decaying rate, or without weight decay, the loss falls much later.
    rate = optax.linear_schedule(0, LEARNING_RATE, min(50, size.steps))
    looks = sorted({round(size.steps * n / size.looks) for n in range(size.looks + 1)})
    return fit_seeds(
        **next_token(model),
        batches=lambda step, seed: repeats(
            step, batch_size=size.batch_size, length=LENGTH, vocab_size=VOCABULARY, periods=PERIODS, seed=seed
        ),
        optimizer=optax.adamw(rate, b2=0.99, weight_decay=0.1),
        seeds=range(size.seeds),
        looks=looks,
        advance=advance,
    )


def _look(model, text, params):
    """Losses, accuracies and the highest induction score, on the text as it is and shuffled."""
    run = see.capture(model, params, text.tokens[:, :-1])
    intact = _predictions(run.out, text.tokens[:, 1:], text.repeated)
    score = induction_scores(run.stack("pattern"), targets("induction", text.tokens[:, :-1])).max()
    shuffled = _predictions(model.apply(params, text.shuffled[:, :-1]), text.shuffled[:, 1:], text.repeated)
    return {INTACT: intact | {"induction score": score}, SHUFFLED: shuffled}


def induction_scores(patterns: Float[Array, "L B H T T"], wanted: Bool[np.ndarray, "B T T"]) -> Float[Array, "L H"]:
    """The weight `[L, H]` on wanted keys, averaged over the queries that have wanted keys; see `attnlab.see.scores`."""
    on = jnp.where(wanted[:, None], patterns, 0).sum(-1)
    queries = jnp.asarray(wanted.any(-1))
    return jnp.where(queries[:, None], on, 0).sum((1, 3)) / queries.sum()


def _predictions(logits, following, repeated):
    """Loss and accuracy within the first period, and after it."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, following)
    right = logits.argmax(-1) == following
    return {
        f"{name} {part}": jnp.where(where, values, 0).sum() / where.sum()
        for name, values in (("loss", losses), ("accuracy", right))
        for part, where in (("first", ~repeated), ("repeated", repeated))
    }


def _ablations(model, params, untrained, text):
    """Accuracy of one seed without its induction heads, and the mean over all ways to remove as many other heads."""
    tokens = text.tokens[:, :-1]
    pattern = jax.jit(lambda params: see.capture(model, params, tokens).stack("pattern"))
    scored = see.scores(pattern(params), tokens, ("induction",), untrained=pattern(untrained))
    # Some heads score only 0.01 more than the untrained model: count heads with most of their weight on targets.
    induction_heads = [at for at in scored.heads("induction") if scored.values["induction"][at] > 0.5]
    heads = list(itertools.product(range(model.config.num_layers), range(model.config.num_heads)))
    others = list(itertools.combinations([at for at in heads if at not in induction_heads], len(induction_heads)))

    z = jax.jit(lambda params: see.capture(model, params, tokens, want=("z",)).stack("z"))(params)

    @jax.jit
    @jax.vmap
    def without(removed):
        edits = {
            f"block_{layer}/attention/z": see.Put(z[layer].mean((0, 1)), where=removed[layer, :, None])
            for layer in range(model.config.num_layers)
        }
        out = see.edited(model, params, tokens, edits=edits).out
        return _predictions(out, text.tokens[:, 1:], text.repeated)

    def mask(choice):
        return np.array([at in choice for at in heads]).reshape(model.config.num_layers, model.config.num_heads)

    measured = without(np.stack([mask(choice) for choice in (induction_heads, *others)]))
    rows = []
    for what, part in ((WITHOUT, slice(0, 1)), (CONTROL, slice(1, None))):
        values = {name: float(np.mean(value[part])) for name, value in measured.items()}
        rows.append({"what": what, "heads": len(induction_heads)} | values)
    return rows


def final(rows: list[dict], model: str, what: str, value: str) -> list:
    """A value after training, per seed."""
    chosen = [r for r in rows if (r["model"], r["what"]) == (model, what)]
    last = max(r["step"] for r in chosen)
    return [r[value] for r in sorted(chosen, key=lambda r: r["seed"]) if r["step"] == last]


class Rise(NamedTuple):
    """When a model of two layers learned: training steps."""

    began: int  # accuracy after the first period was at a quarter of its whole rise
    ended: int  # accuracy was at three quarters of its rise
    loss: int  # the loss after the first period was half-way down
    score: int  # the highest induction score was half-way up
    interval: int  # steps between two measurements


def rises(rows: list[dict]) -> list[Rise]:
    """The rise of each seed's model of two layers."""
    result = []
    for seed in sorted({r["seed"] for r in rows}):
        chosen = [r for r in rows if (r["seed"], r["model"], r["what"]) == (seed, TWO, INTACT)]
        chosen.sort(key=lambda r: r["step"])
        steps = [r["step"] for r in chosen]

        def first(name, share, chosen=chosen, steps=steps):
            values = np.array([r[name] for r in chosen])
            way, whole = values - values[0], values[-1] - values[0]
            return steps[int(np.argmax(np.sign(whole) * way >= share * abs(whole)))]

        began, ended = (first("accuracy repeated", share) for share in (0.25, 0.75))
        halves = (first(name, 0.5) for name in ("loss repeated", "induction score"))
        result.append(Rise(began, ended, *halves, int(max(np.diff(steps)))))
    return result


def judge(rows: list[dict]) -> Verdict:
    """Held if two layers learn repetition suddenly and depend on induction heads, and one layer does not learn it."""
    two, one = (Interval.of(final(rows, depth, INTACT, "accuracy repeated")) for depth in (TWO, ONE))
    start = Interval.of(
        [r["accuracy repeated"] for r in rows if r["model"] == TWO and r["step"] == 0 and r["what"] == INTACT]
    )
    within, shuffled = final(rows, TWO, INTACT, "loss first"), final(rows, TWO, SHUFFLED, "loss repeated")
    learned = rises(rows)
    total = max(r["step"] for r in rows)
    length = [rise.ended - rise.began + rise.interval for rise in learned]  # upper bounds
    distances = [abs(rise.score - rise.loss) for rise in learned]
    intact = np.array(final(rows, TWO, INTACT, "accuracy repeated"))
    costs = {what: intact - final(rows, TWO, what, "accuracy repeated") for what in (WITHOUT, CONTROL)}
    heads = final(rows, TWO, WITHOUT, "heads")
    return Verdict.of(
        (two.mean >= 0.9, f"two layers continue {two:.2f} of the repeated tokens (untrained {start:.2f})"),
        (one.mean <= 0.3, f"one layer with as many parameters continues {one:.2f}"),
        (
            np.mean(shuffled) >= np.mean(within),
            f"shuffled repeats do not help: {np.mean(shuffled):.1f} nats a token, "
            f"{np.mean(within):.1f} within the first period",
        ),
        (
            max(length) <= 0.1 * total,
            f"accuracy rises from a quarter to three quarters within {_numbers(length)} of {total} steps",
        ),
        (
            all(gap <= rise.interval for gap, rise in zip(distances, learned)),
            f"the loss is half-way down at steps {_numbers(r.loss for r in learned)}, the induction score half-way up "
            f"at {_numbers(r.score for r in learned)}",
        ),
        (
            min(heads) > 0 and costs[WITHOUT].mean() >= 0.5,
            f"without the {_numbers(heads)} induction heads accuracy falls by {Interval.of(costs[WITHOUT]):.2f}",
        ),
        (
            (costs[WITHOUT] > costs[CONTROL]).all(),
            f"without as many other heads it falls by {Interval.of(costs[CONTROL]):.2f}, by less in each seed",
        ),
    )


def _numbers(values) -> str:
    """The distinct values as whole numbers, in order."""
    return ", ".join(f"{value:.0f}" for value in sorted(set(values)))


def draw(rows: list[dict]) -> Figure:
    """Loss, accuracy and induction score through training, and accuracy without heads; bands: deviations over seeds.

    The first three panels show held-out text; the score is the highest of all heads. In the last panel each seed has
    a point for the intact model, one without its induction heads, and one without as many other heads.
    """

    def curve(depth, what, value):
        grouped = table([r for r in rows if (r["model"], r["what"]) == (depth, what)], "step", value)
        return list(grouped), [np.mean(v) for v in grouped.values()], [np.std(v) for v in grouped.values()]

    def panel(value, y, **more):
        drawn = {depth: curve(depth, INTACT, value) for depth in WIDTHS}
        drawn |= {name: curve(*chosen) for name, chosen in more.items()}
        return {
            "series": {name: (steps, means) for name, (steps, means, _) in drawn.items()},
            "spread": {name: spread for name, (*_, spread) in drawn.items()},
            "x": "step (updates)",
            "y": y,
            "markers": False,
        }

    ablated = {
        name: final(rows, TWO, what, "accuracy repeated")
        for name, what in ((TWO, INTACT), (CONTROL, CONTROL), (WITHOUT, WITHOUT))
    }
    shuffled = {"two layers, shuffled": (TWO, SHUFFLED, "loss repeated")}
    title = "Two layers suddenly learn to continue repeats as induction heads form; one layer does not"
    figure = plots.panels(
        {
            "loss from the second period on": panel("loss repeated", "loss (nats per token)", **shuffled),
            "accuracy from the second period on": panel("accuracy repeated", "tokens predicted (share)"),
            "induction score": panel("induction score", "highest weight on the targets (share)"),
            "ablation of heads, after training": {
                "series": {name: (list(range(len(values))), values) for name, values in ablated.items()},
                "x": "seed",
                "y": "tokens predicted (share)",
            },
        },
        judge(rows).title(title),
    )
    figure.axes[-1].set_xticks(range(len(ablated[TWO])))
    return figure
