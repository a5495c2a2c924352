"""The runs of a grid: one for every combination of its values, checked before any starts.

A grid is a sequence of axes. An axis is one field and its values, "config.seed=0,1", or several fields whose values
vary together, "config.model.width=64,128 config.model.num_heads=2,4".
"""

import csv
import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from absl import flags

from attnlab import commands
from attnlab import config as configs
from attnlab.config import RunConfig
from attnlab.support.errors import UserError

LONGEST = 120  # characters of a run's name, which names its folder as well


class Point(NamedTuple):
    """One run of a grid."""

    name: str  # its values, "learning_rate=0.001,seed=0", as the name of a folder
    values: dict  # by field, without "config."
    options: list[str]  # of `attnlab train`
    config: RunConfig


def points(grid: Sequence[str], options: Sequence[str]) -> list[Point]:
    """The runs of a grid, with options that all share, in the order of its values, the last field varying fastest."""
    axes = list(map(_axis, grid))
    names = [field for axis in axes for field, _ in axis]
    if len(set(names)) < len(names):
        raise UserError(f"--grid names config.{max(names, key=names.count)} twice: give all its values at once")
    config_of(options)  # raises errors that are not of the grid
    found = {}
    for combination in itertools.product(*(zip(*(texts for _, texts in axis)) for axis in axes)):
        point = _point(dict(zip(names, itertools.chain(*combination))), options)
        if point.name in found:
            raise UserError(f"--grid names {point.name} twice: give each value once")
        found[point.name] = point
    folders = [point.config.checkpoint.dir for point in found.values() if point.config.checkpoint.dir]
    if len(folders) > len(set(folders)):
        raise UserError(f"config.checkpoint.dir = {folders[0]}: runs cannot share it: leave it out")
    return list(found.values())


def _axis(text: str) -> list[tuple[str, list[str]]]:
    """The fields of an axis, each with the texts of its values."""
    known = "|".join(map(re.escape, configs.declared()))
    # Quoted values come first, because what they hold begins no field.
    begins = re.compile(rf'"[^"]*"|(\s+)(?=config\.[\w.]+=|(?:{known})=)')
    axis = [_field(part) for part in begins.sub(lambda found: "\n" if found[1] else found[0], text).split("\n")]
    first, texts = axis[0]
    for field, others in axis:
        if len(others) != len(texts):
            raise UserError(
                f"--grid={text}: values of config.{first}: {len(texts)}, of config.{field}: {len(others)}: fields in "
                "one --grid vary together and need as many values each"
            )
    return axis


def _field(text: str) -> tuple[str, list[str]]:
    """The field of "config.FIELD=VALUE,VALUE" and the texts of its values."""
    name, equals, values = text.partition("=")
    field = name.removeprefix("config.")
    if why := configs.unknown(field):
        raise UserError(f"--grid={text}: {why}")
    if not equals:
        raise UserError(f"--grid={text} has no values: write --grid config.{field}=VALUE,VALUE")
    return field, next(csv.reader([values], skipinitialspace=True)) or [""]


def config_of(options: Sequence[str]) -> RunConfig:
    """The config of some options of `attnlab train`."""
    argv, values = ["attnlab train", *options], flags.FlagValues()
    commands.define_import(values, argv)
    commands.define_config(values, argv)
    commands.parse(values, argv)
    config, _ = commands.config_of(values)
    config = configs.completed(config)
    config.check_effects()
    return config


def _point(texts: Mapping[str, str], options: Sequence[str]) -> Point:
    options = [*options, *(f"--config.{field}={text}" for field, text in texts.items())]
    try:
        config = config_of(options)
    except UserError as error:
        raise UserError(f"--grid: {error}") from error
    values = {field: config.fields[field] for field in texts}
    return Point(name_of(values), values, options, config)


def name_of(values: dict) -> str:
    """A name for a run, "learning_rate=0.001,seed=0", which no other run has, and which can name a folder."""
    last = [field.rpartition(".")[2] for field in values]
    short = (name if last.count(name) == 1 else field for field, name in zip(values, last))
    return folder_name(",".join(f"{name}={value}" for name, value in zip(short, values.values())))


def folder_name(name: str) -> str:
    """A name that can name a folder, and that no other name becomes."""
    safe = re.sub(r"[^\w.+=,-]+", "_", name)
    if safe == name and len(name) <= LONGEST:
        return name
    return f"{safe[:LONGEST]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
