"""Each study tests one claim, measured over several seeds, and writes a table, a figure and a verdict.

attnlab study induction --fast
attnlab study heads --out runs/heads
attnlab study path/to/mine.py              # a study that you wrote
attnlab study all --fast --out runs/all    # all of them, and one HTML report
"""

import os
import sys

from attnlab import commands
from attnlab.study import campaign, registry, running
from attnlab.support import shipped
from attnlab.support.errors import UserError

VALUED = ("--out", "--path", "--only", "--jobs")  # flags whose value may be the next word


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    argv = list(sys.argv if argv is None else argv)
    os.environ.setdefault("MPLBACKEND", "agg")
    words = [at for at in range(1, len(argv)) if argv[at][:1] != "-" and argv[at - 1] not in VALUED]
    if not words:
        claims = (f"  {name:<16}{shipped.summary(file)}" for name, file in shipped.files("studies").items())
        print("\n".join([(__doc__ or "").strip(), "", "Studies and their claims:", *claims]))
        return 0
    study = argv.pop(words[0])  # before or after the flags
    if study == registry.ALL:
        return commands.run(campaign.define, campaign.run, campaign.__doc__, argv)
    try:
        usage = registry.load(study).__doc__
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return commands.run(running.define, lambda values: running.run(study, values), usage, argv)


if __name__ == "__main__":
    sys.exit(main())
