"""Token stores: the token ids of a corpus on the disk, from which windows are read.

A store is written once, by all cores, and found by its key: the text's sha256, the start of the validation part, the
tokenizer's sha256, the packing and the version of the format. Its bytes depend on nothing else. It is written to
`KEY.*.partial` and renamed when it is complete; one that was interrupted starts again.

Files of a store: `manifest.json`; `SPLIT.bin`, token ids as uint8, uint16 or uint32, little-endian, the smallest that
holds the vocabulary; with packing "documents" `SPLIT.documents.bin`, the start of each document as int64.
"""

import collections
import concurrent.futures
import contextlib
import hashlib
import itertools
import json
import operator
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from attnlab.data import cache, tokenizers
from attnlab.data.corpora import Corpus
from attnlab.data.data_progress import Progress
from attnlab.data.sources import Piece
from attnlab.support import files
from attnlab.support.errors import UserError
from attnlab.support.paths import lock, write_bytes

VERSION = 2
UNIT = 1 << 20  # characters, about, that a thread encodes at a time
PACKINGS = ("stream", "documents")
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
      folder: where stores are; attnlab's cache folder if empty.
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
    if path.exists():
        store = Store(path, key)
        store.verify(corpus.name, quiet)
        return store
    with _writing(root):
        root.mkdir(parents=True, exist_ok=True)
        lock = path.with_suffix(".lock")
        with _lock(lock, corpus.name, quiet):
            if not path.exists():
                _make(path, key, corpus, tokenizer, quiet)
            lock.unlink(missing_ok=True)  # waiting processes then find the store
    return Store(path, key)


class Store:
    """A complete token store; the sizes of its files are checked, their content by `verify`.

    Args:
      path: its folder.
      key: the expected key; None for any.

    Attributes:
      path: its folder.
      sha256: digest of its content.
      train, validation: `Tokens` of the splits.

    Raises:
      UserError: it is missing, damaged, or has another key.
    """

    def __init__(self, path: Path, key: dict | None = None):
        self.path = path
        self._manifest = manifest = _read_manifest(path)
        for name, expected in (key or {"version": VERSION}).items():
            if (found := manifest["key"].get(name)) != expected:
                raise UserError(
                    f"{path} was made with {name} = {found!r}, expected {expected!r}: remove it, and it is made again"
                )
        self.sha256: str = manifest["sha256"]
        self.train, self.validation = (Tokens(path, split, **manifest["splits"][split]) for split in SPLITS)

    def verify(self, name: str = "tokens", quiet: bool = True) -> None:
        """Compare all files with the sha256 sums of the manifest, several at a time.

        Args:
          name: of the text, for the progress line.
          quiet: print no progress.

        Raises:
          UserError: they differ.
        """
        files = [
            (name, *facts) for split in self._manifest["splits"].values() for name, facts in split["files"].items()
        ]
        with (
            Progress(f"checking {name}", sum(size for _, size, _ in files), quiet) as progress,
            concurrent.futures.ThreadPoolExecutor(_workers()) as pool,
        ):
            digests = pool.map(lambda file: _sha256(self.path / file[0]), files)
            for (file, size, expected), digest in zip(files, digests):
                if digest != expected:
                    raise _damaged(self.path, f"{file} does not match its sha256")
                progress.advance(size)


class Tokens:
    """The token ids of one split, mapped into memory; its files must stay as they are.

    Attributes:
      documents: int64 `[documents]`, the start of each document; empty with packing "stream".
      characters, bytes: length of the split's text, in code points and in UTF-8.
    """

    def __init__(self, folder: Path, split: str, *, dtype: str, characters: int, bytes: int, files: dict):
        arrays = [_mapped(folder / name, size) for name, (size, _) in files.items()]
        self._ids = arrays[0].view(dtype)
        self.documents = arrays[1].view("<i8") if len(arrays) > 1 else np.zeros(0, np.int64)
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


def _mapped(path: Path, size: int) -> np.ndarray:
    """The bytes of a file, uint8."""
    try:
        found = path.lstat()
    except OSError as error:
        raise _damaged(path.parent, f"{path.name}: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        raise _damaged(path.parent, f"{path.name} is not a regular file")
    if found.st_size != size:
        raise _damaged(path.parent, f"{path.name} has {found.st_size} bytes instead of {size}")
    return np.asarray(np.memmap(path, np.uint8, "r")) if size else np.zeros(0, np.uint8)  # no map is empty


# -------------------------------------------------------------------------------------------------------------- making


def _make(path: Path, key: dict, corpus: Corpus, tokenizer: tokenizers.Tokenizer, quiet: bool) -> None:
    for interrupted in path.parent.glob(f"{path.name}.*.partial"):
        shutil.rmtree(interrupted, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(".partial", f"{path.name}.", path.parent))
    try:
        with Progress(f"tokenising {corpus.name}", corpus.bytes, quiet) as progress:
            splits = _write_splits(partial, corpus, tokenizer, key["packing"], progress)
        manifest = {"key": key, "splits": splits}
        manifest["sha256"] = _digest_of(manifest)
        write_bytes(partial / _MANIFEST, json.dumps(manifest, indent=1).encode(), sync=True)
        if not path.exists():  # on a file system without locks two processes write it
            partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_splits(folder, corpus, tokenizer, packing, progress) -> dict[str, dict]:
    """Write the files of both splits; the manifest's part about them."""
    workers, splits = _workers(), {split: _NewSplit(folder, split, tokenizer, packing) for split in SPLITS}
    with contextlib.ExitStack() as stack, concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for split in splits.values():
            stack.enter_context(split)
        jobs = _jobs(corpus, tokenizer, packing)
        encoded = _in_order(pool, lambda job: (job[0], _encode(tokenizer, job[1])), jobs, ahead=2 * workers)
        for split, unit in encoded:
            splits[split].write(unit)
            progress.advance(unit.bytes)
    return {name: split.facts for name, split in splits.items()}


def _workers() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _in_order(pool: concurrent.futures.Executor, function: Callable, jobs: Iterable, ahead: int) -> Iterator:
    """The results of a pool in the order of the jobs, of which at most `ahead` are waiting."""
    pending = collections.deque()
    for job in jobs:
        pending.append(pool.submit(function, job))
        if len(pending) >= ahead:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


class _Part(NamedTuple):
    """A text that is encoded separately; `begins` a document whose start is stored, or `continues` a part."""

    text: str
    begins: bool
    continues: bool


class _Encoded(NamedTuple):
    """A unit's tokens, the index of each document's first token, and its text's length."""

    tokens: np.ndarray
    starts: np.ndarray
    characters: int
    bytes: int


def _jobs(corpus: Corpus, tokenizer: tokenizers.Tokenizer, packing: str) -> Iterator[tuple[str, list[_Part]]]:
    """(Split, unit) for the whole text."""
    for split, group in itertools.groupby(corpus.pieces(), operator.itemgetter(0)):
        pieces = (piece for _, piece in group)
        parts = _stream(pieces, tokenizer) if packing == "stream" else _documents(pieces, tokenizer)
        for unit in _units(parts):
            yield split, unit


def _stream(pieces: Iterable[Piece], tokenizer: tokenizers.Tokenizer) -> Iterator[_Part]:
    for number, text in enumerate(tokenizer.parts(_cut(piece.text for piece in pieces))):
        yield _Part(text, begins=False, continues=number > 0)


def _documents(pieces: Iterable[Piece], tokenizer: tokenizers.Tokenizer) -> Iterator[_Part]:
    for _, group in itertools.groupby(_numbered(pieces), operator.itemgetter(0)):
        for number, text in enumerate(tokenizer.parts(_cut(text for _, text in group))):
            yield _Part(text, begins=number == 0, continues=number > 0)


def _numbered(pieces: Iterable[Piece]) -> Iterator[tuple[int, str]]:
    """The number of its document, and the text, of each piece."""
    number = 0
    for piece in pieces:
        yield number, piece.text
        number += piece.ends


def _cut(texts: Iterable[str]) -> Iterator[str]:
    """The same text, in pieces that are neither empty nor longer than a unit."""
    for text in texts:
        for start in range(0, len(text), UNIT):
            yield text[start : start + UNIT]


def _units(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    unit, length = [], 0
    for part in parts:
        unit.append(part)
        length += len(part.text)
        if length >= UNIT:
            yield unit
            unit, length = [], 0
    if unit:
        yield unit


def _encode(tokenizer: tokenizers.Tokenizer, unit: list[_Part]) -> _Encoded:
    text = "".join(part.text for part in unit)
    ids = [tokenizer.encode(part.text, part.continues) for part in unit]
    starts = np.cumsum([0, *map(len, ids)])[:-1][[part.begins for part in unit]]
    return _Encoded(np.concatenate(ids).astype(_dtype(tokenizer)), starts, len(text), len(text.encode()))


def _dtype(tokenizer: tokenizers.Tokenizer) -> np.dtype:
    size = tokenizer.vocab_size
    return np.dtype("u1" if size <= 1 << 8 else "<u2" if size <= 1 << 16 else "<u4")


class _NewSplit:
    """The files of a split while they are written; `facts` are the manifest's, once they are complete."""

    def __init__(self, folder: Path, split: str, tokenizer: tokenizers.Tokenizer, packing: str):
        self._names = [f"{split}.bin", f"{split}.documents.bin"][: 1 + (packing == "documents")]
        self._folder, self._tokens = folder, 0
        self.facts = {"dtype": _dtype(tokenizer).str, "characters": 0, "bytes": 0, "files": {}}

    def __enter__(self):
        self._stack = contextlib.ExitStack()
        self._files = [self._stack.enter_context((self._folder / name).open("wb")) for name in self._names]
        self._digests = [hashlib.sha256() for _ in self._names]
        return self

    def write(self, unit: _Encoded) -> None:
        arrays = unit.tokens, (unit.starts + self._tokens).astype("<i8")
        for file, digest, array in zip(self._files, self._digests, arrays):
            file.write(data := array.tobytes())
            digest.update(data)
        self._tokens += len(unit.tokens)
        self.facts["characters"] += unit.characters
        self.facts["bytes"] += unit.bytes

    def __exit__(self, *_):
        with self._stack:
            for name, file, digest in zip(self._names, self._files, self._digests):
                file.flush()
                os.fsync(file.fileno())
                self.facts["files"][name] = [file.tell(), digest.hexdigest()]


# --------------------------------------------------------------------------------------------------------------- files


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of(manifest: dict) -> str:
    return cache.digest({name: value for name, value in manifest.items() if name != "sha256"})


def _read_manifest(path: Path) -> dict:
    """The manifest, which is as it was written: its sha256 says so."""
    file = path / _MANIFEST
    try:
        if not stat.S_ISREG(file.lstat().st_mode):
            raise _damaged(path, f"{_MANIFEST} is not a regular file")
        manifest = files.read_json(file)
        if manifest["sha256"] == _digest_of(manifest):
            return manifest
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}): remove {path}, and it is made again") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, f"{_MANIFEST} is not one of a token store") from error
    raise _damaged(path, f"{_MANIFEST} does not match its own sha256")


def _damaged(path: Path, why: str) -> UserError:
    return UserError(f"the token store {path} is damaged ({why}): remove it, and it is made again")


@contextlib.contextmanager
def _writing(root: Path):
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{error.filename or root} cannot be written ({error.strerror or error}): make room there, or name another "
            "folder with --config.data.store=FOLDER"
        ) from error


@contextlib.contextmanager
def _lock(path: Path, name: str, quiet: bool):
    """Only one process per machine writes a store; the others wait for it."""
    with path.open("a") as file:
        if not lock(file.fileno()):
            if not quiet:
                print(f"waiting for another process that tokenises {name}", flush=True)
            lock(file.fileno(), wait=True)
        yield  # without locks both write the store
