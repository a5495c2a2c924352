"""Race variants: measure their speeds in alternating short runs, and compare their losses after equal training time.

The runs alternate because speeds from different hours depend as much on the machine's other work as on the variants.
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

LONGER = (1, 8)  # lengths at which prefill and decoding are timed, in multiples of the training context
SPEEDS = (
    "train_tokens_per_second",
    *(f"{what}_tokens_per_second_{times}x" for what in ("prefill", "decode") for times in LONGER),
)
DECODED = 64  # tokens decoded per timed call
# The median speed lies between the lowest and the highest of seven rounds with probability 1 − 2⁻⁶ = 98 %.
ROUNDS = 7
BURST = 0.5  # seconds of training per round


class Race(NamedTuple):
    """Measured speeds of variants.

    Attributes:
      machine, hour: where and when the speeds were measured.
      speeds: tokens per second in each round, by the name of a run's folder, then by table column.
    """

    machine: str
    hour: str
    speeds: dict[str, dict[str, list[float]]]


def race(workdirs: list[Path]) -> Race:
    """Race variants, each represented by a finished run."""
    hour = f"{datetime.datetime.now().astimezone():%-d %B %Y, %H:%M %Z}"
    speeds = {workdir.name: {SPEEDS[0]: []} for workdir in workdirs}
    contenders = {workdir.name: _training(workdir) for workdir in workdirs}
    for _ in range(ROUNDS):
        for name, speed in contenders.items():
            speeds[name][SPEEDS[0]].append(speed())
    for times in LONGER:
        for (name, column), round_speeds in _decoding(workdirs, times).items():
            speeds[name][column] = round_speeds
    return Race(provenance.machine(), hour, speeds)


def _training(workdir: Path) -> Callable[[], float]:
    """Return a function that resumes a run for about `BURST` seconds of training and returns tokens per second."""
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
    """Measure tokens per second of prefilling `times` contexts, and of decoding the last of these tokens again."""
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
    """Whether a model accepts sequences longer than its training context; with learned positions it does not."""
    return model.config.position_encoding != "learned"


def _decoders(run: loading.Run, prefill: int, decode: int) -> dict[str, Callable]:
    """Return functions that prefill `prefill` tokens, and that decode the last `decode` of them again."""
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

        # Shorten the caches: their only integers, nested or not, are lengths.
        caches = jax.tree.map(lambda x: x - decode if jnp.issubdtype(x.dtype, jnp.integer) else x, caches)
        return jax.lax.scan(step, (tokens[:, -1:], caches), length=decode)[0][0]

    with precision.products(run.config.precision):  # only compilation depends on the precision
        caches = jax.block_until_ready(read(run.params, tokens))
        programs = read.lower(run.params, tokens).compile(), write.lower(run.params, caches).compile()
    return {"prefill": lambda: programs[0](run.params, tokens), "decode": lambda: programs[1](run.params, caches)}


def at_equal_time(workdirs: Sequence[Sequence[Path]], speeds: Sequence[Sequence[float]]) -> tuple[np.ndarray, list]:
    """Compare all runs after the training time of the fastest one.

    Args:
      workdirs: folders of each variant's runs, by seed.
      speeds: tokens per second of each variant in each round of a race; [NaN] without a race.

    Returns:
      (losses, verdicts). The losses `[variants, seeds]` are interpolated between validations, for the median speeds. A
      verdict compares a variant with the first: `statistics.OPEN` if the lowest, median and highest ratio of their
      speeds in a round lead to different verdicts, and None for the first variant or without speeds.
    """
    curves = [[protocols.curve(workdir) for workdir in variant_workdirs] for variant_workdirs in workdirs]
    chance = [[_constant(workdir) for workdir in variant_workdirs] for variant_workdirs in workdirs]
    medians, verdicts = list(map(np.median, speeds)), [None]
    for n in range(1, len(workdirs)):
        ratios, outcomes = np.divide(speeds[n], speeds[0]), set()
        for ratio in (ratios.min(), np.median(ratios), ratios.max()):
            losses = _losses_after(curves, chance, [*medians[:n], medians[0] * ratio, *medians[n + 1 :]])
            outcomes.add(statistics.differences(losses[[0, n]], of=len(workdirs) - 1)[0].verdict)
        verdict = outcomes.pop() if len(outcomes) == 1 else statistics.OPEN
        verdicts.append(None if np.isnan(ratios).any() else verdict)
    return _losses_after(curves, chance, medians), verdicts


def _constant(workdir: Path) -> float | None:
    """The loss of a run without a whole curve: chance level if it diverged, NaN if it is unfinished; otherwise None."""
    loss = protocols.result(workdir)
    return loss if protocols.diverged(workdir) or math.isnan(loss) else None


def _losses_after(curves, chance, speeds: Sequence[float]) -> np.ndarray:
    """Losses of all runs after the training time of the fastest one; chance level for a run that diverged."""
    pairs = [list(zip(*row, strict=True)) for row in zip(curves, chance, strict=True)]
    ends = [c[-1, 0] / speed for row, speed in zip(pairs, speeds) for c, diverged in row if len(c) and diverged is None]
    seconds = min((end for end in ends if end > 0), default=math.nan)
    return np.array(
        [
            [_loss_at(c, seconds * speed) if diverged is None else diverged for c, diverged in row]
            for row, speed in zip(pairs, speeds)
        ]
    )


def _loss_at(curve: np.ndarray, tokens: float) -> float:
    """Interpolate the loss after `tokens` of training; NaN before the first validation, and after the last."""
    if not len(curve) or not curve[0, 0] <= tokens <= curve[-1, 0] * (1 + 1e-12):  # allows for rounding
        return math.nan
    return float(np.interp(tokens, curve[:, 0], curve[:, 2]))
