"""The parts of a comparison: a text or a task each, with a table of its own."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from attnlab.comparing.protocol import Protocol
from attnlab.comparing.replication import Published
from attnlab.comparing.variants import Variant, fields_of_file, options_of
from attnlab.data.tasks import named
from attnlab.support.errors import UserError
from attnlab.support.names import nearest

# Fields of `config`, which a command line and the TASKS of a file change.
TASKS = {
    "text": {},
    "recall": {"data.name": "task:recall pairs=4 rewrites=8 symbols=16", "model.context": "28"},
    "parity": {"data.name": "task:parity", "model.context": "40"},
    "modular": {"data.name": "task:modular", "model.context": "40"},
    "copy": {"data.name": "task:copy symbols=8 kinds=8", "model.context": "48"},
    "induction": {"data.name": "task:induction triggers=8 kinds=16", "model.context": "48"},
}


class Part(NamedTuple):
    """A part.

    Attributes:
      name: "text", or of a task.
      folder: of its runs, and its table.
      protocol: its options, learning rates and seeds.
      variants: with widths that match, if sizes are matched.
      published: the results of others, if the file has some of this part.
    """

    name: str
    folder: Path
    protocol: Protocol
    variants: list[Variant]
    published: Published | None = None


def chosen(names: Sequence[str], file: str | None, options: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The options of `attnlab train` of each part that is named, by its name.

    Args:
      names: of `TASKS` or of the dictionary TASKS of the file, or "task:recall pairs=4".
      file: of the comparison, or None.
      options: of the command line; a field that they set is left as it is.

    Raises:
      UserError: an unknown or repeated name.
    """
    known = TASKS | (fields_of_file(file, "TASKS") if file else {})
    if len(set(names)) < len(names):
        raise UserError(f"--tasks names {max(names, key=names.count)} twice: name each once")
    found = {}
    for name in names:
        fields = {"data.name": name} if name.startswith(named.PREFIX) else known.get(name)
        if fields is None:
            raise UserError(f"--tasks={name}{nearest(name, known)}: expected some of {', '.join(known)}")
        found[name] = _beside(options_of(f"--tasks={name}", fields), options)
    return found


def _beside(fields: Sequence[str], options: Sequence[str]) -> tuple[str, ...]:
    """Options of a part that a command line does not set itself."""
    return tuple(field for field in fields if not any(one.startswith(field.partition("=")[0] + "=") for one in options))
