"""Studies: one claim each, measured over several seeds: a table, a figure, and whether the claim held.

python -m attnlab.study scaling
python -m attnlab.study heads --fast --out /tmp/heads
"""

import importlib.util
import sys

from attnlab import commands
from attnlab.config import nearest

STUDIES = ("alignment", "complexity", "heads", "norms", "positions", "roles", "scaling", "training")


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    argv = list(sys.argv if argv is None else argv)
    name = argv[1] if len(argv) > 1 else "--help"
    if name not in STUDIES and name not in ("--help", "-h"):
        close = nearest(name, STUDIES)
        print(f"error: {name!r} is no study{close}: there are {', '.join(STUDIES)}", file=sys.stderr)
        return 2
    if importlib.util.find_spec("matplotlib") is None:
        print("error: studies draw with matplotlib: pip install 'attnlab[plots]'", file=sys.stderr)
        return 2
    from attnlab.study import report  # needs matplotlib

    if name in ("--help", "-h"):
        claims = [f"  {study:<12}{report.claim(report.load(study))}" for study in STUDIES]
        print(
            "\n".join(
                [__doc__.strip(), "", "Studies, and what they claim:", *claims, "", "Each has --help of its own."]
            )
        )
        return 0
    study = report.load(name)
    return commands.run(
        report.define, lambda values: report.run(name, study, values), study.__doc__, [argv[0], *argv[2:]]
    )


if __name__ == "__main__":
    sys.exit(main())
