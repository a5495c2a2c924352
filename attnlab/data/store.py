"""Token stores: the token ids of a corpus on the disk, from which windows are read.

A store is written once, by all cores, and found by its key: the sha256 of the text, of the tokenizer and, with packing
"documents", of the documents' lengths; the start of the validation part, the packing and the version of the format. Its
bytes depend on nothing else. It is written to `KEY.*.partial`, read back and verified, and renamed; an interrupted
write starts again. Opening a store checks its manifest and the sizes of its files.

Files of a store: `manifest.json`; `SPLIT.bin`, token ids as little-endian uint8, uint16 or uint32, whichever is the
smallest that holds the vocabulary; with packing "documents" `SPLIT.documents.bin`, the start of each document as int64.
"""

import concurrent.futures
import contextlib
import hashlib
import itertools
import json
import operator
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from attnlab.data import cache, tokenizers
from attnlab.data.batches import in_order
from attnlab.data.corpora import Corpus
from attnlab.data.data_progress import DataProgress
from attnlab.support import files
from attnlab.support.errors import UserError
from attnlab.support.paths import lock, write_bytes

VERSION = 4
UNIT = 1 << 20  # about how many characters a thread encodes at a time
SPLITS = ("train", "validation")
_MANIFEST = "manifest.json"


def load(
    corpus: Corpus,
    tokenizer: tokenizers.Tokenizer,
    *,
    packing: str = "stream",
    folder: str | Path = "",
    quiet: bool = True,
) -> "Store":
    """Open the store of a corpus; write it first if there is none.

    Args:
      corpus: the text.
      tokenizer: encodes it.
      packing: "stream" encodes each split as one text; "documents" encodes each document separately, and stores its
        start.
      folder: contains the stores; attnlab's cache folder if empty.
      quiet: print no progress.

    Raises:
      UserError: the folder cannot be written, the disk is full, the text cannot be encoded, or the store is damaged.

    >>> import tempfile
    >>> from attnlab.data import corpora
    >>> store = load(corpora.load("python_docs"), tokenizers.ByteTokenizer(), folder=tempfile.mkdtemp())
    >>> bytes(store.train.read(np.array([0]), 9)[0].tolist()).decode()
    'The "asse'
    """
    root = Path(folder).expanduser().absolute() if folder else cache.folder()
    if root is None:
        raise UserError("there is no home folder for tokens: name a folder with --config.data.store=FOLDER")
    key = {
        "version": VERSION,
        "text_sha256": corpus.sha256,
        "train_characters": corpus.train_characters,
        "documents_sha256": corpus.documents_sha256 if packing == "documents" else "",
        "tokenizer_sha256": tokenizers.sha256(tokenizer),
        "packing": packing,
    }
    path = root / cache.digest(key)[:32]
    if not path.exists():
        try:
            root.mkdir(parents=True, exist_ok=True)
            with _lock(path.with_suffix(".lock"), corpus.name, quiet):
                if not path.exists():
                    _make(path, key, corpus, tokenizer, quiet)
        except OSError as error:
            raise UserError(
                f"{error.filename or root} cannot be written ({error.strerror or error}): make room there, or name "
                "another folder with --config.data.store=FOLDER"
            ) from error
    return Store(path, key)


class Store:
    """A complete token store. Opening it checks the manifest and the sizes of files; `verify` checks their content.

    Args:
      path: its folder.
      key: the expected key.

    Attributes:
      path: its folder.
      train, validation: `Tokens` of the splits.

    Raises:
      UserError: the store is missing, damaged, or has another key.
    """

    def __init__(self, path: Path, key: dict):
        self.path = path
        try:
            manifest = files.read_json(path / _MANIFEST)
            if manifest.pop("sha256") != cache.digest(manifest):
                raise ValueError("it does not match its own sha256")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(path, f"{_MANIFEST}: {error}") from error
        if manifest["key"] != key:
            raise _damaged(path, "its key differs")
        self._files: dict[str, list] = manifest["files"]
        for name, (size, _) in self._files.items():
            file = path / name
            if not file.is_file() or file.stat().st_size != size:
                raise _damaged(path, f"{name} is missing, or does not have {size} bytes")
        self.train, self.validation = (Tokens(path, split, **manifest["splits"][split]) for split in SPLITS)

    def verify(self) -> None:
        """Read all files whole, and compare their content with their sha256 sums.

        Raises:
          UserError: they differ.
        """
        for name, (_, expected) in self._files.items():
            with (self.path / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                    raise _damaged(self.path, f"{name} does not match its sha256")


def _damaged(path: Path, why: str) -> UserError:
    return UserError(f"the token store {path} is damaged ({why}): remove it to have it rebuilt")


class Tokens:
    """The token ids of one split, mapped into memory; its files must not change.

    Attributes:
      documents: int64 `[documents]`, the start of each document; empty with packing "stream".
      characters, bytes: length of the split's text, in code points and in UTF-8.
    """

    def __init__(self, folder: Path, split: str, *, dtype: str, characters: int, bytes: int):
        self._ids = _mapped(folder / f"{split}.bin", dtype)
        self.documents = _mapped(folder / f"{split}.documents.bin", "<i8")
        self.characters, self.bytes = characters, bytes

    def __len__(self) -> int:
        return len(self._ids)

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Windows of the text.

        Args:
          starts: int `[n]`, the index of each window's first token.
          length: tokens of a window.

        Returns:
          int32 `[n, length]`.

        Raises:
          IndexError: a window is not within the text.
        """
        windows = np.empty((len(starts), length), np.int32)
        for window, start in zip(windows, np.asarray(starts).tolist()):
            if start < 0 or start + length > len(self):
                raise IndexError(f"tokens {start} … {start + length} of {len(self)}")
            window[:] = self._ids[start : start + length]
        return windows


def _mapped(path: Path, dtype: str) -> np.ndarray:
    if not path.exists() or not path.stat().st_size:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    return np.asarray(np.memmap(path, dtype, "r"))


# -------------------------------------------------------------------------------------------------------------- making


@contextlib.contextmanager
def _lock(path: Path, name: str, quiet: bool):
    """Let only one process per machine write a store; the others wait, and then find the store."""
    with path.open("a") as file:
        if not lock(file.fileno()):
            if not quiet:
                print(f"waiting for another process to tokenise {name}", flush=True)
            lock(file.fileno(), wait=True)
        yield  # without locks, both processes write the store
        path.unlink(missing_ok=True)


def _make(path: Path, key: dict, corpus: Corpus, tokenizer: tokenizers.Tokenizer, quiet: bool) -> None:
    for interrupted in path.parent.glob(f"{path.name}.*.partial"):
        shutil.rmtree(interrupted, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(".partial", f"{path.name}.", path.parent))
    try:
        with DataProgress(f"tokenising {corpus.name}", corpus.bytes, quiet) as progress:
            manifest = {"key": key, **_write_splits(partial, corpus, tokenizer, key["packing"], progress)}
        manifest["sha256"] = cache.digest(manifest)
        write_bytes(partial / _MANIFEST, json.dumps(manifest, indent=1).encode(), sync=True)
        Store(partial, key).verify()
        if not path.exists():  # on a file system without locks, another process may have written it
            partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_splits(folder: Path, corpus: Corpus, tokenizer, packing: str, progress: DataProgress) -> dict[str, dict]:
    """Write the files of both splits; return their entries of the manifest."""
    size, workers = tokenizer.vocab_size, _workers()
    dtype = np.dtype("u1" if size <= 1 << 8 else "<u2" if size <= 1 << 16 else "<u4")
    splits = {split: {"dtype": dtype.str, "characters": 0, "bytes": 0} for split in SPLITS}
    tokens = dict.fromkeys(SPLITS, 0)
    with contextlib.ExitStack() as stack, concurrent.futures.ThreadPoolExecutor(workers) as pool:
        names = [f"{split}{kind}.bin" for split in SPLITS for kind in ("", ".documents")[: 1 + (packing != "stream")]]
        new = {name: stack.enter_context(_NewFile(folder / name)) for name in names}
        jobs = (pool.submit(_encode, tokenizer, dtype, *unit) for unit in _units(corpus, tokenizer, packing))
        for split, ids, starts, characters, size in in_order(jobs, ahead=2 * workers):
            new[f"{split}.bin"].write(ids)
            if packing == "documents":
                new[f"{split}.documents.bin"].write((starts + tokens[split]).astype("<i8"))
            tokens[split] += len(ids)
            splits[split]["characters"] += characters
            splits[split]["bytes"] += size
            progress.advance(size)
    return {"splits": splits, "files": {name: file.facts for name, file in new.items()}}


class _NewFile:
    """A file that is synced to the disk at the end; `facts` are then its size and sha256."""

    def __init__(self, path: Path):
        self._file, self._digest = path.open("wb"), hashlib.sha256()

    def write(self, array: np.ndarray) -> None:
        self._file.write(data := array.tobytes())
        self._digest.update(data)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with self._file as file:
            file.flush()
            os.fsync(file.fileno())
            self.facts = [file.tell(), self._digest.hexdigest()]


def _workers() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _units(corpus: Corpus, tokenizer: tokenizers.Tokenizer, packing: str) -> Iterator[tuple[str, list]]:
    """Yield (split, unit); a unit is a list of (text, whether it continues a document), about `UNIT` characters in all.

    The texts are encoded separately. With packing "stream", each split is one document.
    """
    unit, length, last = [], 0, None
    for (split, _), group in itertools.groupby(_numbered(corpus, packing), operator.itemgetter(0)):
        for number, text in enumerate(tokenizer.parts(text for _, text in group)):
            if unit and (length >= UNIT or split != last):
                yield last, unit
                unit, length = [], 0
            unit.append((text, number > 0))
            length, last = length + len(text), split
    if unit:
        yield last, unit


def _numbered(corpus: Corpus, packing: str) -> Iterator[tuple[tuple[str, int], str]]:
    """Yield ((split, index of the document), text) for the pieces, cut into texts of at most `UNIT` characters."""
    number = 0
    for split, piece in corpus.pieces():
        for start in range(0, len(piece.text), UNIT):
            yield (split, number), piece.text[start : start + UNIT]
        number += piece.ends and packing == "documents"


def _encode(tokenizer: tokenizers.Tokenizer, dtype: np.dtype, split: str, unit: list) -> tuple:
    """Return the split, a unit's tokens, the index of each document's first token, and its characters and bytes."""
    text = "".join(part for part, _ in unit)
    ids = [tokenizer.encode(part, continues) for part, continues in unit]
    starts = np.cumsum([0, *map(len, ids)])[:-1][[not continues for _, continues in unit]]
    return split, np.concatenate(ids).astype(dtype), starts, len(text), len(text.encode())
