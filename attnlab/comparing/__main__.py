"""Measure a variant on its finished runs, in a process of its own: see `measuring`."""

import sys

from attnlab import compilation
from attnlab.comparing import measuring


def main(argv: list[str] | None = None) -> int:
    """Measure, with compiled programs that other processes find; returns the exit code."""
    compilation.keep_programs()
    return measuring.main(argv)


if __name__ == "__main__":
    sys.exit(main())
