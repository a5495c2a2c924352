"""The runs of a comparison: learning rates are chosen on one half of the held-out text, losses come from the other."""

import hashlib
import math
from collections.abc import Mapping, Sequence
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

FACTORS = (1 / 9, 1 / 3, 1.0, 3.0)  # of the config's learning rate, where the user names none


class Protocol(NamedTuple):
    """The config, learning rates and seeds common to all variants."""

    config: RunConfig
    rates: tuple[float, ...]  # learning rates, ascending
    tuning_seeds: tuple[int, ...]  # on which the rate is chosen
    seeds: tuple[int, ...]  # fresh seeds, whose results are compared
    measure: str = "loss"  # that is compared; "accuracy" for a task

    def tuning(self, variant: Variant) -> list[Point]:
        """The runs that choose a variant's learning rate, on the first half of the held-out text."""
        if len(self.rates) == 1:
            return []
        return [self._point(variant, rate, seed, "first") for rate in self.rates for seed in self.tuning_seeds]

    def final(self, variant: Variant, rate: float) -> list[Point]:
        """The runs whose losses are compared, on the second half."""
        return [self._point(variant, rate, seed, "second") for seed in self.seeds]

    def _point(self, variant: Variant, rate: float, seed: int, part: str) -> Point:
        config = variant.config(self.config)
        changes = {"optimizer.learning_rate": rate, "seed": seed, "eval.part": part}
        if config.optimizer.name == "muon":  # whose two rates keep their ratio
            scaled = config.optimizer.muon_learning_rate * rate
            changes["optimizer.muon_learning_rate"] = scaled / config.optimizer.learning_rate
        config, values = config.changed(changes), {"variant": variant.name, "learning_rate": rate, "seed": seed}
        code = overrides.version(config)
        name = grid.name_of(values | ({"code": code} if code else {}))  # beside the runs of a file before it was edited
        return Point(name, {"seed": seed, "learning_rate": rate}, config)


def has_ended(point: Point, folder: Path) -> bool:
    """Whether a run is finished, or diverged; UserError for a run with another config, diverged or not."""
    if (folder / point.name / "config.json").exists():
        saved, steps = read_config(folder / point.name), point.config.steps
        if saved["steps"] != steps:  # runs that go on would be compared with runs of one schedule
            raise UserError(f"{folder} has runs of {saved['steps']} steps, and now {steps}: choose a new --workdir")
        if saved["eval"]["part"] != point.config.eval.part:
            raise UserError(f"{folder} has runs of another number of tuning seeds: choose a new --workdir")
    return train.is_finished(point.config, folder / point.name) or diverged(folder / point.name)


def diverged(workdir: Path) -> bool:
    """Whether a run ended at a loss or gradient that is not finite."""
    records = metrics.read(workdir / "metrics.jsonl")
    return bool(records) and records[-1]["split"] == "diverged"


def digest(workdirs: Sequence[Path]) -> str:
    """A digest of the configs and the parameters of finished runs, which names their measurements."""
    records = (metrics.read(workdir / "metrics.jsonl")[-1] for workdir in workdirs)
    runs = [(read_config(workdir), record["params_sha256"]) for workdir, record in zip(workdirs, records)]
    return hashlib.sha256(repr(runs).encode()).hexdigest()[:12]


def result(workdir: Path, measure: str = "loss") -> float:
    """A run's loss or accuracy on its half of the held-out data; chance level if it diverged, NaN if unfinished."""
    if diverged(workdir):  # leaving the run out would reward the variant
        config = read_config(workdir)
        return math.log(config["vocab_size"]) if measure == "loss" else named.parse(config["data"]["name"]).chance
    final = [record[measure] for record in metrics.read(workdir / "metrics.jsonl") if record["split"] == "final"]
    return float(final[-1]) if final else math.nan


def resolution(config: RunConfig, measure: str) -> float:
    """The step between two results: 1/N for the accuracy of N answers, float32's for losses."""
    if measure == "loss":
        return float(np.finfo(np.float32).eps)
    sizes = {"context": config.model.context, "batch_size": config.batch_size, "windows": config.eval.windows}
    batches = HeldOutBatches(named.parse(config.data.name), part="second", **sizes)
    return 1 / sum(int(((batch.targets >= 0) & (batch.weight > 0)[:, None]).sum()) for batch in batches)


def chosen_rate(protocol: Protocol, variant: Variant, folder: Path) -> tuple[float, bool]:
    """The learning rate with the lowest mean loss over the tuning seeds, and whether it is at the grid's edge."""
    points = protocol.tuning(variant)
    if not points:
        return protocol.rates[0], False
    losses: Mapping[float, list[float]] = {}
    for point in points:
        losses.setdefault(point.values["learning_rate"], []).append(result(folder / point.name))
    means = {rate: float(np.mean(values)) for rate, values in losses.items()}
    best = min(means, key=lambda rate: (math.isnan(means[rate]), means[rate]))
    return best, best in (protocol.rates[0], protocol.rates[-1])


def curve(workdir: Path, tokens_per_second: float = math.nan) -> np.ndarray:
    """A run's validations as rows of tokens, seconds of training until then at a speed, and loss: `[n, 3]`."""
    records = metrics.read(workdir / "metrics.jsonl")
    rows = [(record["tokens"], record["loss"]) for record in records if record["split"] == "val" and record["tokens"]]
    tokens, losses = np.array(rows, np.float64).reshape(-1, 2).T
    return np.stack([tokens, tokens / tokens_per_second, losses], axis=1)
