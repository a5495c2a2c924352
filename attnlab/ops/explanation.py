"""The choice of a backend for a call, and the reasons against the others."""

from typing import NamedTuple


class _BackendAndRejected(NamedTuple):
    backend: str  # the backend that would run
    rejected: dict[str, str]  # for each other backend, the reason against it


class Explanation(_BackendAndRejected):
    """The pair (backend, rejected).

    `split` describes how `context_parallel` splits the sequence, "" if it does not. `products` is the type to which
    matrix products round their operands, "" if that is the type of the inputs.
    """

    split: str = ""
    products: str = ""

    def __str__(self):
        runs = f"runs {self.backend}" + (f" {self.split}" if self.split else "")
        runs += f", products in {self.products}" if self.products else ""
        return "\n".join([runs, *(f"not {name}: {why}" for name, why in self.rejected.items())])
