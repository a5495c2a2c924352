"""Races against named peers, and campaigns of faults.

python -m attnlab.bench attention
python -m attnlab.bench train --peer_path=nanoGPT --peer_python=torch/bin/python
python -m attnlab.bench faults --kills=10
"""

import importlib
import sys

from attnlab import commands
from attnlab.config import nearest

RACES = ("attention", "train", "decode", "start", "data", "gpu", "saving", "faults")


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    argv = list(sys.argv if argv is None else argv)
    name = argv[1] if len(argv) > 1 else "--help"
    if name in ("--help", "-h"):
        print(__doc__.strip() + "\n\nRaces: " + ", ".join(RACES) + "; each has --help of its own")
        return 0
    if name not in RACES:
        print(f"error: {name!r} is no race{nearest(name, RACES)}: use one of {', '.join(RACES)}", file=sys.stderr)
        return 2
    race = importlib.import_module(f"attnlab.bench.{name}")
    return commands.run(race.define, race.main, race.__doc__, [argv[0], *argv[2:]])


if __name__ == "__main__":
    sys.exit(main())
