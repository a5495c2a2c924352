"""Benchmark the training of every mixer at the quickstart's size: tokens a second, seconds to compile, decode state.

    python -m attnlab.bench mixers [--mixers=attention,gated_delta] [--json=mixers.json]

The mixers alternate, each in a process of its own, on the quickstart's text.

Figures: tokens_per_second_MIXER, compile_seconds_MIXER (the first step, which compiles, less a later one),
state_bytes_MIXER (one text of a full context, in the precision of the run) and parameters_MIXER.
"""

import statistics

import jax

from attnlab import config as configs
from attnlab.comparing.variants import state_bytes
from attnlab.nn.kinds import MIXERS
from attnlab.support import timing
from attnlab.training import run
from attnlab.training.experiment import Experiment

from .harness import options, recording, workers

COUNTS = {"rounds": (7, "timed blocks of each mixer"), "seconds": (2, "seconds a block of the slowest, about")}


def define(values, argv) -> None:
    """Define the flags."""
    options.define_choices(values, "mixers", MIXERS, "mixers")
    options.define_integers(values, COUNTS)
    options.define_json(values)
    recording.define(values)


def main(values) -> int:
    """Benchmark, and print the table."""
    options.check_positive(values, *COUNTS)
    options.check_known("mixers", values.mixers, MIXERS)
    options.check_new(values, "json")
    recording.check(values)
    recipes = {mixer: _recipe(mixer) for mixer in values.mixers}
    contenders = {mixer: {"peer": False, "recipe": config.to_dict()} for mixer, config in recipes.items()}
    tokens, vocab_size = workers.quickstart_text()
    with workers.started(contenders, "mixers", {}, tokens=tokens, vocab_size=vocab_size) as running:
        first = {mixer: worker.ask("train", steps=1)["seconds"] for mixer, worker in running.items()}
        steps = workers.calibrate(running, values.seconds)
        answers = workers.alternate(running, "train", values.rounds, "mixers", steps=steps)
    cases, rows = {}, {}
    for mixer, config in recipes.items():
        step = statistics.median(answer["seconds"] for answer in answers[mixer]) / steps
        experiment = Experiment(run.resolve(config).config, vocab_size)
        found = {
            "tokens_per_second": config.batch_size * config.model.context / step,
            "compile_seconds": first[mixer] - step,
            "state_bytes": state_bytes(experiment.model),
            "parameters": experiment.parameters,
        }
        cases[mixer] = {f"{name}_{mixer}": value for name, value in found.items()}
        shown = {name: f"{value:,.0f}" for name, value in found.items()}
        rows[mixer] = shown | {"compile_seconds": f"{found['compile_seconds']:.1f}"}
    caption = f"medians of {values.rounds} rounds of {steps} steps; {jax.devices()[0].device_kind}"
    timing.table("mixers at the quickstart's size", rows, caption=caption)
    options.keep_cases(values, "mixers", cases)
    return 0


def _recipe(mixer):
    config = configs.default()
    config.model.mixer = mixer
    return config
