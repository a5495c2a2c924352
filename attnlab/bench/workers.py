"""Contenders in processes of their own, that take turns: each its own runtime, its own threads, its own memory."""

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from attnlab.bench import memory
from attnlab.data import corpora, tokenizers
from attnlab.errors import UserError

SIZES = {
    "small": {"num_layers": 4, "num_heads": 4, "width": 128, "context": 64, "batch_size": 12},
    "large": {"num_layers": 6, "num_heads": 6, "width": 384, "context": 256, "batch_size": 16},
}


class Worker:
    """A process that answers requests, one JSON line for one.

    Args:
      command: starts it.
      log: what it prints besides goes there.

    Raises:
      UserError: it cannot be started, or ends; when asked.
    """

    def __init__(self, command: list[str], log: Path):
        self._log = log
        with log.open("w") as file:
            try:
                self.process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True
                )
            except OSError as error:
                raise UserError(f"{command[0]} cannot be started ({error.strerror}): name a Python") from error

    def ask(self, what: str, **request) -> dict:
        """The answer to a request."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"do": what} | request) + "\n")
            self.process.stdin.flush()
        if not (line := self.process.stdout.readline()):
            raise UserError(f"{' '.join(self.process.args)} ended: {last_line(self._log)}")
        return json.loads(line)

    @property
    def peak_mib(self) -> float | None:
        """Resident memory at most so far."""
        return memory.high_water(self.process.pid)

    def close(self) -> None:
        """Ends it."""
        # What it was asked and did not read is flushed once more, in vain.
        with contextlib.suppress(BrokenPipeError), self.process:
            self.process.kill()


@contextlib.contextmanager
def started(
    contenders: dict[str, dict],
    size: dict,
    peer_path: str | None = None,
    peer_python: str | None = None,
    tokens: np.ndarray | None = None,
    vocab_size: int = 0,
) -> Iterator[dict[str, Worker]]:
    """Workers by name, each with its model of a size set up on the same text.

    Args:
      contenders: what each is: {"peer": bool} and the options of its start.
      size: one of `SIZES`.
      peer_path: a checkout of nanoGPT, where a peer is among them.
      peer_python: a Python that has torch.
      tokens, vocab_size: the text, `[length]`; that of the small size's recipe when None.
    """
    if tokens is None:
        text = corpora.load("python_docs").train
        tokenizer = tokenizers.make("char", text)
        tokens, vocab_size = tokenizer.encode(text), tokenizer.vocab_size
    with tempfile.TemporaryDirectory(prefix="attnlab-race-") as folder, contextlib.ExitStack() as at_end:
        path = Path(folder) / "tokens.npy"
        np.save(path, tokens)
        workers = {}
        for name, options in contenders.items():
            options = dict(options)
            if options.pop("peer"):
                command = [peer_python, str(Path(__file__).with_name("nanogpt.py")), peer_path]
            else:
                command = [sys.executable, "-m", "attnlab.bench.contender"]
            workers[name] = Worker(command, Path(folder) / f"{len(workers)}.log")
            at_end.callback(workers[name].close)
            workers[name].ask("start", tokens=str(path), vocab_size=vocab_size, **size, **options)
        yield workers


def block(workers: dict[str, Worker], seconds: int) -> int:
    """How many steps the slowest of them takes in about so many seconds, once all have compiled."""
    for worker in workers.values():
        worker.ask("train", steps=3)
    return max(1, round(seconds / max(worker.ask("train", steps=3)["seconds"] / 3 for worker in workers.values())))


def alternate(workers: dict[str, Worker], what: str, rounds: int, **request) -> dict[str, list[dict]]:
    """Each worker's answers to a request, in turn: A B C A B C …"""
    answers = {name: [] for name in workers}
    for _ in range(rounds):
        for name, worker in workers.items():
            answers[name].append(worker.ask(what, **request))
    return answers


def last_line(log: Path) -> str:
    """What a process said last."""
    said = log.read_text(errors="replace").strip().splitlines()
    return said[-1] if said else "it said nothing"
