"""Measure or race variants on their finished runs, in a separate process: see `measuring`."""

import sys

from attnlab import compilation
from attnlab.comparing import measuring


def main(argv: list[str] | None = None) -> int:
    """Measure with the shared cache of compiled programs, and return the exit code."""
    compilation.keep_programs()
    return measuring.main(argv)


if __name__ == "__main__":
    sys.exit(main())
