"""Benchmark training one small model from several seeds: side by side, as studies do, and one after another.

    python -m attnlab.bench seeds [--seeds=4] [--sizes=chain] [--json=seeds.json]

Contenders, which alternate:

  stepwise        one seed after another, a compiled step at a time, as training loops are usually written
  one by one      one seed after another, all steps in one compiled loop
  vmap            all seeds by vmap on one device, in one loop
  side by side    `attnlab.study.fitting.fit_seeds`: over a device for each core, and by vmap within each

Sizes: tiny (1 layer of width 16, 16 sequences of 32 tokens), chain (2 layers of width 16, one head, 64 sequences of
100: the study `markov`) and induction (2 layers of width 64, 4 heads, 32 sequences of 64).

Figures: ms_SIZE_CONTENDER, milliseconds a step and seed, the median over rounds; speedup_SIZE_CONTENDER, the time of
"one by one" over the contender's, the median over rounds.
"""

import statistics
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import optax

from attnlab.data.tasks import repeats
from attnlab.nn import GPT
from attnlab.study import fitting, running
from attnlab.support import timing

from .harness import options


class Size(NamedTuple):
    """A model and its batches.

    Attributes:
      layers, heads, width: of an attention-only GPT.
      batch_size: sequences of a step.
      length: tokens of a sequence.
      steps: steps of a timed call.
    """

    layers: int
    heads: int
    width: int
    batch_size: int
    length: int
    steps: int


SIZES = {
    "tiny": Size(1, 1, 16, 16, 32, 400),
    "chain": Size(2, 1, 16, 64, 100, 40),
    "induction": Size(2, 4, 64, 32, 64, 40),
}
COUNTS = {"seeds": (4, "models of each size"), "rounds": (5, "timed calls of each contender")}
REFERENCE = "one by one"
VOCAB = 32


def define(values, argv) -> None:
    """Define the flags."""
    options.define_common(values, SIZES, COUNTS)


def main(values) -> int:
    """Benchmark, and print a table for each size."""
    options.check_common(values, SIZES, COUNTS)
    running.one_device_per_core()
    cases = {}
    for name in values.sizes:
        size, figures = SIZES[name], cases.setdefault(f"{name}, {values.seeds} seeds", {})
        seconds = timing.alternate(contenders(size, values.seeds, values.rounds + 1), values.rounds)
        rows = {}
        for contender, times in seconds.items():
            label = f"{name}_{contender.replace(' ', '_')}"
            figures[f"ms_{label}"] = 1e3 * statistics.median(times) / size.steps / values.seeds
            figures[f"speedup_{label}"] = timing.ratio(seconds, REFERENCE, contender)
            speed = f"{figures[f'speedup_{label}']:.2f}"
            rows[contender] = {"ms a step and seed": f"{figures[f'ms_{label}']:.2f}", "times as fast": speed}
        caption = f"medians over rounds; {len(jax.devices())} devices"
        timing.table(f"{name}: {values.seeds} seeds", rows, caption=caption)
    options.keep_cases(values, "seeds", cases)
    return 0


def contenders(size: Size, seeds: int, calls: int) -> dict[str, Callable]:
    """Functions that train all seeds for `size.steps` more steps, at most `calls` times."""
    model = GPT(VOCAB, size.layers, size.heads, size.width, size.length, positions="rotary", mlp_ratio=0)
    parts = {
        **fitting.next_token(model),
        "batches": lambda step, seed: repeats(
            step, batch_size=size.batch_size, length=size.length + 1, vocab_size=VOCAB, seed=seed
        ),
        "optimizer": optax.adamw(1e-3),
    }
    looks = [size.steps * call for call in range(1, calls + 1)]
    one, each = jax.local_devices()[:1], range(seeds)
    singles = [fitting.fit_seeds(**parts, seeds=[seed], looks=looks, devices=one) for seed in each]
    by_vmap = fitting.fit_seeds(**parts, seeds=each, looks=looks, devices=one)
    together = fitting.fit_seeds(**parts, seeds=each, looks=looks)
    steps = _stepwise(**parts, seeds=each, steps=size.steps)
    return {
        "stepwise": lambda: next(steps),
        REFERENCE: lambda: [next(single) for single in singles],
        "vmap": lambda: next(by_vmap),
        "side by side": lambda: next(together),
    }


def _stepwise(loss, init, batches, optimizer, seeds, steps) -> Iterator:
    """Train one seed after another, and yield all parameters after every `steps` steps."""

    @jax.jit
    def step(params, opt_state, number, seed):
        gradient = jax.grad(loss)(params, batches(number, seed))
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    params = [jax.jit(init)(jax.random.key(seed)) for seed in seeds]
    states, done = [optimizer.init(each) for each in params], 0
    while True:
        for at, seed in enumerate(seeds):
            for number in range(done, done + steps):
                params[at], states[at] = step(params[at], states[at], number, seed)
        done += steps
        yield jax.block_until_ready(params)
