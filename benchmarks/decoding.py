"""Benchmark generation: a batch of prompts against one.

    python -m attnlab.bench decoding [--sizes=small,gpt2] [--json=decoding.json]

Sizes: small (the quickstart's model: 4 layers, 4 heads, width 128, context 64), long (the same with a context of 256),
learned (small with learned positions, where full contexts are read again) and gpt2 (the shape of GPT-2 small), with
random weights and temperature 0.8. Eight prompts, from an eighth of a length to the whole length, are continued side
by side, and one prompt of half that length alone; the time includes reading the prompts. The two calls alternate.

Figures: tokens_per_second_SIZE_one and …_eight, summed over the texts, medians over rounds; ratio_SIZE, the second
over the first, the median of the ratios within a round.
"""

import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.generation.decoding import generate
from attnlab.nn import GPT
from attnlab.support import timing

from .harness import options, tables

SMALL = {
    "vocab_size": 100,
    "num_layers": 4,
    "num_heads": 4,
    "width": 128,
    "context": 64,
    "positions": "rotary",
    "qk_norm": True,
    "use_bias": False,
}
# Fields of the model, tokens of a timed call, and the longest of its eight prompts.
SIZES = {
    "small": (SMALL, 256, 32),
    "long": (SMALL | {"context": 256}, 256, 128),
    "learned": (SMALL | {"positions": "learned"}, 256, 32),
    "gpt2": ({"vocab_size": 50257, "num_layers": 12, "num_heads": 12, "width": 768, "context": 1024}, 64, 64),
}
COUNTS = {"rounds": (5, "timed calls of each contender")}


def define(values, argv) -> None:
    """Define the flags."""
    options.define_common(values, COUNTS, SIZES)


def main(values) -> int:
    """Benchmark, and print a table for each size."""
    options.check_common(values, COUNTS, SIZES)
    cases = {size: _compare(size, values.rounds) for size in values.sizes}
    options.keep_cases(values, "decoding", cases)
    return 0


def _compare(size: str, rounds: int) -> dict[str, float]:
    """Time one prompt and eight, and print their table; returns the figures."""
    contenders, tokens = batches(size)
    seconds = timing.alternate(contenders, rounds)
    figures, rows = {}, {}
    for name, texts in {"one": 1, "eight": 8}.items():
        rate = texts * tokens / statistics.median(seconds[name])
        ratio = texts * tables.ratio(seconds, "one", name)
        figures |= {f"tokens_per_second_{size}_{name}": rate}
        rows[name] = {"tokens/s": f"{rate:,.0f}", "× one": f"{ratio:.2f}"}
    caption = f"medians of {rounds} rounds; {jax.devices()[0].device_kind}"
    tables.table(f"{size}: eight prompts side by side, and one", rows, caption=caption)
    return figures | {f"ratio_{size}": ratio}


def batches(size: str) -> tuple[dict[str, Callable], int]:
    """Functions that continue one prompt, and eight of different lengths; and the tokens of each text."""
    fields, tokens, longest = SIZES[size]
    model = GPT.of(**fields)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    rng = np.random.default_rng(0)
    eight = [rng.integers(0, model.config.vocab_size, longest * part // 8) for part in range(1, 9)]

    def contender(prompts):
        return lambda: np.stack(list(generate(model, params, prompts, tokens, temperature=0.8)))

    return {"one": contender(eight[3:4]), "eight": contender(eight)}, tokens
