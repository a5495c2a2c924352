"""Benchmark generation: a batch of prompts against one, and n-gram drafts against none.

    python -m attnlab.bench decoding [--sizes=small,gpt2] [--workdir=runs/quickstart] [--json=decoding.json]

Sizes: small (the quickstart's model: 4 layers, 4 heads, width 128, context 64), long (the same with a context of 256),
learned (small with learned positions, where full contexts are read again) and gpt2 (the shape of GPT-2 small), with
random weights and temperature 0.8. Eight prompts, of an eighth to eight eighths of a length, are continued side by
side, and one of half that length alone; reading them is part of the time.

Drafts are measured with a trained model: the run in --workdir, or else one that is trained first, as by
`attnlab train --config=quickstart`, for --train_steps steps. "repeating" is its greedy text after a passage of its
own that is there three times, "ordinary" what it draws at temperature 0.8 after the passage. Contenders alternate.

Figures: tokens_per_second_batch_SIZE_one and …_eight, of all texts together; ratio_batch_SIZE, the second over the
first; tokens_per_second_draft_TEXT_plain and …_draft; ratio_draft_TEXT. Medians over rounds, of ratios within a round.
"""

import functools
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from attnlab import config as configs
from attnlab import loading
from attnlab.generation.decoding import generate
from attnlab.generation.texts import prompt_ids
from attnlab.nn import GPT
from attnlab.support import timing

from .harness import options

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
COUNTS = {
    "rounds": (5, "timed calls of each contender"),
    "draft": (8, "tokens guessed ahead"),
    "tokens": (400, "tokens of the texts with and without drafts"),
    "train_steps": (600, "steps of the model that is trained for the drafts; 2,000 take two minutes"),
}
PASSAGE = 150  # tokens


def define(values, argv) -> None:
    """Define the flags."""
    options.define_common(values, SIZES, COUNTS)
    flags.DEFINE_string("workdir", None, "a trained run, for the drafts", flag_values=values)


def main(values) -> int:
    """Benchmark, and print two tables."""
    options.check_common(values, SIZES, COUNTS)
    run = loading.load(values.workdir) if values.workdir else None  # its errors come before the measurements
    figures = {}
    for size in values.sizes:
        title = f"{size}: eight prompts side by side, and one"
        figures |= compare(title, *batches(size), values.rounds, f"batch_{size}")
    run = run or _trained(values.train_steps)
    for text, contenders in drafts(run, values.draft, values.tokens).items():
        title = f"{text} text, without and with drafts of {values.draft} tokens"
        figures |= compare(title, contenders, values.tokens, values.rounds, f"draft_{text}")
    options.keep_cases(values, "decoding", {"all": figures})
    return 0


def compare(title: str, contenders: dict[str, Callable], tokens: int, rounds: int, label: str) -> dict:
    """Time two contenders, the reference first, print a table, and return the figures.

    Args:
      title: of the table.
      contenders: functions that return the tokens they generated, by name.
      tokens: of each text.
      rounds: timed calls.
      label: the end of the figures' names.
    """
    texts = {name: contender().shape[1] for name, contender in contenders.items()}
    seconds = timing.alternate(contenders, rounds)
    figures, rows, reference = {}, {}, next(iter(contenders))
    for name, times in seconds.items():
        rate = tokens * texts[name] / statistics.median(times)
        times_as_fast = timing.ratio(seconds, reference, name) * texts[name] / texts[reference]
        figures[f"tokens_per_second_{label}_{name}"] = rate
        rows[name] = {"tokens/s": f"{rate:,.0f}", f"× {reference}": f"{times_as_fast:.2f}"}
    figures[f"ratio_{label}"] = times_as_fast
    timing.table(title, rows, caption=f"medians of {rounds} rounds; {jax.devices()[0].device_kind}")
    return figures


def batches(size: str) -> tuple[dict[str, Callable], int]:
    """Functions that continue one prompt, and eight of different lengths; and the tokens of each text."""
    fields, tokens, longest = SIZES[size]
    model = GPT(**fields)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    rng = np.random.default_rng(0)
    eight = [rng.integers(0, model.vocab_size, longest * part // 8) for part in range(1, 9)]

    def contender(prompts):
        return lambda: np.stack(list(generate(model, params, prompts, tokens, temperature=0.8)))

    return {"one": contender(eight[3:4]), "eight": contender(eight)}, tokens


def drafts(run: loading.Run, draft: int, tokens: int) -> dict[str, dict[str, Callable]]:
    """Functions that continue a text with and without drafts, by the kind of text."""
    draw = functools.partial(generate, run.model, run.params, vocab_size=run.tokenizer.vocab_size)
    passage = np.concatenate(list(draw(prompt_ids(run.tokenizer, None), PASSAGE, temperature=0.8)))

    def contender(prompt, temperature, draft):
        return lambda: np.stack(list(draw(prompt, tokens, temperature=temperature, draft=draft)))

    texts = {"repeating": (np.tile(passage, 3), 0.0), "ordinary": (passage, 0.8)}
    return {
        text: {"plain": contender(*given, draft=0), "draft": contender(*given, draft=draft)}
        for text, given in texts.items()
    }


def _trained(steps: int) -> loading.Run:
    """The quickstart's model after some steps."""
    from attnlab.train import train

    config = configs.default()
    config.steps, config.log.tensorboard = steps, False
    with tempfile.TemporaryDirectory(prefix="attnlab-decoding-") as folder:
        train(config, Path(folder) / "run")
        return loading.load(Path(folder) / "run")
