"""At equal parameters several heads beat one, and beyond some number more do not help.

The models are small character models like sancho-mini. The number of heads does not change the number of parameters
(d_k = width / heads), and neither does doubling the width with a quarter of the layers. Vaswani et al. 2017 (table 3,
rows A) found one head 0.9 BLEU worse than the best setting, and 32 heads worse than 8.
"""

import itertools
from collections.abc import Iterator

import jax
import numpy as np
from matplotlib.figure import Figure

from attnlab import plots
from attnlab.data.batches import Batch
from attnlab.nn import GPT
from attnlab.study import fitting
from attnlab.study.report import Advance, Options, Verdict, table
from attnlab.training.state import eval_step

READS_TEXT = True
CONTEXT = 64
LEAST = 0.005  # nats: a smaller difference would not justify changing a model


def measure(options: Options) -> list[dict]:
    """One row per seed, width and number of heads: the held-out loss."""
    if options.fast:
        seeds, steps, shapes, heads = 2, 110, {64: 4, 128: 1}, (1, 8, 32)
    else:
        seeds, steps, shapes, heads = 4, 500, {64: 8, 128: 2}, (1, 2, 4, 8, 16, 32)
    text = fitting.read(options.path, least=CONTEXT + 1)
    advance = options.progress(seeds * len(shapes) * len(heads) * steps)
    rows = []
    for (width, layers), num_heads in itertools.product(shapes.items(), heads):
        sizes = {"num_layers": layers, "num_heads": num_heads, "width": width, "context": CONTEXT}
        model = GPT.of(vocab_size=text.tokenizer.vocab_size, **sizes, attention={"qk_norm": False})
        for seed, params in enumerate(_train(model, text, seeds, steps, advance)):
            validation = score(model, params["params"], text.held_out(CONTEXT, 32, 512))
            parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
            row = {"seed": seed, "width": width, "layers": layers, "heads": num_heads, "parameters": parameters}
            rows.append(row | {"loss": validation})
    return rows


def _train(model: GPT, text: fitting.StudyText, seeds: int, steps: int, advance: Advance) -> list[dict]:
    """The trained variables of each seed."""
    fitted = fitting.fit_seeds(
        **fitting.next_token(model),
        batches=text.windows(CONTEXT, 12),
        optimizer=fitting.adamw(steps, 4e-3, weight_decay=0.1),
        seeds=range(seeds),
        looks=[steps],
        advance=advance,
    )
    ((_, variables),) = fitted
    return [jax.tree.map(lambda leaf, seed=seed: leaf[seed], variables) for seed in range(seeds)]


def score(model, params, batches: Iterator[Batch]) -> float:
    """Mean loss over held-out batches, in nats per token."""
    step = jax.jit(lambda params, batch: eval_step(model, params, batch))
    sums = sum(np.asarray(step(params, batch), np.float64) for batch in batches)
    return float(sums[0] / sums[1])


def _losses(rows):
    """`{width: {heads: losses}}`, with one loss per seed."""
    return {w: table([r for r in rows if r["width"] == w], "heads", "loss") for w in sorted({r["width"] for r in rows})}


def judge(rows: list[dict]) -> Verdict:
    """Held if, at each width, one head and the largest number both lose to the best by more than chance."""
    parts = []
    for width, by_heads in _losses(rows).items():
        best = min(by_heads, key=lambda heads: np.mean(by_heads[heads]))
        for heads in (1, max(by_heads)):
            lost, chance = _lost(by_heads[heads], by_heads[best])
            text = f"{heads} × {width // heads} features: {lost:+.3f} nats against {best} heads ({chance_text(chance)})"
            parts.append((heads != best and lost > max(chance, LEAST), f"width {width}, {text}"))
    return Verdict.of(*parts)


def _lost(losses, best) -> tuple[float, float]:
    """Mean paired difference over seeds, and two standard errors of this mean (0 for a single seed)."""
    difference = np.subtract(losses, best)
    seeds = len(difference)
    return float(difference.mean()), float(2 * difference.std(ddof=1) / seeds**0.5) if seeds > 1 else 0.0


def chance_text(chance: float) -> str:
    """The uncertainty of a difference, as text."""
    return f"two standard errors {chance:.3f}" if chance else "one seed"


def draw(rows: list[dict]) -> Figure:
    """Loss against the number of heads, one curve per width, at equal parameters; bands: deviations over seeds.

    If the claim holds, each curve is higher at one head and at the largest number of heads than in between.
    """
    series, spread = {}, {}
    for width, by_heads in _losses(rows).items():
        layers = next(r["layers"] for r in rows if r["width"] == width)
        name = f"width {width}, {layers} layer{'s' * (layers > 1)}"
        series[name] = (list(by_heads), [np.mean(v) for v in by_heads.values()])
        spread[name] = [np.std(v) for v in by_heads.values()]
    return plots.lines(
        series,
        judge(rows).title("At equal parameters several heads beat one, and too many lose again"),
        x="heads (d_k = width / heads)",
        y="validation loss (nats per character)",
        log="x",
        spread=spread,
    )
