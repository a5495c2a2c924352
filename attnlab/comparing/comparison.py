"""Compare variants of a model: train each at its best learning rate over seeds, and say which is better."""

import datetime
import functools
import inspect
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from attnlab import commands, experiments
from attnlab import config as configs
from attnlab.comparing import measuring, replication, report, table
from attnlab.comparing import protocol as protocols
from attnlab.comparing import variants as variants_
from attnlab.comparing.protocol import FACTORS, Protocol, Rate
from attnlab.comparing.replication import Published
from attnlab.comparing.report import TaskComparison
from attnlab.config import RunConfig
from attnlab.data.tasks import named
from attnlab.nn import custom, versions
from attnlab.nn.layer import LayerConfig
from attnlab.results import page, statistics
from attnlab.results.table import Table
from attnlab.support import paths, workers
from attnlab.support.errors import ArgumentError, UserError
from attnlab.support.names import nearest
from attnlab.sweeping import grid, training_runs
from attnlab.testing.layer import check_layer
from attnlab.training import text as texts
from attnlab.training.program import shared_programs
from attnlab.training.workdir import read_config

MARKER, PAGE = "comparison.json", "comparison.html"
# Distance from the first compared seed to the first tuning seed. Seed counts are at most this, so no seed serves twice.
TUNING = statistics.MOST_SEEDS
# Defaults for comparisons; sampling would compile one more program per variant.
DEFAULTS = {"sample.length": 0, "log.tensorboard": False}
# Config fields of each task; fields that the caller sets take precedence.
TASKS = {
    "text": {},
    "recall": {"data.name": "task:recall pairs=4 rewrites=8 symbols=16", "model.context": 28},
    "parity": {"data.name": "task:parity", "model.context": 40},
    "modular": {"data.name": "task:modular", "model.context": 40},
    "copy": {"data.name": "task:copy symbols=8 kinds=8", "model.context": 48},
    "induction": {"data.name": "task:induction triggers=8 kinds=16", "model.context": 48},
}


class Comparison:
    """The results of `compare`; a notebook shows the answer and the table.

    Attributes:
      rows: records of all tables, one per variant; with several tasks, each has a "task": see docs/guide/comparing.md.
      sentences: the answer, a sentence for each variant but the first.
      page: path of the full report, `comparison.html`.
      failed: errors of failed runs, by name.

    >>> Comparison({}, Path("comparison.html")).rows  # see `compare` for an example with rows
    []
    """

    def __init__(self, results: Mapping[str, "_Found"], page: Path):
        self._found, self.page = results, page
        several = len(results) > 1
        self.rows = [
            {"task": name} | row if several else row for name, result in results.items() for row in result.rows
        ]
        prefix = {name: f"{name}: " * several for name in results}
        self.sentences = [
            prefix[name] + text for name, result in results.items() for text in result.sections[0].sentences
        ]
        self.failed = {
            prefix[name] + run: error for name, result in results.items() for run, error in result.failed.items()
        }

    def verdict(self, variant: str, task: str | None = None) -> str | None:
        """The verdict on a variant, such as "better"; None for the first variant."""
        rows = {row["variant"]: row["verdict"] for row in self._part(task).rows}
        if variant not in rows:
            raise KeyError(f"{variant!r}{nearest(variant, rows)}: expected one of {', '.join(rows)}")
        return rows[variant]

    def table(self, task: str | None = None) -> str:
        """Format the main columns of a table as text."""
        return self._part(task).sections[0].table.text()

    def workdirs(self, variant: str, task: str | None = None) -> list[Path]:
        """Return the folders of a variant's runs, for `attnlab.load`."""
        return self._part(task).workdirs[variant]

    def curves(self, variant: str, task: str | None = None) -> list[np.ndarray]:
        """Each run's validations, `[n, 3]`: tokens, seconds at the race's speed (NaN without a race), and loss."""
        speeds = {row["variant"]: row["train_tokens_per_second"] for row in self._part(task).rows}
        return [protocols.curve(workdir, speeds[variant] or np.nan) for workdir in self.workdirs(variant, task)]

    def frame(self):
        """Return the rows as a pandas DataFrame; pandas must be installed."""
        import pandas

        return pandas.DataFrame(self.rows)

    def __str__(self) -> str:
        return "\n".join([*self.sentences, *map(self.table, self._found), f"page: {self.page}"])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return "".join(page.fragment(section) for result in self._found.values() for section in result.sections)

    def _part(self, task: str | None) -> "_Found":
        if task is None and len(self._found) == 1:
            return next(iter(self._found.values()))
        if task not in self._found:
            raise KeyError(f"task {task!r}: expected one of {', '.join(self._found)}")
        return self._found[task]


class _Found(NamedTuple):
    """The results of one part of a comparison, a text or a task."""

    rows: list[dict[str, Any]]
    sections: list[page.Section]
    workdirs: dict[str, list[Path]]
    failed: dict[str, str]
    about: dict[str, str]


@versions.taken_once()
@shared_programs()
def compare(
    config: str | ConfigDict | RunConfig | Sequence[str],
    variants: Mapping[str, Any],
    *,
    workdir: str | Path,
    seeds: int = 5,
    tuning_seeds: int | None = None,
    learning_rates: Sequence[float] = (),
    extensions: int = 2,
    tasks: Sequence[str] | Mapping[str, Mapping] = (),
    match: str | None = None,
    match_length: int | None = None,
    together: int | str = "auto",
    jobs: int = 0,
    check: bool = True,
) -> Comparison:
    """Train variants of a model side by side, each at its best learning rate, and say which are better than the first.

    Each run has its own folder in `workdir`. Repeating the call resumes where it stopped, and keeps finished runs.

    Args:
      config: the name of an experiment, such as "quickstart"; a `RunConfig`, or a modified `attnlab.config.default()`;
        or a list of command-line words.
      variants: definitions by name; all others are compared with the first. A definition is one of: config fields, as
        a mapping `{"model.positions": "alibi"}` or as text "model.positions=alibi"; something that all layers use (a
        layer config, a class of layers, a mask, a score mod, or a function of scores, see docs/guide/own.md); or a
        function that takes a `RunConfig` and returns another.
      workdir: the folder for the runs, a table and the page.
      seeds: number of seeds per variant, 2 to 1,000; the first seed is the config's.
      tuning_seeds: number of separate seeds that choose the learning rate; None for 3 if runs train together, else 1.
      learning_rates: rates to choose from; by default 1/9, 1/3, 1 and 3 times the config's rate.
      extensions: how many further rates a variant may try while its best rate is the lowest or highest it has tried.
      tasks: names from `TASKS`, specifications like "task:recall pairs=4", or config fields by name; one table each.
      match: the size to make equal: "parameters" or "flops" by changing the width of the feed-forward layers, or
        "state" by changing the width of the model; None to change no width.
      match_length: number of tokens at which the state is matched; None for the context.
      together: how many runs with the same compiled program are trained at once; "auto": all with a single GPU, else 1.
      jobs: number of concurrent processes; 0 trains in this process, which layers defined in a notebook need.
      check: whether to check custom layers with `attnlab.testing.check_layer` before any run.

    Raises:
      UserError: an unusable config, variant or folder, before any run.
      KeyboardInterrupt: after a signal; the state of the runs is saved.

    >>> import tempfile
    >>> small = ["--config=quickstart", "--config.model.num_layers=1", "--config.model.width=16", "--config.steps=4"]
    >>> small += ["--config.eval.windows=4", "--config.eval.every=2", "--config.parallel.mesh.data=1"]
    >>> from attnlab.masks import SlidingWindow
    >>> kinds = {"softmax": {}, "near": SlidingWindow(left=4)}
    >>> options = {"workdir": tempfile.mkdtemp(), "seeds": 2, "learning_rates": [1e-2]}
    >>> result = compare(small, kinds, **options)  # doctest: +ELLIPSIS
    near: causal; ...
    >>> [(row["variant"], row["seeds"]) for row in result.rows], isinstance(result.verdict("near"), str)
    ([('softmax', 2), ('near', 2)], True)
    """
    if not isinstance(check, bool):
        raise ArgumentError("check", check, "expected True or False")
    options = training_runs.checked(jobs, together)
    arguments = {"tuning_seeds": tuning_seeds, "learning_rates": learning_rates, "extensions": extensions}
    arguments |= {"tasks": tasks, "match": match, "match_length": match_length}
    base, fields = _given(config)
    first = config if isinstance(config, str) else configs.words(base, RunConfig())
    command = functools.partial(_call, first, variants, str(workdir), dict(arguments))
    if tuning_seeds is None:
        arguments["tuning_seeds"] = default_tuning_seeds(together, jobs)
    arguments["match"] = match or "none"
    comparisons = parts(base, fields, variants, Path(workdir), seeds=seeds, **arguments)
    return run(comparisons, Path(workdir), check=check, command=command, **options)


def _call(config, variants: Mapping[str, Any], workdir: str, arguments: Mapping[str, Any], seeds: int) -> str:
    """Format as text the call of `compare` with this number of seeds."""
    usual = inspect.signature(compare).parameters
    chosen = "".join(f", {name}={x!r}" for name, x in arguments.items() if repr(x) != repr(usual[name].default))
    return f"attnlab.comparing.compare({config!r}, {dict(variants)!r}, workdir={workdir!r}, seeds={seeds}{chosen})"


def default_tuning_seeds(together: int | str, jobs: int) -> int:
    """Return 3 if several runs are trained as one program, because they cost little more than one run; else 1."""
    return 3 if training_runs.go_together(together, jobs) else 1


def run(
    comparisons: Sequence[TaskComparison],
    folder: Path,
    *,
    check: bool,
    together: str,
    jobs: int,
    command: Callable[[int], str],
) -> Comparison:
    """Train, measure and report the parts of a comparison, in `jobs` concurrent processes, or in this one if 0.

    With `check`, custom layers are checked first. `command(n)` returns the command for n seeds.
    """
    first = comparisons[0]
    base = first.protocol.config
    content = {"variants": {variant.name: configs.words(variant.config(base), base) for variant in first.variants}}
    content |= {"options": configs.words(base, RunConfig()), "tasks": [each.name for each in comparisons if each.name]}
    total = sum(len(_tuning(each)) + len(each.variants) * len(each.protocol.seeds) for each in comparisons)
    try:
        with training_runs.claimed(folder, MARKER, content) as lock:
            if check:
                check_layers(comparisons)
            runner = training_runs.Runner(total, jobs, together, lock)
            results = {each.name: _compare(each, runner, command) for each in comparisons}
            names = [variant.name for variant in first.variants]
            about = results[first.name].about | {"command": command(len(first.protocol.seeds))}
            sections = [section for result in results.values() for section in result.sections]
            title = f"{', '.join(names[1:])} against {names[0]}"
            return Comparison(results, page.write(folder / PAGE, title, about, sections))
    except workers.Interrupted as stopped:
        raise KeyboardInterrupt(*stopped.args) from None


def _given(config) -> tuple[RunConfig, set[str]]:
    """Return the config from `compare`'s argument, and the fields that the caller set, which no task may change."""
    if isinstance(config, str):
        return experiments.load(config), set()
    if isinstance(config, list | tuple):
        return commands.from_words(config)
    if not isinstance(config, ConfigDict | RunConfig):
        raise ArgumentError("config", config, "expected the name of an experiment, a RunConfig, or a list of words")
    config, usual = configs.completed(config), RunConfig().fields
    return config, {name for name, value in config.fields.items() if name in usual and value != usual[name]}


def parts(
    config: RunConfig,
    chosen: Set[str],
    variants: Mapping[str, Any],
    folder: Path,
    *,
    seeds: int,
    tuning_seeds: int,
    learning_rates: Sequence[float],
    extensions: int,
    tasks: Sequence[str] | Mapping[str, Mapping],
    match: str,
    match_length: int | None,
    known_tasks: Mapping[str, Mapping] = {},
    published: Mapping[str, Published] = {},
) -> list[TaskComparison]:
    """Build and check all parts before any run; arguments as for `compare`. Tasks do not change fields in `chosen`."""
    named_variants = variants_.of_values(variants)
    config.check_effects()
    numbers = {"seeds": (seeds, 2), "tuning_seeds": (tuning_seeds, 1), "extensions": (extensions, 0)}
    for name, (value, least) in numbers.items():
        if not isinstance(value, int) or not least <= value <= TUNING:
            raise ArgumentError(name, value, f"expected {least} to {TUNING}")
    if isinstance(tasks, str):
        raise ArgumentError("tasks", tasks, "expected a list of names")
    if tasks and "data.name" in chosen:
        raise ArgumentError("tasks", [*tasks], "cannot be combined with config.data.name: remove one")
    if config.checkpoint.dir:
        raise UserError(f"config.checkpoint.dir = {config.checkpoint.dir}: runs cannot share it: remove it")
    if config.eval.patience:
        raise UserError(f"config.eval.patience = {config.eval.patience}: compared runs are equally long: remove it")
    if match not in table.COSTS:
        raise ArgumentError("match", match, f"expected one of {', '.join(variants_.SIZES)}, or None")
    if match_length is not None and match != "state":
        raise ArgumentError("match_length", match_length, "it has no effect without match = state: remove it")
    config = config.changed({name: value for name, value in DEFAULTS.items() if name not in chosen})
    rates = [float(rate) for rate in learning_rates] or [
        float(f"{factor * config.optimizer.learning_rate:.2g}") for factor in FACTORS
    ]
    if len(set(rates)) < len(rates) or min(rates) <= 0:
        raise ArgumentError("learning_rates", rates, "expected different numbers above 0")
    first = config.seed + TUNING
    seeds_of = {"tuning_seeds": tuple(range(first, first + tuning_seeds))}
    seeds_of |= {"seeds": tuple(range(config.seed, config.seed + seeds))}
    comparisons = []
    for name, fields in _tasks(tasks or list(published), known_tasks).items():
        task_config = config.changed({field: value for field, value in fields.items() if field not in chosen})
        measure = "accuracy" if named.parse(task_config.data.name) else "loss"
        protocol = Protocol(task_config, tuple(sorted(rates)), **seeds_of, measure=measure, extensions=extensions)
        where = folder / grid.folder_name(name) if name else folder
        comparison = TaskComparison(name, where, protocol, named_variants, match, published.get(name))
        if match != "none":
            matched = variants_.matched(named_variants, task_config, vocab_size(comparison), match, match_length)
            comparison = comparison._replace(variants=matched)
        for variant in comparison.variants:
            protocol.final(variant, protocol.rates[0])  # raises if its config is invalid
        comparisons.append(comparison)
    return comparisons


def _tasks(tasks, known: Mapping) -> dict[str, dict[str, Any]]:
    """Return the fields of each task by name; without tasks {"": {}}, for the config's text or task."""
    known, task_fields = TASKS | dict(known) | (dict(tasks) if isinstance(tasks, Mapping) else {}), {}
    if len(set(tasks)) < len(tasks):
        raise ArgumentError("tasks", tasks, "name each once")
    for name in tasks:
        fields = {"data.name": name} if name.startswith(named.PREFIX) else known.get(name)
        if fields is None:
            raise ArgumentError(
                "tasks", name, f"no such task{nearest(name, known)}: expected some of {', '.join(known)}"
            )
        try:
            task_fields[name] = variants_.fields_of(fields)
        except UserError as error:
            raise UserError(f"task {name!r}: {error}") from error
    return task_fields or {"": {}}


def vocab_size(comparison: TaskComparison) -> int:
    """Vocabulary size of a part's text or task."""
    with tempfile.TemporaryDirectory() as nowhere:
        text = texts.load(comparison.config_of(comparison.variants[0]), texts.Workdir(Path(nowhere) / "new"))
        return text.tokenizer.vocab_size


def check_layers(comparisons: Sequence[TaskComparison]) -> None:
    """Raise UserError for the first failed check of a layer with user-defined code, mask or score mod."""
    to_check = []
    for comparison in comparisons:
        for variant in comparison.variants:
            model = comparison.config_of(variant).changed({"precision": "float32", "model.dropout": 0.0}).model
            for layer in (layer for layer in model.used if layer not in [each for _, each, _ in to_check]):
                if custom.is_custom(layer.kind) or _has_parts(layer):
                    to_check.append((variant.name, layer, model))
    for name, layer, model in to_check:
        called = layer.kind if custom.is_custom(layer.kind) else name
        if faults := check_layer(layer.make(model), model.width):
            remedy = "fix it, or skip this check with --check=off, in Python check=False"
            raise UserError(f"{called}: {faults[0]}: {remedy}")
        print(f"{called}: causal; the same in pieces, padded, stacked, and packed if it can be packed")


def _has_parts(layer: LayerConfig) -> bool:
    return any(getattr(layer, part, None) is not None for part in ("mask", "score_mod"))


def _tuning(comparison: TaskComparison) -> list:
    return [point for variant in comparison.variants for point in comparison.protocol.tuning(variant)]


def _compare(comparison: TaskComparison, runner: training_runs.Runner, command: Callable[[int], str]) -> _Found:
    """Train, measure and report a part."""
    folder, protocol, variants = comparison.folder, comparison.protocol, comparison.variants
    if comparison.name:
        print(f"--- {comparison.name}")
        folder.mkdir(exist_ok=True)
    rates, failed = _tune(comparison, runner)
    final = {variant.name: protocol.final(variant, rates[variant.name].chosen) for variant in variants}
    failed |= _train([point for points in final.values() for point in points], folder, runner)
    finished = _finished(final, folder, failed)
    _check_precision(final, folder)
    trained = [points[0].config for points in final.values()]
    measured, raced = measuring.measure(finished, folder, runner, trained)
    speeds = {name: raced.speeds[runs[0].name] for name, runs in finished.items()} if raced else {}
    results = table.results(protocol, variants, folder, rates, measured, speeds)
    whole = Table.of(table.columns(protocol.measure, len(protocol.seeds), len(variants)), results)
    section = report.section(comparison, whole, final, measured, raced, command)
    paths.write_csv(folder / table.TABLE, whole.rows)
    paths.write_text(folder / table.TEXT, whole.shown().markdown(section.sentences, section.notes))
    print("\n".join([*section.sentences, "", str(section.table), "", *report.remarks(comparison, whole.rows)]))
    if section.command:
        print(f"To decide, add seeds: {section.command}")
    print(f"All columns are in {folder / table.TABLE}, and notes on how to read the table in {table.TEXT}.")
    sections = [section, *_replicate(comparison, final, measured)]
    workdirs = {name: [folder / point.name for point in points] for name, points in final.items()}
    return _Found(whole.rows, sections, workdirs, failed, _about(comparison, final, measured))


def _tune(comparison: TaskComparison, runner: training_runs.Runner) -> tuple[dict[str, Rate], dict[str, str]]:
    """Tune each variant's learning rate, extending the rates at an edge; also return the errors of failed runs."""
    protocol, folder = comparison.protocol, comparison.folder
    tried, rates, failed, ended = dict.fromkeys(comparison.variants, protocol.rates), {}, {}, set()
    for extension in range(protocol.extensions + 1):
        points = [point for variant, tried_rates in tried.items() for point in protocol.tuning(variant, tried_rates)]
        new = [point for point in points if point.name not in ended]
        runner.expect(len(new) if extension else 0)
        failed |= _train(new, folder, runner)
        ended |= {point.name for point in new}
        rates |= {
            variant.name: protocols.chosen_rate(protocol, variant, tried_rates, folder)
            for variant, tried_rates in tried.items()
        }
        tried = {variant: rates[variant.name].extended() for variant in tried if rates[variant.name].at_edge}
    return rates, failed


def _replicate(comparison: TaskComparison, final, measured) -> list[page.Section]:
    """Compare a part's results with the published ones; return no section if there are none."""
    if comparison.published is None:
        return []
    results, step = replication.results(comparison.published, comparison.protocol, comparison.folder, final, measured)
    config = final[comparison.variants[0].name][0].config
    task = named.parse(config.data.name)
    chance = task.blind(config.model.context) if task else math.log(vocab_size(comparison))
    section = replication.section(comparison, replication.subjects(comparison.published, results, chance, step), config)
    print("\n".join(["", str(section.table), "", *section.notes]))
    return [section]


def _check_precision(final, folder: Path) -> None:
    """Raise UserError if "auto" was bfloat16 for some runs and float32 for others, as on another machine."""
    workdirs = [
        folder / point.name for points in final.values() for point in points if point.config.precision == "auto"
    ]
    kinds = {read_config(workdir)["precision"] for workdir in workdirs if (workdir / "config.json").exists()}
    if len(kinds) > 1:
        raise UserError(f"{folder} has runs in {' and '.join(sorted(kinds))}: set config.precision in a new --workdir")


def _train(points, folder: Path, runner: training_runs.Runner) -> dict[str, str]:
    ended = {point.name for point in points if protocols.has_ended(point, folder)}
    training_runs.check_texts(points, ended, folder)
    failed = runner.train(points, ended, folder)
    return {name: error for name, error in failed.items() if not protocols.diverged(folder / name)}


def _finished(final, folder: Path, failed: Mapping[str, str]) -> dict[str, list[Path]]:
    """Return the folders of the finished runs of each variant that has any."""
    finished = {}
    for name, points in final.items():
        workdirs = [folder / point.name for point in points if point.name not in failed]
        finished[name] = [workdir for workdir in workdirs if not protocols.diverged(workdir)]
    return {name: workdirs for name, workdirs in finished.items() if workdirs}


def _about(comparison: TaskComparison, final, measured: Mapping[str, Mapping]) -> dict[str, str]:
    """Describe how the results were obtained: texts by name, such as "training" or "machine"."""
    (first, *_), *_ = final.values()
    config, model, workdir = first.config, first.config.model, comparison.folder / first.name
    saved = read_config(workdir) if (workdir / "config.json").exists() else {}
    tokens = config.batch_size * config.model.context
    about = {
        "date": f"{datetime.date.today():%-d %B %Y}",
        "training": f"{config.steps:,} steps of {tokens:,} tokens: {config.steps * tokens:,} a run, "
        f"{len(comparison.protocol.seeds)} seeds, learning rates "
        f"{', '.join(f'{rate:g}' for rate in comparison.protocol.rates)}",
    }
    if saved:
        name, digest, size = (saved["corpus"][key] for key in ("name", "sha256", "characters"))
        about["text"] = f"{name}, {size:,} characters, sha256 {digest}" if size else name
        about["model"] = f"layers {model.num_layers}, heads {model.num_heads}, width {model.width}, context "
        about["model"] += f"{model.context}; of {comparison.variants[0].name} {saved['parameters']:,} parameters"
    for measurements in measured.values():
        versions = ", ".join(f"{name} {version}" for name, version in measurements["versions"].items())
        about |= {
            "machine": measurements["machine"],
            "versions": versions,
            "sources": f"sha256 {measurements['sources']}",
        }
    return about
