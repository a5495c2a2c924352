"""Studies test one claim each, measured over several seeds, and write a table, a figure and a verdict.

python -m attnlab.study scaling
python -m attnlab.study heads --fast --out runs/heads
"""

import importlib.util
import sys

from attnlab import commands
from attnlab.config import nearest

STUDIES = ("alignment", "complexity", "heads", "norms", "positions", "roles", "scaling", "training")


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    argv = list(sys.argv if argv is None else argv)
    flags = [at for at, word in enumerate(argv) if at and (word.startswith("-") or argv[at - 1] in ("--out", "--path"))]
    at = next((at for at in range(1, len(argv)) if at not in flags), None)  # before or after the flags
    if at is not None and argv[at] not in STUDIES:
        close = nearest(argv[at], STUDIES)
        print(f"error: {argv[at]!r} is not a study{close}: expected one of {', '.join(STUDIES)}", file=sys.stderr)
        return 2
    if importlib.util.find_spec("matplotlib") is None:
        print("error: studies need matplotlib: pip install matplotlib", file=sys.stderr)
        return 2
    from attnlab.study import report  # needs matplotlib

    if at is None:
        claims = [f"  {study:<12}{report.claim(report.load(study))}" for study in STUDIES]
        print("\n".join([__doc__.strip(), "", "Studies and their claims:", *claims]))
        return 0
    name, study = argv[at], report.load(argv[at])
    rest = argv[:at] + argv[at + 1 :]
    return commands.run(report.define, lambda values: report.run(name, study, values), study.__doc__, rest)


if __name__ == "__main__":
    sys.exit(main())
