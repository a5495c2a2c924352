"""Flags shared by the benchmarks, and checks of their values; an error is one line, before anything runs."""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from absl import flags

from attnlab.support.errors import UserError
from attnlab.support.names import nearest
from attnlab.support.paths import named, new_file

from . import recording


def define_integers(values, table: dict[str, tuple[int | None, str]]) -> None:
    """Define integer flags, {name: (default, help)}."""
    for name, (default, meaning) in table.items():
        flags.DEFINE_integer(name, default, meaning, flag_values=values)


def define_choices(values, name: str, choices: Iterable[str], meaning: str) -> None:
    """Define a flag that lists some of `choices`; all of them by default."""
    flags.DEFINE_list(name, list(choices), f"{meaning}: any of {', '.join(choices)}", flag_values=values)


def define_common(values, counts: dict[str, tuple[int, str]], sizes: Iterable[str] = ()) -> None:
    """Define the flags of most benchmarks: integers, --json and --record, and --sizes if there are sizes to choose."""
    if sizes:
        define_choices(values, "sizes", sizes, "model sizes")
    define_integers(values, counts)
    define_json(values)
    recording.define(values)


def define_peer(values, python: str | None = "python3") -> None:
    """Define --peer_path and --peer_python, where nanoGPT is."""
    flags.DEFINE_string("peer_path", None, "a checkout of nanoGPT; by default attnlab runs alone", flag_values=values)
    meaning = "a Python with torch installed" + ("" if python else "; by default this Python")
    flags.DEFINE_string("peer_python", python, meaning, flag_values=values)


def define_json(values) -> None:
    """Define --json, the file for the figures."""
    flags.DEFINE_string("json", None, "a new file for the figures", flag_values=values)


def check_peer(values) -> None:
    """Raise UserError when --peer_path is not a checkout of nanoGPT, or --peer_python has no torch."""
    if values.peer_path is None:
        return
    if not (Path(values.peer_path) / "model.py").is_file():
        raise UserError(f"--peer_path={values.peer_path} has no model.py: give a checkout of nanoGPT")
    python = values.peer_python or sys.executable
    find = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    try:
        has_torch = subprocess.run([python, "-c", find], capture_output=True).returncode == 0
    except OSError as error:
        raise UserError(f"--peer_python={python} cannot be started: {error.strerror}") from error
    if not has_torch:
        raise UserError(f"--peer_python={python} has no torch: give a Python with torch installed")


def check_common(values, counts: Iterable[str], sizes: Iterable[str] = ()) -> None:
    """Raise UserError for a wrong value of a flag of `define_common`."""
    check_positive(values, *counts)
    if sizes:
        check_known("sizes", values.sizes, sizes)
    check_new(values, "json")
    recording.check(values)


def check_positive(values, *names: str) -> None:
    """Raise UserError when one of these flags is less than 1."""
    for name in names:
        if values[name].value < 1:
            raise UserError(f"--{name}={values[name].value}: expected 1 or more")


def check_known(flag: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise UserError when a list is empty, or has an unknown entry."""
    if not names:
        raise UserError(f"--{flag} is empty: use {', '.join(known)}")
    for name in names:
        if name not in known:
            raise UserError(f"--{flag}: {name!r} is unknown{nearest(name, known)}: use {', '.join(known)}")


def check_new(values, name: str) -> None:
    """Raise UserError when the file given by this flag exists, or its folder does not."""
    if values[name].value:
        new_file(f"--{name}", values[name].value)


def whole_numbers(values, name: str) -> list[int]:
    """The value of a list flag as integers.

    Raises:
      UserError: the list is empty, or an entry is not an integer of 1 or more.
    """
    entries = values[name].value
    if not entries or not all(n.isdecimal() and int(n) >= 1 for n in entries):
        raise UserError(f"--{name}={','.join(entries)}: expected integers of 1 or more, e.g. 64,128")
    return [int(n) for n in entries]


def keep(path: str | None, figures: dict) -> None:
    """Write the figures to a new JSON file, if a path is given."""
    if path:
        with named(path), open(path, "x", encoding="utf-8") as file:
            file.write(json.dumps(figures, indent=1) + "\n")


def keep_cases(values, benchmark: str, cases: dict[str, dict]) -> None:
    """Write the figures of all cases to --json, in one dictionary, and by case to --record."""
    keep(values.json, {name: value for figures in cases.values() for name, value in figures.items()})
    recording.add(values, benchmark, cases)
