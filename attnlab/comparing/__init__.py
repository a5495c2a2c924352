"""Which variant of a model is better: `attnlab.comparing.compare`, and its table as records, `read`."""

from attnlab.comparing.comparison import Comparison, compare
from attnlab.comparing.table import read

__all__ = ["Comparison", "compare", "read"]
