"""Studies test one claim each, measured over several seeds, and write a table, a figure and a verdict.

attnlab study induction --fast
attnlab study heads --out runs/heads
attnlab study path/to/mine.py              # a study that you wrote
attnlab study all --fast --out runs/all    # all of them, and one HTML report
"""

import importlib.util
import sys

from attnlab import commands
from attnlab.support.errors import UserError

VALUED = ("--out", "--path", "--only", "--jobs")  # flags whose value may be the next word


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    argv = list(sys.argv if argv is None else argv)
    if importlib.util.find_spec("matplotlib") is None:
        print("error: studies need matplotlib: pip install 'attnlab[plots]'", file=sys.stderr)
        return 2
    from attnlab.study import campaign, registry, running  # need matplotlib

    flags = [at for at, word in enumerate(argv) if at and (word.startswith("-") or argv[at - 1] in VALUED)]
    at = next((at for at in range(1, len(argv)) if at not in flags), None)  # before or after the flags
    if at is None:
        width = max(map(len, registry.STUDIES)) + 2
        claims = [f"  {study:<{width}}{registry.claim(registry.load(study))}" for study in registry.STUDIES]
        print("\n".join([(__doc__ or "").strip(), "", "Studies and their claims:", *claims]))
        return 0
    study, rest = argv[at], argv[:at] + argv[at + 1 :]
    if study == registry.ALL:
        return commands.run(campaign.define, campaign.run, campaign.__doc__, rest)
    try:
        usage = registry.load(study).__doc__
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return commands.run(running.define, lambda values: running.run(study, values), usage, rest)


if __name__ == "__main__":
    sys.exit(main())
