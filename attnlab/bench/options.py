"""The flags that races share, and what flags must satisfy: told in one line, before anything runs."""

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path

from absl import flags

from attnlab.config import nearest
from attnlab.errors import UserError


def define_peer(values) -> None:
    """Where nanoGPT is."""
    flags.DEFINE_string("peer_path", None, "a checkout of nanoGPT; without it attnlab runs alone", flag_values=values)
    flags.DEFINE_string("peer_python", "python3", "a Python that has torch", flag_values=values)


def define_json(values) -> None:
    """Where the figures go."""
    flags.DEFINE_string("json", None, "a new file for the figures", flag_values=values)


def check_peer(values) -> None:
    """Raises UserError when --peer_path holds no nanoGPT, or --peer_python has no torch."""
    if values.peer_path is None:
        return
    if not (Path(values.peer_path) / "model.py").is_file():
        raise UserError(f"--peer_path={values.peer_path} holds no model.py: name a checkout of nanoGPT")
    find = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    try:
        found = subprocess.run([values.peer_python, "-c", find], capture_output=True).returncode == 0
    except OSError as error:
        raise UserError(f"--peer_python={values.peer_python} cannot be started ({error.strerror})") from error
    if not found:
        raise UserError(f"--peer_python={values.peer_python} has no torch: name a Python where it is installed")


def check_positive(values, *names: str) -> None:
    """Raises UserError when one of these flags is less than 1."""
    for name in names:
        if values[name].value < 1:
            raise UserError(f"--{name}={values[name].value}: expected 1 or more")


def check_known(flag: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raises UserError when a list has nothing in it, or what is not known."""
    if not given:
        raise UserError(f"--{flag} is empty: use {', '.join(known)}")
    for name in given:
        if name not in known:
            raise UserError(f"--{flag}: {name!r} is unknown{nearest(name, known)}: use {', '.join(known)}")


def check_new(values, *names: str, what: str = "file") -> None:
    """Raises UserError when a path that one of these flags names is there already, or cannot be."""
    for name in names:
        path = values[name].value and Path(values[name].value)
        if path and (path.exists() or not path.parent.is_dir()):
            why = "is there already" if path.exists() else "lies in no folder"
            raise UserError(f"--{name}={path} {why}: name a new {what}")


def keep(path: str | None, figures: dict) -> None:
    """Writes the figures into a new file, if one is named."""
    if path:
        with open(path, "x", encoding="utf-8") as file:
            file.write(json.dumps(figures, indent=1) + "\n")
