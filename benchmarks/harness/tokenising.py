"""A large text, and one start of tokenising it: a process of its own, so that its peak memory is its own.

    python -m attnlab.bench.tokenising TEXT byte|bpe FOLDER

Prints a JSON object: seconds to import, to read, to make the tokenizer and to make or open the store, and processor
seconds of the last; the numbers of characters, bytes and tokens; peak MiB. A second start finds what the first has left
in FOLDER.
"""

import json
import os
import time
from pathlib import Path

import numpy as np

VOCAB_SIZE = 4096  # of bpe
SAMPLE = 64 << 20  # bytes on which bpe is trained
NOISE = 0.01  # share of the letters that are replaced


def write_text(path: Path, text: str, size: int, seed: int = 0) -> None:
    """Write a text again and again, with other letters replaced each time, up to a size in bytes.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "text.txt"
    >>> write_text(path, "twenty-one characters", 2100)
    >>> path.stat().st_size
    2100
    """
    draw, original = np.random.default_rng(seed), np.frombuffer(text.encode(), np.uint8)
    letters = np.flatnonzero((original >= ord("a")) & (original <= ord("z")))
    with path.open("wb") as file:
        while left := size - file.tell():
            copy = original.copy()
            where = draw.choice(letters, int(NOISE * len(letters)))
            copy[where] = draw.integers(ord("a"), ord("z") + 1, len(where))
            # Cut within a character, the text would not be UTF-8: the rest is filled up.
            file.write(copy.tobytes() if left >= len(copy) else b" " * left)


def work(path: str, kind: str, folder: str) -> None:
    """Tokenise, or open what is tokenised, and print the figures."""
    times = [time.perf_counter()]
    from attnlab.data import corpora, store, tokenizers

    from . import memory

    times.append(time.perf_counter())
    corpus = corpora.load("text", path=path)
    times.append(time.perf_counter())
    tokenizer = _tokenizer(corpus, kind, Path(folder) / f"{kind}.json", tokenizers)
    times.append(time.perf_counter())
    cpu = time.process_time()
    tokens = store.load(corpus, tokenizer, folder=folder, quiet=False)
    times.append(time.perf_counter())
    names = ("import_s", "read_s", "tokenizer_s", "store_s")
    figures = dict(zip(names, np.diff(times).round(3).tolist()))
    figures |= {"cpu_s": time.process_time() - cpu, "characters": corpus.characters, "bytes": corpus.bytes}
    figures |= {"tokens": len(tokens.train) + len(tokens.validation), "peak_mib": memory.high_water(os.getpid())}
    print(json.dumps(figures), flush=True)


def _tokenizer(corpus, kind, file, tokenizers):
    if not file.exists():
        text = "" if kind == "byte" else corpus.sample(SAMPLE)
        tokenizers.save(tokenizers.make(kind, text, VOCAB_SIZE), file)
    return tokenizers.load(file)
