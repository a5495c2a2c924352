"""Benchmark training to a loss: the seconds until attnlab reaches nanoGPT's final loss, on the same text.

    python -m attnlab.bench loss --peer_path=nanoGPT --peer_python=torch/bin/python [--path=TEXT.txt]
    python -m attnlab.bench loss --recipes=speedrun:fast,my_config.py --path=TEXT.txt

nanoGPT trains compiled, in float32 and once more under torch.autocast in bfloat16, by its README's recipe for CPUs:
4 layers, 4 heads, width 128, context 64, batch size 12, no dropout, AdamW at 1e-3 with β2 0.99, 100 steps of warm-up
and a cosine down to 1e-4 over 2,000 steps (--steps).
attnlab trains by recipes, which are configs as for `attnlab train`: `speedrun:fast` is designed to reach nanoGPT's loss
soon, `speedrun:budget` to reach the lowest loss with nanoGPT's 2,000 × 768 tokens.

Each trains to its end in its own process, in blocks that alternate, on the same characters. Seconds count the training
steps with their batches, but neither each contender's first step, which compiles, nor evaluation. The loss is the mean
over all of the validation text, in adjacent windows of each contender's context, in nats per character. Without
--peer_path attnlab runs alone.

Figures: loss_CONTENDER, seconds_CONTENDER, tokens_CONTENDER, parameters_CONTENDER; for a recipe whose loss is no higher
than nanoGPT's, ratio_CONTENDER, the seconds of nanoGPT in float32 over the recipe's, and ratio_CONTENDER_over_autocast,
the seconds of nanoGPT under autocast over the recipe's.
"""

import json
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from absl import flags

from attnlab import config as configs
from attnlab import experiments
from attnlab.config import RunConfig
from attnlab.data import corpora, tokenizers
from attnlab.support.errors import UserError

from .harness import options, tables, workers

PEERS = {  # by name: whether it computes in bfloat16, the suffix of its ratios' names, and their column
    "nanoGPT compiled": (False, "", "× nanoGPT float32"),
    "nanoGPT autocast compiled": (True, "_over_autocast", "× nanoGPT autocast"),
}
COUNTS = {
    "steps": (2000, "steps of nanoGPT"),
    "rounds": (10, "blocks of each contender"),
}


class Runner(NamedTuple):
    """A contender's part in the race.

    Attributes:
      options: arguments of its process, see `workers.started`.
      steps: training steps.
      tokens: tokens per step.
    """

    options: dict
    steps: int
    tokens: int


def define(values, argv) -> None:
    """Define the flags."""
    options.define_peer(values)
    flags.DEFINE_list(
        "recipes", ["speedrun:fast", "speedrun:budget"], "configs, by name or file[:variant]", flag_values=values
    )
    flags.DEFINE_string("path", "", "a text file; by default the quickstart's text", flag_values=values)
    options.define_common(values, COUNTS)


def main(values) -> int:
    """Race, and print the table."""
    options.check_common(values, COUNTS)
    options.check_peer(values)
    runners = {name: _peer(values.steps, peer[0]) for name, peer in PEERS.items()} if values.peer_path else {}
    runners |= {name: _ours(name, load_recipe(name)) for name in values.recipes}
    for name, runner in runners.items():
        if runner.steps <= values.rounds:
            raise UserError(f"{name} has {runner.steps} steps: expected --rounds below that, not {values.rounds}")
    text = corpora.read_text("text" if values.path else "python_docs", path=values.path)
    figures = race(runners, text, values.rounds, (values.peer_path, values.peer_python))
    _print(figures, runners, values.path or "the quickstart's text")
    name = Path(values.path).name if values.path else "the quickstart's text"
    options.keep_cases(values, "loss", {f"{name}, {values.steps} steps of nanoGPT": figures})
    return 0


def load_recipe(name: str) -> RunConfig:
    """The config of an experiment, given by name or file, with its variant.

    Raises:
      UserError: there is none, or it cannot be loaded.

    >>> load_recipe("quickstart").model.width
    128
    """
    try:
        return experiments.load(name)
    except UserError as error:
        raise UserError(f"--recipes={name} cannot be loaded: {error}") from error


def _peer(steps: int, bfloat16: bool) -> Runner:
    size = workers.SIZES["small"]
    schedule = {"warmup": min(100, steps // 2), "steps": steps, "last": 1e-4}
    options = {"peer": True, "compiled": True, "bfloat16": bfloat16, "schedule": schedule}
    return Runner(options, steps, size["batch_size"] * size["context"])


def _ours(name: str, config: RunConfig) -> Runner:
    if config.data.packing != "stream" or config.parallel.strategy != "mesh":
        raise UserError(f"--recipes={name}: the race needs data.packing='stream' and parallel.strategy='mesh'")
    recipe = json.loads(configs.to_json(config))
    return Runner({"peer": False, "recipe": recipe}, config.steps, config.batch_size * config.model.context)


def race(runners: dict[str, Runner], text: corpora.Strings, rounds: int, peer: tuple[str | None, str | None]) -> dict:
    """Train all contenders to their end, in turn; returns the figures."""
    tokenizer = tokenizers.make("char", text.train + text.validation)
    contenders = {name: runner.options for name, runner in runners.items()}
    data = {"tokens": tokenizer.encode(text.train), "vocab_size": tokenizer.vocab_size}
    with (
        tempfile.TemporaryDirectory(prefix="attnlab-loss-") as folder,
        workers.started(contenders, "loss", workers.SIZES["small"], *peer, **data) as running,
    ):
        held_out = Path(folder) / "validation.npy"
        np.save(held_out, tokenizer.encode(text.validation))
        seconds = _train(running, runners, rounds)
        results = {name: worker.ask("evaluate", tokens=str(held_out)) for name, worker in running.items()}
    figures = {}
    for name, runner in runners.items():
        figures[f"loss_{name}"], figures[f"parameters_{name}"] = results[name]["loss"], results[name]["parameters"]
        figures[f"seconds_{name}"], figures[f"tokens_{name}"] = seconds[name], runner.steps * runner.tokens
        for peer, (_, suffix, _) in PEERS.items():
            if peer in runners and name not in PEERS and results[name]["loss"] <= results[peer]["loss"]:
                figures[f"ratio_{name}{suffix}"] = seconds[peer] / seconds[name]
    return figures


def _train(running: dict[str, workers.Worker], runners: dict[str, Runner], rounds: int) -> dict[str, float]:
    """Training seconds of each contender, from its second step on, in `rounds` alternating blocks: A B C A B C …"""
    for worker in running.values():
        worker.ask("train", steps=1)
    seconds = dict.fromkeys(running, 0.0)
    for done in tables.rounds("loss", rounds):
        for name, worker in running.items():
            first, last = ((runners[name].steps - 1) * part // rounds for part in (done, done + 1))
            seconds[name] += worker.ask("train", steps=last - first)["seconds"]
    return seconds


def _print(figures: dict, runners: dict[str, Runner], text: str) -> None:
    rows = {}
    for name, runner in runners.items():
        rows[name] = {
            "loss": f"{figures[f'loss_{name}']:.4f}",
            "parameters": f"{figures[f'parameters_{name}']:,}",
            "tokens": f"{runner.steps * runner.tokens:,}",
            "seconds": f"{figures[f'seconds_{name}']:.1f}",
        }
        for peer, (_, suffix, column) in PEERS.items():
            if peer in runners:
                ratio = figures.get(f"ratio_{name}{suffix}")
                rows[name][column] = "" if name in PEERS else f"{ratio:.2f}" if ratio else "loss not reached"
    tables.table("training to a loss", rows, caption=f"{text}; nats per character on its validation part")
