"""The runs of a grid: one for every combination of its values, checked before any starts.

A grid is a sequence of axes. An axis is one field and its values, "config.seed=0,1", or several fields whose values
vary together, "config.model.width=64,128 config.model.num_heads=2,4".
"""

import csv
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from attnlab import commands
from attnlab import config as configs
from attnlab.config import RunConfig
from attnlab.nn import records
from attnlab.support.errors import ArgumentError, UserError

LONGEST = 120  # characters; a longer name of a run is cut there, and gets a digest


class Point(NamedTuple):
    """One run of a grid."""

    name: str  # of the run and its folder, from its values: "learning_rate=0.001,seed=0"
    values: dict  # by field, without "config."
    config: RunConfig


def points(grid: Sequence[str], base: RunConfig) -> list[Point]:
    """Build the runs of a grid as changes of `base`, in the order of its values; the last axis varies fastest."""
    base.check_effects()  # report errors of `base` without blaming the grid
    axes = list(map(_axis, grid))
    names = [field for axis in axes for field, _ in axis]
    if len(set(names)) < len(names):
        raise UserError(f"--grid names config.{max(names, key=names.count)} twice: give all its values at once")
    value_of, runs = functools.cache(commands.value_of), []
    for combination in itertools.product(*(zip(*(texts for _, texts in axis)) for axis in axes)):
        values = {field: value_of(field, text) for field, text in zip(names, itertools.chain(*combination))}
        try:
            config = base.changed(values)
            config.check_effects()
        except UserError as error:
            raise UserError(f"--grid: {error}") from error
        values = {field: config.fields.get(field, value) for field, value in values.items()}
        runs.append(Point(name_of(values), values, config))
    return _different(runs, "--grid")


def of_configs(runs: Sequence[RunConfig]) -> list[Point]:
    """Build runs from configs, and name each by the fields in which the configs differ."""
    if not isinstance(runs, list | tuple) or not runs:
        raise ArgumentError("configs", runs, "expected a list of at least one config")
    known, runs = configs.declared(), list(map(configs.completed, runs))

    def value(config: RunConfig, field: str):
        return config.fields.get(field, known[field].default if field in known else None)

    fields = dict.fromkeys(itertools.chain(*(config.fields for config in runs)))
    first = {field: value(runs[0], field) for field in fields}
    same = functools.partial(records.same, by_version=True)
    varying = [field for field in fields if not all(same(value(config, field), first[field]) for config in runs)]
    named_runs = []
    for config in runs:
        config.check_effects()
        values = {field: _shown(value(config, field)) for field in varying}
        named_runs.append(Point(name_of(values) or "run", values, config))
    return _different(named_runs, "configs")


def _different(runs: list[Point], where: str) -> list[Point]:
    """Return the runs unchanged; raise UserError if two of them would share a folder."""
    names = [point.name for point in runs]
    if len(set(names)) < len(names):
        raise UserError(f"{where} names {max(names, key=names.count)} twice: give each value once")
    folders = [point.config.checkpoint.dir for point in runs if point.config.checkpoint.dir]
    if len(folders) > len(set(folders)):
        raise UserError(f"config.checkpoint.dir = {folders[0]}: runs cannot share it: remove it")
    return runs


def _shown(value) -> Any:
    """A field's value as shown in names and tables: a scalar unchanged, anything else as six hex digits of a sha256."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return hashlib.sha256(json.dumps(records.of_value(value)).encode()).hexdigest()[:6]


def _axis(text: str) -> list[tuple[str, list[str]]]:
    """Parse the fields of an axis, each with the texts of its values."""
    known = "|".join(map(re.escape, configs.declared()))
    # Quoted values are matched first, so that no field begins inside them.
    begins = re.compile(rf'"[^"]*"|(\s+)(?=config\.[\w.]+=|(?:{known})=)')
    axis = [_field(part) for part in begins.sub(lambda match: "\n" if match[1] else match[0], text).split("\n")]
    first, texts = axis[0]
    for field, others in axis:
        if len(others) != len(texts):
            raise UserError(
                f"--grid={text}: {len(texts)} values of config.{first}, but {len(others)} of config.{field}: fields in "
                "one --grid vary together and need the same number of values"
            )
    return axis


def _field(text: str) -> tuple[str, list[str]]:
    """Parse "config.FIELD=VALUE,VALUE" into the field and the texts of its values."""
    name, equals, values = text.partition("=")
    field = name.removeprefix("config.")
    if why := configs.unknown(field):
        raise UserError(f"--grid={text}: {why}")
    if not equals:
        raise UserError(f"--grid={text} has no values: write --grid config.{field}=VALUE,VALUE")
    return field, next(csv.reader([values], skipinitialspace=True)) or [""]


def name_of(values: dict) -> str:
    """Return a unique name for a run that can also name a folder, such as "learning_rate=0.001,seed=0"."""
    last = [field.rpartition(".")[2] for field in values]
    short = (name if last.count(name) == 1 else field for field, name in zip(values, last))
    return folder_name(",".join(f"{name}={value}" for name, value in zip(short, values.values())))


def folder_name(name: str) -> str:
    """Convert a name to a valid folder name; different names get different folders."""
    safe = re.sub(r"[^\w.+=,-]+", "_", name)
    if safe == name and len(name) <= LONGEST:
        return name
    return f"{safe[:LONGEST]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
