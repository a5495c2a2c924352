"""Compare variants of a model (`compare`), and read the resulting table as records (`read`)."""

from attnlab.comparing.comparison import Comparison, compare
from attnlab.comparing.table import read

__all__ = ["Comparison", "compare", "read"]
