"""The runs of a comparison: half of the held-out text is for choosing learning rates, half for comparing losses."""

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from attnlab import train
from attnlab.comparing.variants import Variant
from attnlab.config import RunConfig
from attnlab.data.tasks import named
from attnlab.data.tasks.task_batches import HeldOutBatches
from attnlab.support.errors import UserError
from attnlab.sweeping import grid
from attnlab.sweeping.grid import Point
from attnlab.training import metrics, overrides
from attnlab.training.workdir import read_config

FACTORS = (1 / 9, 1 / 3, 1.0, 3.0)  # default learning rates, in multiples of the config's


class Rate(NamedTuple):
    """The learning rate of a variant.

    Attributes:
      chosen: the rate with the lowest mean loss over the tuning seeds.
      tried: all rates that have a loss, ascending.
    """

    chosen: float
    tried: tuple[float, ...]

    @property
    def at_edge(self) -> bool:
        """Whether the chosen rate is the lowest or highest of several, so that a better one may lie beyond."""
        return len(self.tried) > 1 and self.chosen in (self.tried[0], self.tried[-1])

    def extended(self) -> tuple[float, ...]:
        """Return the tried rates and one more beyond the edge, at the ratio between the edge and its neighbour."""
        edge, neighbour = self.tried[:2] if self.chosen == self.tried[0] else self.tried[:-3:-1]
        beyond = edge * edge / neighbour
        rounded = (float(f"{beyond:.{digits}g}") for digits in range(2, 18))
        return tuple(sorted({*self.tried, next(x for x in rounded if (x < edge) == (beyond < edge) and x != edge)}))


class Protocol(NamedTuple):
    """The config, learning rates and seeds common to all variants.

    Attributes:
      config: the comparison's config.
      rates: the learning rates that each variant tries, ascending.
      tuning_seeds: seeds whose runs choose each variant's rate.
      seeds: the other seeds, whose results are compared.
      measure: "loss", or "accuracy" for a task.
      extensions: how many further rates a variant may try while its best rate is at an edge of the tried rates.
    """

    config: RunConfig
    rates: tuple[float, ...]
    tuning_seeds: tuple[int, ...]
    seeds: tuple[int, ...]
    measure: str = "loss"
    extensions: int = 0

    def tuning(self, variant: Variant, rates: Sequence[float] | None = None) -> list[Point]:
        """Return the runs that choose a variant's learning rate, on the first half of the held-out text."""
        rates = self.rates if rates is None else rates
        if len(rates) == 1:
            return []
        return [self._point(variant, rate, seed, "first") for rate in rates for seed in self.tuning_seeds]

    def final(self, variant: Variant, rate: float) -> list[Point]:
        """Return the runs whose results are compared, on the second half."""
        return [self._point(variant, rate, seed, "second") for seed in self.seeds]

    def _point(self, variant: Variant, rate: float, seed: int, part: str) -> Point:
        config = variant.config(self.config)
        changes = {"optimizer.learning_rate": rate, "seed": seed, "eval.part": part}
        if config.optimizer.name == "muon":  # its two rates keep their ratio
            scaled = config.optimizer.muon_learning_rate * rate
            changes["optimizer.muon_learning_rate"] = scaled / config.optimizer.learning_rate
        config, values = config.changed(changes), {"variant": variant.name, "learning_rate": rate, "seed": seed}
        code = overrides.version(config)
        name = grid.name_of(values | ({"code": code} if code else {}))  # edited custom code gets new folders
        return Point(name, values, config)


def has_ended(point: Point, folder: Path) -> bool:
    """Whether a run finished or diverged. Raise UserError if the run in its folder has another config."""
    if (folder / point.name / "config.json").exists():
        saved, steps = read_config(folder / point.name), point.config.steps
        if saved["steps"] != steps:  # a resumed run would have two schedules, a new run only one
            raise UserError(f"{folder} has runs of {saved['steps']} steps, not {steps}: choose a new --workdir")
    return train.is_finished(point.config, folder / point.name) or diverged(folder / point.name)


def diverged(workdir: Path) -> bool:
    """Whether a run ended with a non-finite loss or gradient."""
    records = metrics.read(workdir / "metrics.jsonl")
    return bool(records) and records[-1]["split"] == "diverged"


def digest(workdirs: Sequence[Path]) -> str:
    """Hash the configs and parameters of finished runs; the digest names the file of their measurements."""
    records = (metrics.read(workdir / "metrics.jsonl")[-1] for workdir in workdirs)
    runs = [(read_config(workdir), record["params_sha256"]) for workdir, record in zip(workdirs, records)]
    return hashlib.sha256(repr(runs).encode()).hexdigest()[:12]


def result(workdir: Path, measure: str = "loss") -> float:
    """A run's loss or accuracy on its half of the held-out data; chance level if it diverged, NaN if unfinished."""
    if diverged(workdir):  # dropping the run would reward the variant
        config = read_config(workdir)
        return math.log(config["vocab_size"]) if measure == "loss" else named.parse(config["data"]["name"]).chance
    final = [record[measure] for record in metrics.read(workdir / "metrics.jsonl") if record["split"] == "final"]
    return float(final[-1]) if final else math.nan


def resolution(config: RunConfig, measure: str) -> float:
    """The smallest step between two results: 1/N for an accuracy over N answers, float32's epsilon for losses."""
    if measure == "loss":
        return float(np.finfo(np.float32).eps)
    sizes = {"context": config.model.context, "batch_size": config.batch_size, "windows": config.eval.windows}
    batches = HeldOutBatches(named.parse(config.data.name), part="second", **sizes)
    return 1 / sum(int(((batch.targets >= 0) & (batch.weight > 0)[:, None]).sum()) for batch in batches)


def chosen_rate(protocol: Protocol, variant: Variant, rates: Sequence[float], folder: Path) -> Rate:
    """Choose the rate with the lowest mean loss over the tuning seeds; their runs must have ended."""
    if len(rates) == 1:
        return Rate(rates[0], tuple(rates))
    losses: dict[float, list[float]] = {rate: [] for rate in rates}
    for point in protocol.tuning(variant, rates):
        losses[point.values["learning_rate"]].append(result(folder / point.name))
    means = {rate: mean for rate, values in losses.items() if not math.isnan(mean := float(np.mean(values)))}
    return Rate(min(means, key=means.get, default=rates[0]), tuple(means))


def curve(workdir: Path, tokens_per_second: float = math.nan) -> np.ndarray:
    """Validations of a run, `[n, 3]`: tokens, seconds of training at `tokens_per_second`, and loss."""
    records = metrics.read(workdir / "metrics.jsonl")
    rows = [(record["tokens"], record["loss"]) for record in records if record["split"] == "val" and record["tokens"]]
    tokens, losses = np.array(rows, np.float64).reshape(-1, 2).T
    return np.stack([tokens, tokens / tokens_per_second, losses], axis=1)
