"""Trained to copy and to reverse short sequences, a decoder without positions generalizes best to twice the length.

Three-layer decoders read a start token, a source of random symbols and a separator, and write the source, or its
reverse, and an end token. They are trained on fresh sources of 1 to L symbols, with each kind of positions of
`attnlab.nn.GPT` and without positions, and tested on sources of 1 to 2·L symbols. The measure is the exact match: the
share of sources whose whole output is right. One pass over the right output suffices: if the most probable token is
right everywhere, greedy decoding writes exactly this output; at the first wrong token, greedy decoding has written the
same tokens so far, and is wrong too. The trained lengths are the control: what a model has not learned there it cannot
extend. Learned positions beyond the trained ones keep their initial vectors.

After Kazemnejad et al. 2023, "The Impact of Positional Encoding on Length Generalization in Transformers" (arXiv
2305.19466), who train larger decoders on lengths up to 20 and test them up to 40.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int
from matplotlib.figure import Figure

from attnlab import plots
from attnlab.data.tasks import TEST
from attnlab.data.tasks.task_draws import Number, check_least, compiled, key_of
from attnlab.nn import GPT
from attnlab.nn.config import POSITIONS
from attnlab.results.statistics import Interval
from attnlab.study.fitting import adamw, fit_seeds
from attnlab.study.report import Options, Verdict, table
from attnlab.types import Array

NONE = "none"
LAYERS, HEADS, WIDTH = 3, 4, 64
LEARNING_RATE = 3e-3
LEARNED = 0.9  # a model counts as trained if its exact match at the trained lengths is at least this
KINDS = ("copy", "reverse")
END, START, SEPARATOR, SYMBOLS = 0, 1, 2, 3  # symbols start at 3


class Copies(NamedTuple):
    """Sequences with a source and its copy."""

    # int32 [B, 2·S + 2]: 1, the n symbols of the source, 2, the n symbols of the copy; padded with 0
    tokens: Int[Array, "B T"]
    # int32 [B, 2·S + 2]: the next symbol of the copy, starting at the 2, then 0 for the end; −1 elsewhere
    targets: Int[Array, "B T"]
    lengths: Int[Array, " B"]  # int32 [B], n


@compiled
def copies(
    kind: str, step: Number, *, batch_size: int, lengths: Sequence[int], vocab_size: int = 32, seed: Number = 0
) -> Copies:
    """Draw sequences with a source and its copy, or its reverse.

    Args:
      kind: "copy" or "reverse".
      lengths: possible lengths of the source; S is the largest.
      vocab_size: V; symbols are 3 … V − 1.
    """
    if kind not in KINDS:
        raise ValueError(f"kind = {kind!r}: expected one of {', '.join(KINDS)}")
    check_least(batch_size=batch_size, lengths=min(lengths, default=0))
    check_least(SYMBOLS + 1, vocab_size=vocab_size)
    symbol_key, length_key = jax.random.split(key_of(step, seed))
    longest = max(lengths)
    source = jax.random.randint(symbol_key, (batch_size, longest), SYMBOLS, vocab_size, jnp.int32)
    n = jax.random.choice(length_key, jnp.array(lengths, jnp.int32), (batch_size, 1))
    at = jnp.arange(2 * longest + 2, dtype=jnp.int32)
    nth = at - n - 2  # index of the output symbol
    wanted = nth if kind == "copy" else n - 1 - nth
    from_source, from_output = (
        jnp.take_along_axis(source, jnp.clip(index, 0, longest - 1), axis=1)
        for index in (jnp.broadcast_to(at - 1, nth.shape), wanted)
    )
    tokens = jnp.select(
        [at == 0, at <= n, at == n + 1, nth < n],
        [jnp.int32(START), from_source, jnp.int32(SEPARATOR), from_output],
        END,
    )
    following = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values=END)
    predicted = (nth >= -1) & (nth < n)  # from the separator to the last symbol
    return Copies(tokens, jnp.where(predicted, following, -1), n[:, 0])


class Size(NamedTuple):
    """Size of the study."""

    tasks: tuple[str, ...]  # "copy" and "reverse"
    positions: tuple[str, ...]  # kinds of positions of the models, "none" among them
    seeds: int  # models for each task and kind of positions
    steps: int  # training steps
    longest: int  # L, the longest source length in training
    vocab_size: int
    batch_size: int
    examples: int  # held-out sources


FAST = Size(("copy",), (NONE, "rotary", "alibi"), 2, steps=800, longest=5, vocab_size=11, batch_size=32, examples=512)
FULL = Size(KINDS, POSITIONS, seeds=6, steps=1000, longest=6, vocab_size=16, batch_size=32, examples=2048)


def gpt(positions: str, size: Size) -> GPT:
    """The model; its context fits sources twice as long as the longest in training."""
    context = 4 * size.longest + 2
    sizes = {"vocab_size": size.vocab_size, "num_layers": LAYERS, "num_heads": HEADS, "width": WIDTH}
    options = {"positions": positions, "mlp_ratio": 1.0, "use_bias": True, "attention": {"qk_norm": False}}
    return GPT.of(**sizes, context=context, **options)


def measure(options: Options) -> list[dict]:
    """One row per task, kind of positions, seed and length: the exact match."""
    size = FAST if options.fast else FULL
    advance = options.progress(len(size.tasks) * len(size.positions) * size.seeds * size.steps)
    lengths = range(1, 2 * size.longest + 1)
    rows = []
    for task in size.tasks:
        test = copies(task, TEST, batch_size=size.examples, lengths=lengths, vocab_size=size.vocab_size)
        for positions in size.positions:
            model = gpt(positions, size)
            params = _train(model, task, size, advance)
            right = _right(model, params, test)
            for seed in range(size.seeds):
                for length in lengths:
                    match = right[seed, np.asarray(test.lengths) == length].mean()
                    common = {"task": task, "positions": positions, "seed": seed, "length": length}
                    rows.append(common | {"trained": length <= size.longest, "exact match": float(match)})
    return rows


def _train(model, task, size, advance):
    def loss(params, batch):
        has_target = batch.targets >= 0
        losses = model.apply(params, batch.tokens, targets=jnp.maximum(batch.targets, 0))
        return jnp.where(has_target, losses, 0).sum() / has_target.sum()

    def batches(step, seed):
        drawn = {"batch_size": size.batch_size, "lengths": range(1, size.longest + 1), "vocab_size": size.vocab_size}
        return copies(task, step, seed=seed, **drawn)

    def init(key):
        return model.init(key, jnp.zeros((1, 2), jnp.int32))

    optimizer = adamw(size.steps, LEARNING_RATE)
    fitted = fit_seeds(loss, init, batches, optimizer, seeds=range(size.seeds), looks=[size.steps], advance=advance)
    return next(params for _, params in fitted)


def _right(model, params, test):
    """Which outputs of each seed's model are entirely right, `[seeds, B]`."""
    return np.asarray(jax.jit(jax.vmap(lambda params: exact(model.apply(params, test.tokens), test)))(params))


def exact(logits: Float[Array, "B T V"], batch: Copies) -> Bool[Array, " B"]:
    """Whether the most probable token is right at every position that has a target."""
    return ((logits.argmax(-1) == batch.targets) | (batch.targets < 0)).all(-1)


def beyond(rows: list[dict], task: str, positions: str, trained: bool = False) -> list[float]:
    """The exact match of each seed, averaged over the longer lengths or, if `trained`, over the trained lengths."""
    chosen = [r for r in rows if (r["task"], r["positions"], r["trained"]) == (task, positions, trained)]
    return [float(np.mean(v)) for v in table(chosen, "seed", "exact match").values()]


def judge(rows: list[dict]) -> Verdict:
    """Held if, in each task, all models master the trained lengths, and models without positions lead beyond them."""
    parts, kinds = [], list(dict.fromkeys(r["positions"] for r in rows))
    for task in dict.fromkeys(r["task"] for r in rows):
        known = {kind: np.mean(beyond(rows, task, kind, trained=True)) for kind in kinds}
        least = min(known, key=known.get)
        longest = max(r["length"] for r in rows if r["trained"])
        text = f"{task}, trained lengths (up to {longest}): exact match {known[least]:.2f} or more (lowest: {least})"
        parts.append((known[least] >= LEARNED, text))

        ours = beyond(rows, task, NONE)
        others = {kind: beyond(rows, task, kind) for kind in kinds if kind != NONE}
        best = max(others, key=lambda kind: np.mean(others[kind]))
        lead = Interval.of(np.subtract(ours, others[best]))
        text = (
            f"{task}, up to twice as long: {Interval.of(ours):.2f} without positions, {Interval.of(others[best]):.2f} "
            f"with the best kind, {best}: a lead of {lead:.2f}"
        )
        parts.append((lead.low > 0, text))
    return Verdict.of(*parts)


def draw(rows: list[dict]) -> Figure:
    """Exact match against the length of the source, one panel per task; bands are standard deviations over seeds.

    A model that has learned the task is right up to the trained length; beyond it, the curve shows how it generalizes.
    """
    panels = {}
    for task in dict.fromkeys(r["task"] for r in rows):
        series, spread = {}, {}
        for kind in dict.fromkeys(r["positions"] for r in rows):
            chosen = [r for r in rows if (r["task"], r["positions"]) == (task, kind)]
            grouped = table(chosen, "length", "exact match")
            series[kind] = (list(grouped), [np.mean(v) for v in grouped.values()])
            spread[kind] = [np.std(v) for v in grouped.values()]
        longest = max(r["length"] for r in rows if r["trained"])
        panels[f"{task}, trained on sources of up to {longest}"] = {
            "series": series,
            "spread": spread,
            "x": "length of the source (symbols)",
            "y": "exact match (share)",
        }
    title = "Trained on short sources, a decoder without positions copies and reverses longer ones best"
    return plots.panels(panels, judge(rows).title(title))
