"""The training command, publishing its current phase: the process that `faults.py` kills.

    python -m tests.campaigns.watched BOARD --config=… --workdir=…

BOARD is a file of `SIZE` bytes that both processes map into memory: these bytes survive a SIGKILL, lines in a pipe may
not.
"""

import contextlib
import functools
import mmap
import os
import shutil
import sys
import time

PHASES = ("start", "compile", "step", "evaluation", "sampling", "save", "write", "commit", "rename", "pruning")
SIZE = 16
MAIN, BEHIND, STEP = 0, 1, slice(8, 16)  # phase of the loop, phase of the saving thread, last finished step
# Seconds added before and after renaming a folder and removing a file: these take microseconds, too short to be hit.
PAUSE = 0.02


class Board:
    """The memory shared by the two processes.

    Args:
      path: a file of `SIZE` bytes; created if missing.

    >>> import tempfile
    >>> board = Board(tempfile.mkdtemp() + "/board")
    >>> with board.phase("step"):
    ...     board.phases()
    ['step']
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
        """A phase as a context; the phase before continues after it."""
        outer = self._bytes[slot]
        self.enter(name, slot)
        try:
            yield
        finally:
            self._bytes[slot] = outer

    def during(self, function, name: str, slot: int = MAIN, pause: float = 0):
        """Wrap `function` in a phase, with `pause` seconds before and after the call."""

        @functools.wraps(function)
        def called(*args, **kwargs):
            with self.phase(name, slot):
                time.sleep(pause)
                result = function(*args, **kwargs)
                time.sleep(pause)
            return result

        return called


def main(argv: list[str]) -> int:
    """Run the training command, publishing its phases on the board."""
    board = Board(argv[1])
    with board.phase("start"):
        from attnlab import train
        from attnlab.training import checkpoints, parallel

        def watch(maker, make_called):
            original = getattr(parallel.Parallel, maker)
            setattr(parallel.Parallel, maker, lambda self, *args: make_called(original(self, *args)))

        def train_step(step):
            board.enter("compile")

            def called(*args):
                state, metrics = step(*args)
                board.step = int(state.step)  # waits for the step
                board.enter("step")  # the phase whenever there is no other, from here on
                return state, metrics

            return called

        watch("compile_train", train_step)
        watch("compile_eval", lambda step: board.during(step, "evaluation"))
        generate = train.generate

        def generated(*args, **kwargs):
            with board.phase("sampling"):
                yield from generate(*args, **kwargs)

        train.generate = generated
        saved = checkpoints.Checkpoints.save
        checkpoints.Checkpoints.save = board.during(saved, "save")
        writing = checkpoints.WithManifest
        writing.async_save = _in_phase(board, writing.async_save, "write")
        writing.finalize = board.during(writing.finalize, "commit", BEHIND)
        os.rename = board.during(os.rename, "rename", BEHIND, PAUSE)
        rmtree = shutil.rmtree
        unlink = os.unlink

        def pruned(*args, **kwargs):
            os.unlink = board.during(unlink, "pruning", BEHIND, PAUSE / 4)
            try:
                return rmtree(*args, **kwargs)
            finally:
                os.unlink = unlink

        shutil.rmtree = pruned
        sys.argv = ["attnlab.train", *argv[2:]]
        return train.main()


def _in_phase(board, function, name):
    async def called(*args, **kwargs):
        with board.phase(name, BEHIND):
            return await function(*args, **kwargs)

    return called


if __name__ == "__main__":
    sys.exit(main(sys.argv))
