"""A race of variants, short runs of all of them in turn, and their losses after as many seconds, by the race's speeds.

Speeds of different hours say as much about the machine's other work as about the variants.
"""

import datetime
import itertools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attnlab import loading
from attnlab.comparing import protocol as protocols
from attnlab.data.batches import prefetched
from attnlab.nn import GPT
from attnlab.results import statistics
from attnlab.support import provenance, timing
from attnlab.training import precision
from attnlab.training import run as runs
from attnlab.training.workdir import read_run

LONGER = (1, 8)  # contexts at which decoding is timed, over the training's
SPEEDS = (
    "train_tokens_per_second",
    *(f"{what}_tokens_per_second_{times}x" for what in ("prefill", "decode") for times in LONGER),
)
DECODED = 64  # tokens that are timed
# The median speed is between the lowest and the highest of seven rounds with probability 1 − 2⁻⁶ = 98 %.
ROUNDS = 7
BURST = 0.5  # seconds of training in a round


class Race(NamedTuple):
    """The speeds of variants.

    Attributes:
      machine, hour: where and when they were measured.
      speeds: by the name of a run's folder, and by column of the table: tokens per second in each round.
    """

    machine: str
    hour: str
    speeds: dict[str, dict[str, list[float]]]


def race(workdirs: list[Path]) -> Race:
    """The race of variants, each by a finished run."""
    hour = f"{datetime.datetime.now().astimezone():%-d %B %Y, %H:%M %Z}"
    speeds = {workdir.name: {SPEEDS[0]: []} for workdir in workdirs}
    contenders = {workdir.name: _training(workdir) for workdir in workdirs}
    for _ in range(ROUNDS):
        for name, speed in contenders.items():
            speeds[name][SPEEDS[0]].append(speed())
    for times in LONGER:
        for (name, column), found in _decoding(workdirs, times).items():
            speeds[name][column] = found
    return Race(provenance.machine(), hour, speeds)


def _training(workdir: Path) -> Callable[[], float]:
    """A function that trains a run on from its last state for about `BURST` seconds: its tokens per second."""
    plan = runs.resolve(read_run(workdir)[1], workdir, eval_only=True)
    with runs.open_run(plan, eval_only=True) as run:
        program, text, state = run.program, run.text, jax.device_get(run.state)
    config, most = plan.config, program.steps_per_call
    shardings = jax.tree.map(lambda x: x.sharding, program.abstract_state)

    def seconds(steps: int) -> float:
        with precision.products(config.precision):
            trained, batches = jax.block_until_ready(jax.device_put(state, shardings)), prefetched(text.train, 0, steps)
            start = time.perf_counter()
            while taken := list(itertools.islice(batches, most)):
                trained, _ = program.train_steps(trained, taken, max_steps=most)
            jax.block_until_ready(trained)
            return time.perf_counter() - start

    seconds(1)  # compiles
    steps = max(1, round(BURST * most / seconds(most)))
    return lambda: steps * config.batch_size * config.model.context / seconds(steps)


def _decoding(workdirs: list[Path], times: int) -> dict[tuple[str, str], list[float]]:
    """Tokens per second of reading a text of so many contexts, and of decoding its last tokens again."""
    calls, tokens = {}, {}
    for workdir in workdirs:
        run = loading.load(workdir)
        if times > 1 and not extends(run.model):
            continue
        length = times * run.config.model.context
        counts = {"prefill": length, "decode": min(DECODED, length // 2)}
        for what, call in _decoders(run, **counts).items():
            key = workdir.name, f"{what}_tokens_per_second_{times}x"
            calls[key], tokens[key] = call, counts[what]
    return {key: [tokens[key] / each for each in seconds] for key, seconds in timing.alternate(calls, ROUNDS).items()}


def extends(model: GPT) -> bool:
    """Whether a model takes more tokens than it was trained with: learned positions end with the context."""
    return model.config.position_encoding != "learned"


def _decoders(run: loading.Run, prefill: int, decode: int) -> dict[str, Callable]:
    """Functions that read a text of so many tokens, and that decode so many of its last tokens again."""
    model = run.model.replace(context=prefill)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, model.config.vocab_size, (1, prefill)), jnp.int32)

    @jax.jit
    def read(params, tokens):
        return model.apply(params, tokens, caches=model.init_caches(1))[1]

    @jax.jit
    def write(params, caches):
        def step(carry, _):
            token, caches = carry
            logits, caches = model.apply(params, token, caches=caches)
            return (logits[:, -1:].argmax(-1).astype(jnp.int32), caches), None

        # Lengths are the integers of any cache, also of one within another.
        caches = jax.tree.map(lambda x: x - decode if jnp.issubdtype(x.dtype, jnp.integer) else x, caches)
        return jax.lax.scan(step, (tokens[:, -1:], caches), length=decode)[0][0]

    with precision.products(run.config.precision):  # calls of the compiled programs need it no more
        caches = jax.block_until_ready(read(run.params, tokens))
        programs = read.lower(run.params, tokens).compile(), write.lower(run.params, caches).compile()
    return {"prefill": lambda: programs[0](run.params, tokens), "decode": lambda: programs[1](run.params, caches)}


def at_equal_time(workdirs: Sequence[Sequence[Path]], speeds: Sequence[Sequence[float]]) -> tuple[np.ndarray, list]:
    """Compare all runs after as many seconds as the fastest one trains.

    Args:
      workdirs: of each variant's runs, by seed.
      speeds: of each variant, tokens per second in each round of a race; [NaN] without one.

    Returns:
      the losses at the median speeds, `[variants, seeds]`, interpolated between validations; and of each variant the
      verdict of its losses against the first's. It is `statistics.OPEN` unless it is the same by the ratio of the two
      speeds in every round, and None for the first one and without speeds.
    """
    curves = [[protocols.curve(workdir) for workdir in of_variant] for of_variant in workdirs]
    chance = [[protocols.result(w) if protocols.diverged(w) else None for w in of_variant] for of_variant in workdirs]
    medians, verdicts = list(map(np.median, speeds)), [None]
    for n in range(1, len(workdirs)):
        ratios, found = np.divide(speeds[n], speeds[0]), set()
        for ratio in (ratios.min(), np.median(ratios), ratios.max()):
            losses = _losses_after(curves, chance, [*medians[:n], medians[0] * ratio, *medians[n + 1 :]])
            found.add(statistics.differences(losses[[0, n]], of=len(workdirs) - 1)[0].verdict)
        verdict = found.pop() if len(found) == 1 else statistics.OPEN
        verdicts.append(None if np.isnan(ratios).any() else verdict)
    return _losses_after(curves, chance, medians), verdicts


def _losses_after(curves, chance, speeds: Sequence[float]) -> np.ndarray:
    """The losses of all runs after as many seconds as the fastest one takes; of chance for one that diverged."""
    pairs = [list(zip(*of, strict=True)) for of in zip(curves, chance, strict=True)]
    ends = [c[-1, 0] / speed for of, speed in zip(pairs, speeds) for c, diverged in of if len(c) and diverged is None]
    seconds = min((end for end in ends if end > 0), default=math.nan)
    return np.array(
        [
            [_loss_at(c, seconds * speed) if diverged is None else diverged for c, diverged in of]
            for of, speed in zip(pairs, speeds)
        ]
    )


def _loss_at(curve: np.ndarray, tokens: float) -> float:
    """The loss after some tokens of training; NaN where the run ended sooner, or was not yet validated."""
    if not len(curve) or not curve[0, 0] <= tokens <= curve[-1, 0] * (1 + 1e-12):  # as it is rounded
        return math.nan
    return float(np.interp(tokens, curve[:, 0], curve[:, 2]))
