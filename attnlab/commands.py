"""Shared by all commands: flag parsing, and user errors as one line with exit code 2."""

import contextlib
import itertools
import re
import signal
import sys
import textwrap
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import flags, logging
from ml_collections import ConfigDict, config_flags

from attnlab import config as configs
from attnlab import experiments
from attnlab.config import RunConfig, declared, unknown
from attnlab.nn import custom, versions
from attnlab.nn.config import KINDS
from attnlab.support import status, workers
from attnlab.support.errors import ArgumentError, UserError
from attnlab.support.names import nearest
from attnlab.support.progress import shown

_HELP = {"--help", "-h", "-help", "--helpfull", "--helpshort"}
_NOT_BOOLEAN = re.compile(r"\('Non-boolean argument to boolean flag', .*\)")
_NO_CONFIG = "--config is missing: name an experiment, e.g. --config=quickstart, or a --workdir that holds a run"


class _OrNone(flags.ArgumentParser):
    """Accepts None and another parser's values; `attnlab.config` rejects None for fields that cannot be None."""

    def __init__(self, parser: flags.ArgumentParser):
        self._parser = parser

    def parse(self, argument):
        return None if argument == "None" else self._parser.parse(argument)

    def flag_type(self):
        return self._parser.flag_type()


_PARSERS = {int: flags.IntegerParser(), float: flags.FloatParser(), bool: flags.BooleanParser()}
for _type, _parser in _PARSERS.items():
    config_flags.register_flag_parser_for_type(_type, _OrNone(_parser))


# Python and JAX errors that the user can fix: a part of the type or message, and what to do.
_MEMORY = "out of memory: lower config.batch_size, raise config.optimizer.accumulation, or choose a smaller model"
_REMEDIES = {
    "RESOURCE_EXHAUSTED": _MEMORY,
    "MemoryError": _MEMORY,
    "Could not determine home directory": "~NAME in a path is not a user of this machine: write the path in full",
    "nable to initialize backend": "JAX finds no such device: unset JAX_PLATFORMS, or name an available platform",
}


def run(define: Callable, main: Callable[[flags.FlagValues], int], usage: str, argv: list[str] | None = None) -> int:
    """Parse a command line and call `main` with its flags; `define(values, argv)` defines them, --help prints `usage`.

    Returns main's exit code, 0 for --help, 2 for a user error, 130 when interrupted, 141 when the reader of standard
    output is gone.
    """
    argv = list(sys.argv if argv is None else argv)
    prepare_output()
    values = flags.FlagValues()
    try:
        try:
            argv = with_flag_files(argv)
            define(values, argv)
            if _HELP & set(argv[1:]):
                _print_help(values, usage)
                return 0
            parse(values, argv)
            with workers.lost_signals_sent_again(), versions.taken_once():
                code = main(values)
            sys.stdout.flush()  # report a full disk here, not when Python exits
            return code
        finally:
            status.clear()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # as with `attnlab … | head`
        with contextlib.suppress(OSError):
            sys.stdout.close()
        return 141
    except (UserError, flags.Error, MemoryError, RuntimeError, OSError) as error:
        if (message := explained(error)) is None:
            raise
    print(f"error: {shown(message, sys.stderr)}", file=sys.stderr)
    return 2


def explained(error: BaseException) -> str | None:
    """Explain a user's mistake in one line, with what to do; None for any other error."""
    if isinstance(error, ArgumentError):
        return error.of_flag
    if isinstance(error, UserError | flags.Error):  # flags.Error: an unreadable --flagfile
        return one_line(error)
    if isinstance(error, OSError):  # e.g. a full disk, or no permission
        return f"{error.strerror or one_line(error)}: {error.filename or _without_name()}"
    remedies = (remedy for text, remedy in _REMEDIES.items() if text in f"{type(error).__name__}: {error}")
    remedy = next(remedies, None)
    return remedy and f"{remedy} ({one_line(error)})"


def prepare_output() -> None:
    """Set up the streams, signals and warnings of a process that is a command."""
    status.open_streams()
    if signal.getsignal(signal.SIGINT) is status.end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.set_verbosity(logging.FATAL)  # Orbax and TFDS log a lot, and raise the errors that they log
    warnings.formatwarning = lambda message, *_, **__: f"warning: {one_line(message)}\n"
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a character that the terminal cannot show must not end a run


def _without_name() -> str:
    """The file to name for an OSError without one: standard output, which is then closed, if writing to it fails."""
    try:
        print(flush=True)
    except OSError:
        with contextlib.suppress(OSError):
            sys.stdout.close()
        return "standard output"
    return "unknown file"


def define_config(values: flags.FlagValues, argv: list[str], saved: RunConfig | None = None) -> None:
    """Define `--config=EXPERIMENT[:VARIANT]`, by default `saved`, and `--config.FIELD=VALUE`, which changes a field."""
    meaning = "experiment: a name, e.g. quickstart or sancho:tiny, or a Python file; --config.a.b=v changes a field"
    experiment = next(iter(given(argv, "config")), "")
    # Load the experiment first, because its layers may define new kinds; --help needs no experiment.
    base = experiments.load(experiment) if experiment and not _HELP & {*argv} else saved
    if why := _unknown_field(argv):
        raise UserError(why)
    options = {"help_string": meaning, "flag_values": values, "sys_argv": without(argv, "config")}
    config_flags.DEFINE_config_dict("config", configs.default(), **options)
    values["config"].base, values["config"].experiment = base, experiment


def define_import(values: flags.FlagValues, argv: list[str]) -> None:
    """Define `--import=FILE`, and run the files: their layers become kinds, with options in `--config.model`."""
    meaning = "Python file that defines layers, score mods or masks; config.model.layers may then name them"
    flags.DEFINE_multi_string("import", [], meaning, flag_values=values)
    for file in given(argv, "import"):
        custom.import_file(file)


def parse(values: flags.FlagValues, argv: list[str]) -> None:
    """Parse a command line, including `--config` and its overrides; UserError for its first error."""
    if (count := len(_occurrences(argv, "config"))) > 1:  # because absl would define the fields twice
        raise UserError(f"--config is given {count} times: give it once")
    try:
        rest = values(without(argv, "config") if "config" in values else argv)
    except flags.UnrecognizedFlagError as error:
        raise UserError(f"{one_line(error)} (see --help)") from error
    except (flags.Error, ValueError, TypeError) as error:
        raise UserError(f"{_NOT_BOOLEAN.sub('expected true or false', one_line(error))}; see --help") from error
    if len(rest) > 1:
        raise UserError(f"{rest[1]!r} is not expected here: options look like --name=value; see --help")
    for name in values:
        if values[name].present > 1 and "." not in name and not isinstance(values[name], flags.MultiFlag):
            raise UserError(f"--{name} is given {values[name].present} times: give it once")
        if values[name].present and values[name].value == "" and not values[name].default:
            raise UserError(f"--{name}= is empty: give a value, or remove it")
    named = {name: values[name].value for name in values if values[name].present}
    for other, kind in (("path", "text"), ("mixture", "mixture")):
        if f"config.data.{other}" in named and named.get("config.data.name", kind) != kind:
            raise UserError(f"--config.data.name has no effect with --config.data.{other}: remove one of them")


def config_of(values: flags.FlagValues) -> tuple[RunConfig, str]:
    """The config that the flags name, and its short name: 'quickstart', 'sancho-tiny', "" for an existing run."""
    base = values["config"].base
    if base is None:
        raise UserError(_NO_CONFIG)
    file, _, variant = values["config"].experiment.partition(":")
    return base.changed(changes(values)), Path(file).stem + (f"-{variant}" if variant else "")


def changes(values: flags.FlagValues) -> dict[str, Any]:
    """The fields of the config that the flags change, and their values."""
    return config_flags.get_override_values(values["config"])


def value_of(field: str, text: str) -> Any:
    """The value of `--config.FIELD=TEXT`; UserError for an unknown field, or a text that does not have its type."""
    if (each := declared().get(field)) is None:
        raise UserError(unknown(field))
    if text == "None" or str in each.types:
        return None if text == "None" and type(None) in each.types else text
    parser = next(_PARSERS[type_] for type_ in each.types if type_ in _PARSERS)
    try:
        return parser.parse(text)
    except ValueError as error:
        message = _NOT_BOOLEAN.sub("expected true or false", one_line(error))
        raise UserError(f"config.{field}={text}: {message}") from error


def from_words(words: Sequence[str]) -> tuple[RunConfig, set[str]]:
    """The config that the words of a command line define, and the fields that they change."""
    argv, values = ["attnlab", *words], flags.FlagValues()
    define_import(values, argv)
    define_config(values, argv)
    parse(values, argv)
    return config_of(values)[0], {*changes(values)}


def one_line(error: BaseException) -> str:
    """The line of an error message that names the cause: the last line if it includes a traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [repr(error)]
    if "Traceback" in str(error):
        return lines[-1].removeprefix("attnlab.support.errors.UserError: ")
    return " ".join(lines) if isinstance(error, UserError) else lines[0]


def with_flag_files(argv: list[str]) -> list[str]:
    """The command line with each `--flagfile=FILE` replaced by the words in the file."""
    try:
        return argv[:1] + flags.FlagValues().read_flags_from_files(argv[1:])
    except UnicodeDecodeError as error:
        raise UserError("--flagfile is not UTF-8: give a text file with one flag per line") from error


def given(argv: list[str], name: str) -> list[str]:
    """The values of a flag in a command line that is not parsed yet."""
    return [value for _, value in _occurrences(argv, name)]


def without(argv: list[str], name: str) -> list[str]:
    """A command line without a flag and its values."""
    left = list(argv)
    for at, _ in reversed(_occurrences(argv, name)):
        is_one = at < len(argv) and re.match(f"--?{name}=", argv[at])
        del left[at if is_one else at - 1 : at + 1]
    return left


def _occurrences(argv: list[str], name: str) -> list[tuple[int, str]]:
    """Index and value of each word that holds a value of a flag; the value is "" if the flag is the last word."""
    occurrences = []
    for at, word in enumerate(argv):
        flag, equals, value = word.lstrip("-").partition("=")
        if word.startswith("-") and flag == name:
            occurrences.append((at, value) if equals else (at + 1, argv[at + 1] if at + 1 < len(argv) else ""))
    return occurrences


def _print_help(values: flags.FlagValues, usage: str) -> None:
    print(f"{(usage or '').strip()}\n\nFlags:")
    for name in sorted(values):
        default = values[name].default
        default_value = "" if default is None or isinstance(default, ConfigDict) else f" (default: {default})"
        print(f"  --{name}: {values[name].help}{default_value}")
    if "config" in values:
        print(f"\nExperiments: {', '.join(experiments.names())}")
        print("\nConfig fields and their defaults; if a field is set twice, the last value counts:")
        for group, fields in itertools.groupby(declared().items(), lambda item: _group(item[0])):
            print(f"\n{group}")
            for field, each in fields:
                names = f" ({', '.join(each.choices)})" if each.choices else ""
                print(f"  --config.{field}={each.default}")
                print(textwrap.fill(each.doc + names, 116, initial_indent=" " * 6, subsequent_indent=" " * 6))


def _group(field: str) -> str:
    """The heading of a field's group in --help."""
    group, kind, *_ = [*field.split(".")[:-1], "", ""]
    if kind not in KINDS:
        return f"config.{group}".rstrip(".")
    about = (KINDS[kind].__doc__ or "").partition("\n")[0]
    is_written = about and not about.startswith(f"{KINDS[kind].__name__}(")  # dataclasses writes missing docstrings
    return f"config.model.{kind}: {about}" if is_written else f"config.model.{kind}"


def _unknown_field(argv: list[str]) -> str:
    """The error for the first word `--config.FIELD=…` with an unknown field; "" if all are known."""
    known = declared()
    groups = {name.rpartition(".")[0] for name in known}
    for word in argv[1:]:
        config, _, field = word.lstrip("-").partition("=")[0].partition(".")
        if word.startswith("-") and config in ("config", "noconfig") and field and field not in groups | known.keys():
            close = nearest(field, known)
            other = " needs Python: RunConfig.changed(…)" if "[" in field else f" is not a field{close}"
            return f"--{unknown(field) or f'config.{field}{other}'}"
    return ""
