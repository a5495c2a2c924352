"""Measure a variant on its finished runs: see `measuring`."""

import sys

from attnlab.comparing.measuring import main

if __name__ == "__main__":
    sys.exit(main())
