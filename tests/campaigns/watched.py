"""The training command, publishing its current phase: the process that `faults.py` kills.

    python -m tests.campaigns.watched BOARD --config=… --workdir=…

BOARD is a file of `SIZE` bytes that both processes map into memory: these bytes survive a SIGKILL, lines in a pipe may
not.
"""

import contextlib
import mmap
import sys
import time

from attnlab.training.checkpoints import PHASES as PHASES_OF_A_RUN

PHASES = ("start", *PHASES_OF_A_RUN)
BACKGROUND = ("write", "commit", "rename", "pruning")  # phases of the thread that saves
SIZE = 16
MAIN, BEHIND, STEP = 0, 1, slice(8, 16)  # phase of the loop, phase of the saving thread, last finished step
# Seconds added before and after renaming a folder and removing a file: these take microseconds, too short to be hit.
PAUSES = {"rename": 0.02, "pruning": 0.005}


class Board:
    """The memory shared by the two processes.

    Args:
      path: a file of `SIZE` bytes; created if missing.
    """

    def __init__(self, path: str):
        self.path = path
        with open(path, "a+b") as file:
            file.truncate(SIZE)
            self._bytes = mmap.mmap(file.fileno(), SIZE)

    def clear(self) -> None:
        """Reset, before a process starts."""
        self._bytes[:] = bytes(SIZE)

    def phases(self) -> list[str]:
        """The current phases: of the loop, and of the thread that saves."""
        return [PHASES[self._bytes[slot] - 1] for slot in (MAIN, BEHIND) if self._bytes[slot]]

    @property
    def step(self) -> int:
        """The last finished step."""
        return int.from_bytes(self._bytes[STEP], "little")

    @step.setter
    def step(self, step: int) -> None:
        self._bytes[STEP] = step.to_bytes(8, "little")

    def enter(self, name: str, slot: int = MAIN) -> None:
        """Start a phase."""
        self._bytes[slot] = PHASES.index(name) + 1

    @contextlib.contextmanager
    def phase(self, name: str, slot: int = MAIN):
        """A context manager for a phase; the previous phase continues after it."""
        outer = self._bytes[slot]
        self.enter(name, slot)
        try:
            yield
        finally:
            self._bytes[slot] = outer

    @contextlib.contextmanager
    def on_phase(self, name: str):
        """The hook of `attnlab.train.train`; a step's phase lasts until another begins."""
        slot, pause = BEHIND if name in BACKGROUND else MAIN, PAUSES.get(name, 0)
        if name in ("compile", "step"):
            self.enter(name)
            yield
            self.enter("step")
            return
        with self.phase(name, slot):
            time.sleep(pause)
            yield
            time.sleep(pause)

    def on_step(self, step: int, metrics: dict) -> None:
        """The hook of `attnlab.train.train` that is called after a step; waits until the step has finished."""
        metrics["loss"].block_until_ready()
        self.step = step


def main(argv: list[str]) -> int:
    """Run the training command, publishing its phases on the board."""
    board = Board(argv[1])
    with board.phase("start"):
        from attnlab import train

        sys.argv = ["attnlab.train", *argv[2:]]
        return train.main(on_step=board.on_step, on_phase=board.on_phase)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
