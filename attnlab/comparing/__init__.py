"""The parts of `attnlab compare`, and its table as records: `attnlab.comparing.read(folder)`."""

from attnlab.comparing.table import read

__all__ = ["read"]
