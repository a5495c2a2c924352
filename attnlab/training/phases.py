"""The phases of a run, for tests that kill it in each of them."""

import contextlib
from collections.abc import Callable

# Those after "save" happen while the loop goes on; "rename" is the moment before a checkpoint gets its final name.
PHASES = ("compile", "step", "evaluation", "sampling", "save", "write", "commit", "rename", "pruning")

OnPhase = Callable[[str], contextlib.AbstractContextManager]


def no_phase(name: str) -> contextlib.AbstractContextManager:
    """A hook that does nothing."""
    return contextlib.nullcontext()
