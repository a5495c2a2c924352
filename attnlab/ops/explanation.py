"""Which of several ways to compute a call runs, and why the others do not."""

from typing import NamedTuple


class _BackendAndRejected(NamedTuple):
    backend: str  # the backend that would run
    rejected: dict[str, str]  # for each other backend, the reason against it


class Explanation(_BackendAndRejected):
    """The pair (backend, rejected); `split` tells how `context_parallel` splits the sequence, "" if it does not."""

    split: str = ""

    def __str__(self):
        runs = f"runs {self.backend}" + (f" {self.split}" if self.split else "")
        return "\n".join([runs, *(f"not {name}: {why}" for name, why in self.rejected.items())])
