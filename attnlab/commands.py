"""What the commands share: flags, and mistakes that end in one line and exit code 2."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from absl import flags, logging
from ml_collections import ConfigDict, config_flags

from attnlab.config import default, fields, nearest
from attnlab.errors import UserError


def run(define: Callable, main: Callable[[flags.FlagValues], int], usage: str, argv: list[str] | None = None) -> int:
    """Parses a command line and calls `main`.

    Args:
      define: defines the command's flags, `define(values, argv)`.
      main: gets the parsed flags, returns the exit code.
      usage: what --help prints above the flags.
      argv: the command line, program name first; `sys.argv` when None.

    Returns:
      main's exit code, 0 for --help, 2 for a mistake of the user, 130 when interrupted.
    """
    argv = list(sys.argv if argv is None else argv)
    logging.set_verbosity(logging.FATAL)  # Orbax and TFDS tell a great deal, and raise what they log as an error
    values = flags.FlagValues()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character must not end a run
    try:
        define(values, argv)
    except flags.Error as error:  # an unreadable --flagfile
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    if {"--help", "-h", "-help", "--helpfull", "--helpshort"} & set(argv[1:]):
        _print_help(values, usage)
        return 0
    try:
        parse(values, argv)
        return main(values)
    except UserError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(
            "error: out of memory: lower config.batch_size, raise config.optimizer.accumulation, or choose a smaller "
            f"model ({one_line(error)})",
            file=sys.stderr,
        )
        return 2
    except BrokenPipeError:  # the reader of a pipe left, as `head` does
        with contextlib.suppress(OSError):
            sys.stdout.close()
        return 141
    except OSError as error:  # a full disk, a folder that may not be written
        print(f"error: {error.strerror or one_line(error)}: {error.filename or 'no file is named'}", file=sys.stderr)
        return 2


def define_config(values: flags.FlagValues, argv: list[str]) -> None:
    """Defines `--config=FILE[:VARIANT]` and `--config.FIELD=VALUE`."""
    config_flags.DEFINE_config_file(
        "config",
        None,
        "experiment, e.g. configs/quickstart.py or configs/sancho.py:tiny; --config.a.b=v changes a field",
        flag_values=values,
        sys_argv=argv,
    )


def parse(values: flags.FlagValues, argv: list[str]) -> None:
    """Parses a command line, `--config` and its overrides included.

    Raises:
      UserError: what is wrong with it, naming the nearest flag or field.
    """
    for value in _given(argv, "config"):
        _check_config_file(value.partition(":")[0])
    sys.modules.pop("config_config", None)  # else a second config in one process inherits the names of the first
    try:
        rest = values(argv)
    except flags.UnrecognizedFlagError as error:
        raise UserError(f"--{error.flagname} is no flag{nearest(error.flagname, list(values))}; see --help") from error
    except (AttributeError, KeyError) as error:
        raise UserError(_unknown_field(argv) or one_line(error)) from error
    except (flags.Error, ValueError, TypeError, OSError) as error:
        raise UserError(f"{one_line(error)}; see --help") from error
    except (Exception, SystemExit) as error:  # whatever a config file raises
        raise UserError(f"the config file failed ({type(error).__name__}: {one_line(error)})") from error
    if len(rest) > 1:
        raise UserError(f"{rest[1]!r} is not expected here: options look like --name=value; see --help")


def config_of(values: flags.FlagValues) -> tuple[ConfigDict, str]:
    """The config that the flags name, and a short name for it: 'quickstart', 'sancho-tiny'.

    Raises:
      UserError: none is named, or the file gave none.
    """
    if not values["config"].present:
        raise UserError("--config is missing: name an experiment, e.g. --config=configs/quickstart.py")
    file, _, variant = config_flags.get_config_filename(values["config"]).partition(":")
    if not isinstance(values.config, ConfigDict):
        raise UserError(f"{file}: get_config() returned {values.config!r}: return an attnlab.config.default(), changed")
    return values.config, Path(file).stem + (f"-{variant}" if variant else "")


def one_line(error: BaseException) -> str:
    """The line of a message that says what is wrong: the last, where a traceback stands above it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [repr(error)]
    if "Traceback" in str(error):
        return lines[-1].removeprefix("attnlab.errors.UserError: ")
    return " ".join(lines) if isinstance(error, UserError) else lines[0]


def _print_help(values: flags.FlagValues, usage: str) -> None:
    print(f"{usage.strip()}\n\nFlags:")
    for name in sorted(values):
        given = "" if values[name].default is None else f" (default: {values[name].default})"
        print(f"  --{name}: {values[name].help}{given}")
    if "config" in values:
        print("\nFields, and their values where the experiment says nothing (attnlab/config.py explains them):")
        for field, value in fields(default()).items():
            print(f"  --config.{field}={value}")


def _given(argv: list[str], name: str) -> Iterator[str]:
    for at, word in enumerate(argv):
        flag, equals, value = word.lstrip("-").partition("=")
        if word.startswith("-") and flag == name:
            yield value if equals else argv[at + 1] if at + 1 < len(argv) else ""


def _check_config_file(file: str) -> None:
    path = Path(file)
    try:
        if path.is_file():
            return
    except OSError as error:  # a name that no file can have
        raise UserError(f"--config={file}: {error.strerror}") from error
    there = sorted(str(other) for other in (path.parent if path.parent.is_dir() else Path("configs")).glob("*.py"))
    raise UserError(
        f"--config={file}: no such file{nearest(file, there) or (': there are ' + ', '.join(there) if there else '')}"
    )


def _unknown_field(argv: list[str]) -> str:
    known = list(fields(default()))
    groups = {name.rpartition(".")[0] for name in known}
    for word in argv[1:]:
        field = word.lstrip("-").partition("=")[0].removeprefix("config.")
        if word.lstrip("-").startswith("config.") and field not in known and field not in groups:
            close = nearest(field, known) or nearest(field.rpartition(".")[2], [k for k in known if "." not in k])
            return f"--config.{field}: the config has no such field{close or '; its fields: ' + ', '.join(known)}"
    return ""
