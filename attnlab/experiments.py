"""Experiments: Python files whose function `get_config` returns a config; files in `configs/` go by a short name."""

from collections.abc import Mapping
from pathlib import Path

from ml_collections import ConfigDict

from attnlab import config as configs
from attnlab.config import RunConfig
from attnlab.nn import custom
from attnlab.support import shipped
from attnlab.support.errors import UserError
from attnlab.support.names import nearest


def files() -> dict[str, Path]:
    """The files of `configs/` by name, also in a wheel."""
    return shipped.files("configs")


def names() -> list[str]:
    """Experiments by the names that `--config` accepts; those with variants are listed once per variant."""
    variants = {name: shipped.strings(file, "VARIANTS") for name, file in files().items()}
    return [f"{name}:{value}" if value else name for name, values in variants.items() for value in values or [""]]


def find(experiment: str) -> str:
    """The path of an experiment with its variant, from its name or path.

    A path has a slash or ends in ".py", so that a file or folder in the current folder never hides a name.
    """
    name, colon, variant = experiment.partition(":")
    known = files()
    if name in known:
        return f"{known[name]}{colon}{variant}"
    if ("/" in name or name.endswith(".py")) and Path(name).is_file():
        return experiment
    here = [str(file) for file in Path(name).parent.glob("*.py")] if "/" in name else []
    close = nearest(name, [*known, *here]) or nearest(Path(name).stem, known)
    raise UserError(f"--config={name}: no such experiment or file{close}: there are {', '.join(names())}")


def load(experiment: str) -> RunConfig:
    """Load the config of an experiment, by its name or path, with its variant; UserError if the file returns no config.

    >>> load("sancho:tiny").data.name
    'quijote'
    """
    file, _, variant = find(experiment).partition(":")
    module, named = custom.run(Path(file)), f"--config={Path(file).name}{':' * bool(variant)}{variant}"
    if not hasattr(module, "get_config"):
        raise UserError(f"{named}: define a function get_config() that returns a modified attnlab.config.default()")
    try:
        config = module.get_config(*[variant] * bool(variant))
    except (Exception, SystemExit) as error:  # whatever a config file raises
        if variant and "get_config() takes 0 positional arguments" in str(error):
            raise UserError(f"{named}: the experiment has no variants, remove the part after the colon") from error
        line = next(iter(str(error).splitlines()), "")
        raise UserError(f"{named} failed ({type(error).__name__}: {line})") from error
    if not isinstance(config, ConfigDict | RunConfig):
        raise UserError(f"{named}: get_config() returned {config!r}: return a modified attnlab.config.default()")
    return configs.completed(config)


def dictionary(experiment: str, name: str) -> Mapping:
    """The dictionary `name` in the file of an experiment; {} if it has none."""
    file, *_ = find(experiment).partition(":")
    if not isinstance(value := getattr(custom.run(Path(file)), name, {}), Mapping):
        raise UserError(f"{experiment}: {name} is not a dictionary from names to fields and values")
    return value
