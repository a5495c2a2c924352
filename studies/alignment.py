"""Trained on copying and reversing, attention aligns each output with the right input, additive or dot-product.

A recurrent encoder–decoder (Bahdanau et al. 2015) learns to copy or reverse sources of 4 to 12 symbols. It is scored on
sources held out of training, at lengths seen in training and at three unseen ones: the share of outputs whose largest
weight is on the right source symbol, and the share of correct outputs.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

from attnlab import plots
from attnlab.data.tasks.task_draws import check_least
from attnlab.nn import AdditiveAttention, MultiHeadAttention, Seq2Seq, alignment
from attnlab.study.fitting import Size, fit
from attnlab.study.report import Advance, Options, Verdict, ignore, table

KINDS = ("copy", "reverse")
VOCABULARY, WIDTH = 32, 64
HELD_OUT_SUMS = 10  # sources whose symbols sum to a multiple of this number are held out of training
HELD_OUT = (6, 9, 11)  # lengths left out of training
LENGTHS = tuple(range(4, 13))
SHOWN = tuple(n for n in LENGTHS if n not in HELD_OUT)
LAYERS = {"additive": AdditiveAttention, "dot-product": lambda: MultiHeadAttention(num_heads=1)}
FAST, FULL = Size(seeds=1, steps=550), Size(seeds=3, steps=1500)


class Pairs(NamedTuple):
    """A batch of padded sources with their targets."""

    source: np.ndarray  # int32 [B, S], symbols from 1, padded with 0
    lengths: np.ndarray  # int32 [B], the number of symbols of each source
    inputs: np.ndarray  # int32 [B, S + 1], the token before each output, starting with 0
    targets: np.ndarray  # int32 [B, S + 1], the outputs: the symbols, then 0
    alignment: np.ndarray  # int32 [B, S + 1], index of the source symbol of each output; −1 for none


def pairs(
    kind: str,
    step: int,
    *,
    batch_size: int,
    lengths: Sequence[int],
    vocab_size: int = 32,
    held_out: bool = False,
    seed: int = 0,
) -> Pairs:
    """Draw a batch of sources to copy or to reverse.

    Args:
      kind: "copy" or "reverse".
      lengths: possible source lengths; S is the largest.
      vocab_size: symbols are 1 … vocab_size − 1.
      held_out: draw only sources whose symbols sum to a multiple of ten; otherwise, only the others.
    """
    if kind not in KINDS:
        raise ValueError(f"kind = {kind!r}: expected one of {', '.join(KINDS)}")
    check_least(lengths=min(lengths, default=0))
    check_least(2, vocab_size=vocab_size)
    draw = np.random.default_rng((seed, step, held_out))
    longest = max(lengths)
    column = np.arange(longest + 1)
    source = np.zeros((0, longest), np.int32)
    for _ in range(100):
        if len(source) >= batch_size:
            break
        drawn = draw.integers(1, vocab_size, (4 * HELD_OUT_SUMS * batch_size, longest), dtype=np.int32)
        drawn[column[:-1] >= draw.choice(lengths, len(drawn))[:, None]] = 0
        source = np.concatenate([source, drawn[(drawn.sum(1) % HELD_OUT_SUMS == 0) == held_out]])
    if len(source) < batch_size:
        which = "held-out" if held_out else "training"
        raise ValueError(f"too few {which} sources: raise vocab_size = {vocab_size} or lengths = {list(lengths)}")
    source = source[:batch_size]
    length = (source > 0).sum(1).astype(np.int32)

    place = column if kind == "copy" else length[:, None] - 1 - column
    alignment = np.where(column < length[:, None], place, -1).astype(np.int32)
    targets = np.where(alignment >= 0, np.take_along_axis(source, np.maximum(alignment, 0), 1), 0).astype(np.int32)
    inputs = np.concatenate([np.zeros((batch_size, 1), np.int32), targets[:, :-1]], axis=1)
    return Pairs(source, length, inputs, targets, alignment)


def train(kind: str, layer: str, seed: int, steps: int, advance: Advance = ignore):
    """Train a model on a task with `fit`; returns the model and its parameters."""
    model = Seq2Seq(VOCABULARY, WIDTH, LAYERS[layer]())

    def batches(step):
        return pairs(kind, step, batch_size=32, lengths=SHOWN, vocab_size=VOCABULARY, seed=seed)

    def loss(params, batch):
        logits = model.apply(params, batch.source, batch.lengths, batch.inputs)
        real = jnp.arange(batch.targets.shape[1]) <= batch.lengths[:, None]  # the end symbol is predicted as well
        return (optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets) * real).sum() / real.sum()

    first = batches(0)
    params = jax.jit(model.init)(jax.random.key(seed), first.source, first.lengths, first.inputs)
    return model, fit(loss, params, batches, steps, learning_rate=5e-3, advance=advance)


def measure(options: Options) -> list[dict]:
    """One row per seed, task, layer and length: shares of aligned and right outputs on 2,048 held-out sources."""
    seeds, steps = FAST if options.fast else FULL
    advance = options.progress(seeds * len(KINDS) * len(LAYERS) * steps)
    rows = []
    for seed in range(seeds):
        for kind in KINDS:
            for layer in LAYERS:
                model, params = train(kind, layer, seed, steps, advance)
                drawn = {"batch_size": 2048, "lengths": LENGTHS, "vocab_size": VOCABULARY, "held_out": True}
                batch = pairs(kind, 0, seed=seed, **drawn)
                aligned, right = jax.jit(functools.partial(_hits, model))(params, batch)
                for length in LENGTHS:
                    counts = (batch.lengths == length)[:, None] & (batch.alignment >= 0)
                    rows.append(
                        {
                            "seed": seed,
                            "task": kind,
                            "layer": layer,
                            "length": length,
                            "length shown": length in SHOWN,
                            "aligned": float(aligned[counts].mean()),
                            "right": float(right[counts].mean()),
                        }
                    )
    return rows


def _hits(model, params, batch):
    """Which outputs have their largest weight on the right symbol, and which are right when the model reads its own."""
    weights = alignment(model, params, batch.source, batch.lengths, batch.inputs)
    written = model.apply(params, batch.source, batch.lengths, batch.inputs.at[:, 1:].set(-1)).argmax(-1)
    return weights.argmax(-1) == batch.alignment, written == batch.targets


def judge(rows: list[dict]) -> Verdict:
    """Held if 95 % of outputs are aligned for each task, layer and seed, at trained and at held-out lengths."""
    parts = []
    for kind in KINDS:
        for layer in LAYERS:
            for shown in (True, False):
                chosen = [r for r in rows if (r["task"], r["layer"], r["length shown"]) == (kind, layer, shown)]
                worst = min(np.mean(v) for v in table(chosen, "seed", "aligned").values())
                right = min(np.mean(v) for v in table(chosen, "seed", "right").values())
                where = "trained lengths" if shown else f"held-out lengths ({', '.join(map(str, HELD_OUT))})"
                text = f"{kind}, {layer}, {where}: {100 * worst:.1f} % aligned, {100 * right:.1f} % right (worst seed)"
                parts.append((worst >= 0.95, text))
    return Verdict.of(*parts)


def draw(rows: list[dict]) -> Figure:
    """Share of outputs whose largest weight is on the right symbol, against the length of the source, by task.

    The figure also shows lengths that were left out of training.
    """
    panels = {}
    for kind in KINDS:
        series = {}
        for layer in LAYERS:
            grouped = table([r for r in rows if (r["task"], r["layer"]) == (kind, layer)], "length", "aligned")
            series[layer] = (list(grouped), [100 * np.mean(v) for v in grouped.values()])
        panels[f"{kind} ({', '.join(map(str, HELD_OUT))} left out of training)"] = {
            "series": series,
            "x": "length of the source (symbols)",
            "y": "outputs aligned with the right symbol (%)",
        }
    low = int(100 * min(r["aligned"] for r in rows))
    return plots.panels(panels, f"Attention learns the alignment: at least {low} % of outputs are aligned")
