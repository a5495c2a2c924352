"""Worker processes that alternate: each contender has its own runtime, threads and memory."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from attnlab.data import corpora, tokenizers
from attnlab.support import hugepages
from attnlab.support.errors import UserError

from . import memory, tables

SIZES = {
    "small": {"num_layers": 4, "num_heads": 4, "width": 128, "context": 64, "batch_size": 12},
    "large": {"num_layers": 6, "num_heads": 6, "width": 384, "context": 256, "batch_size": 16},
}


def command(module: str, *words: str) -> list[str]:
    """The command line of a worker process that calls `work(*words)` in a module of the benchmarks."""
    return [sys.executable, "-m", "attnlab.bench", "--worker", module, *words]


class Worker:
    """A process that answers requests; `serving.py`, beside this file, describes the protocol.

    Args:
      command: the command line of the process.
      log: file for its stderr.

    Raises:
      UserError: the process cannot be started.
    """

    def __init__(self, command: list[str], log: Path):
        self._log = log
        with log.open("w") as file:
            try:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=file,
                    text=True,
                    env=hugepages.environment(dict(os.environ)),  # as the training command does
                )
            except OSError as error:
                raise UserError(f"{command[0]} cannot be started ({error.strerror}): give another Python") from error

    def ask(self, what: str, **request) -> dict:
        """Send a request and return the answer.

        Raises:
          UserError: the request failed, or the process ended.
        """
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"do": what} | request) + "\n")
            self.process.stdin.flush()
        if not (line := self.process.stdout.readline()):
            raise UserError(f"{' '.join(self.process.args)} ended: {last_line(self._log)}")
        answer = json.loads(line)
        if "error" in answer:
            raise UserError(f"{' '.join(self.process.args)} failed: {answer['error']}")
        return answer

    @property
    def peak_mib(self) -> float | None:
        """Peak resident memory so far, in MiB; None where the system does not report it."""
        return memory.high_water(self.process.pid)

    def close(self) -> None:
        """Kill the process."""
        # Closing stdin flushes what the process has not read, which fails when it has ended.
        with contextlib.suppress(BrokenPipeError), self.process:
            self.process.kill()


def quickstart_text() -> tuple[np.ndarray, int]:
    """The training text of the quickstart's config, by characters: (tokens `[length]`, vocabulary size)."""
    text = corpora.read_text("python_docs").train
    tokenizer = tokenizers.make("char", text)
    return tokenizer.encode(text), tokenizer.vocab_size


@contextlib.contextmanager
def started(
    contenders: dict[str, dict],
    label: str,
    size: dict,
    peer_path: str | None = None,
    peer_python: str | None = None,
    tokens: np.ndarray | None = None,
    vocab_size: int = 0,
) -> Iterator[dict[str, Worker]]:
    """Start a worker for each contender, all with a model of the same size on the same text.

    Args:
      contenders: by name, {"peer": whether the contender is nanoGPT} and the other arguments of its class.
      label: for the progress lines.
      size: one of `SIZES`.
      peer_path: a checkout of nanoGPT; needed if a contender is a peer.
      peer_python: a Python with torch installed; needed if a contender is a peer.
      tokens: the text, int `[length]`; if None, `quickstart_text()`.
      vocab_size: vocabulary size of `tokens`.

    Yields:
      The workers by name; they are killed when the context ends.
    """
    if tokens is None:
        tokens, vocab_size = quickstart_text()
    with tempfile.TemporaryDirectory(prefix="attnlab-race-") as folder, contextlib.ExitStack() as at_end:
        path = Path(folder) / "tokens.npy"
        np.save(path, tokens)
        workers = {}
        for name, options in contenders.items():
            options = dict(options)
            if options.pop("peer"):
                words = [peer_python, str(Path(__file__).with_name("nanogpt.py")), peer_path]
            else:
                words = command("harness.contender")
            workers[name] = Worker(words, Path(folder) / f"{len(workers)}.log")
            at_end.callback(workers[name].close)
            print(f"{label}: starting {name}", flush=True)
            workers[name].ask("start", tokens=str(path), vocab_size=vocab_size, **size, **options)
        yield workers


def calibrate(workers: dict[str, Worker], seconds: int) -> int:
    """Compile every worker's training step, and return how many steps the slowest takes in about `seconds`."""
    for worker in workers.values():
        worker.ask("train", steps=3)
    return max(1, round(seconds / max(worker.ask("train", steps=3)["seconds"] / 3 for worker in workers.values())))


def alternate(workers: dict[str, Worker], what: str, rounds: int, label: str, **request) -> dict[str, list[dict]]:
    """Send each worker the same request, in turn: A B C A B C …; returns their answers, and prints progress."""
    answers = {name: [] for name in workers}
    for _ in tables.rounds(label, rounds):
        for name, worker in workers.items():
            answers[name].append(worker.ask(what, **request))
    return answers


def last_line(log: Path) -> str:
    """The last line that a process logged."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it printed nothing"
