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
from ml_collections import ConfigDict

from attnlab import commands
from attnlab import config as configs
from attnlab.support.errors import UserError
from attnlab.support.names import nearest

LONGEST = 120  # characters of a name, which is also that of a folder


class Point(NamedTuple):
    """One run of a grid.

    Attributes:
      name: its values, "learning_rate=0.001,seed=0", as the name of a folder.
      values: by field, without "config.".
      options: the options of `attnlab train` that choose its config.
      config: that config, completed.
    """

    name: str
    values: dict
    options: list[str]
    config: ConfigDict


def points(grid: Sequence[str], options: Sequence[str]) -> list[Point]:
    """The runs of a grid, in the order of its values, the last field varying fastest.

    Args:
      grid: "config.FIELD=VALUE,VALUE" for each field, or for several with as many values each, separated by spaces; a
        value with a comma is put in double quotes.
      options: the options that all runs have, `--config=…` and `--config.FIELD=…`.

    Raises:
      UserError: no such field, a field or a run that is named twice, fields that vary together with different numbers
        of values, a value that its field or the others forbid, a folder of checkpoints that several runs would share.

    >>> runs = points(["config.seed=0,1", "config.steps=10,20"], ["--config=quickstart"])
    >>> [run.name for run in runs]
    ['seed=0,steps=10', 'seed=0,steps=20', 'seed=1,steps=10', 'seed=1,steps=20']
    >>> [run.name for run in points(["config.seed=0,1 config.steps=10,20"], ["--config=quickstart"])]
    ['seed=0,steps=10', 'seed=1,steps=20']
    """
    axes = list(map(_axis, grid))
    names = [field for axis in axes for field, _ in axis]
    if len(set(names)) < len(names):
        raise UserError(f"--grid names config.{max(names, key=names.count)} twice: give all its values at once")
    _config(options)  # whose errors are not those of the grid
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


def _axis(given: str) -> list[tuple[str, list[str]]]:
    """The fields of an axis, each with the texts of its values.

    >>> _axis("config.model.width=64,128 config.optimizer.learning_rate=1e-3,5e-4")
    [('model.width', ['64', '128']), ('optimizer.learning_rate', ['1e-3', '5e-4'])]
    >>> _axis('config.data.mixture="quijote=3, notes=1"')
    [('data.mixture', ['quijote=3, notes=1'])]
    """
    known = configs.fields(configs.default())
    # Quoted values come first, because what they hold begins no field.
    begins = re.compile(rf'"[^"]*"|(\s+)(?=config\.[\w.]+=|(?:{"|".join(map(re.escape, known))})=)')
    ends = [found.span(1) for found in begins.finditer(given) if found[1]]
    parts = [given[start:end] for (_, start), (end, _) in itertools.pairwise([(0, 0), *ends, (len(given), 0)])]
    axis = [_field(part, known) for part in parts]
    first, texts = axis[0]
    for field, others in axis:
        if len(others) != len(texts):
            raise UserError(
                f"--grid={given}: values of config.{first}: {len(texts)}, of config.{field}: {len(others)}: fields in "
                "one --grid vary together and need as many values each"
            )
    return axis


def _field(given: str, known: Mapping) -> tuple[str, list[str]]:
    """The field of "config.FIELD=VALUE,VALUE" and the texts of its values."""
    name, equals, values = given.partition("=")
    field = name.removeprefix("config.")
    if field not in known:
        raise UserError(f"--grid={given}: config.{field} is not a field{nearest(field, known)}")
    if not equals:
        raise UserError(f"--grid={given} has no values: write --grid config.{field}=VALUE,VALUE")
    return field, next(csv.reader([values], skipinitialspace=True), [""])


def _config(options: Sequence[str]) -> ConfigDict:
    argv, values = ["attnlab train", *options], flags.FlagValues()
    commands.define_config(values, argv)
    commands.parse(values, argv)
    config, _ = commands.config_of(values)
    return configs.completed(config)


def _point(texts: Mapping[str, str], options: Sequence[str]) -> Point:
    own = [f"--config.{field}={text}" for field, text in texts.items()]
    try:
        config = _config([*options, *own])
    except UserError as error:
        raise UserError(f"--grid: {error}") from error
    values = {field: configs.fields(config)[field] for field in texts}
    for field, text in texts.items():
        if text == "None" and values[field] is not None:  # a text, which would be the name of a file
            like = configs.fields(configs.default())[field]
            raise UserError(f"--grid: config.{field} = None: expected a value like {like!r}")
    return Point(name_of(values), values, [*options, *own], config)


def name_of(values: dict) -> str:
    """A name for a run, which can be that of a folder and is no other run's.

    >>> name_of({"optimizer.learning_rate": 1e-3, "seed": 0})
    'learning_rate=0.001,seed=0'
    >>> name_of({"data.path": "/my texts/a.txt"})
    'path=_my_texts_a.txt-12779807'
    """
    last = [field.rpartition(".")[2] for field in values]
    short = {field: name if last.count(name) == 1 else field for field, name in zip(values, last)}
    whole = ",".join(f"{short[field]}={value}" for field, value in values.items())
    safe = re.sub(r"[^\w.+=,-]+", "_", whole)
    if safe == whole and len(whole) <= LONGEST:
        return whole
    return f"{safe[:LONGEST]}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"
