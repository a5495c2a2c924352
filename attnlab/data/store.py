"""Token stores: the token ids of a corpus on the disk, in shards, from which windows are read.

A store is written once, by all cores, and found by its key: the text's sha256, the start of the validation part, the
tokenizer's sha256, the packing and the version of the format. Its bytes depend on nothing else. It is written to
`KEY.partial` and renamed when it is complete; after an interruption, finished shards are reused.

Files of a store: `manifest.json`; `SPLIT-NNNNN.bin`, token ids as uint8, uint16 or uint32, little-endian, the smallest
that holds the vocabulary; with packing "documents" `SPLIT.documents.bin`, the start of each document as int64.
"""

import collections
import concurrent.futures
import contextlib
import functools
import hashlib
import itertools
import json
import operator
import os
import re
import shutil
import stat
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from attnlab.data import cache, tokenizers
from attnlab.data.corpora import Corpus, TextChangedError
from attnlab.data.data_progress import Progress
from attnlab.data.sources import Piece
from attnlab.support import files
from attnlab.support.errors import UserError
from attnlab.support.paths import lock, write_bytes

VERSION = 1
UNIT = 1 << 20  # characters, about, that a thread encodes at a time
SHARD = 64  # units in a shard
PACKINGS = ("stream", "documents")
SPLITS = ("train", "validation")
_MANIFEST, _JOURNAL = "manifest.json", "journal.jsonl"
_OPEN_FILES = 256  # of one split


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
    is_new = not path.exists()
    if is_new:
        with _writing(root):
            root.mkdir(parents=True, exist_ok=True)
            lock = path.with_suffix(".lock")
            with _lock(lock, corpus.name, quiet):
                if not path.exists():
                    _make(path, key, corpus, tokenizer, quiet)
                lock.unlink(missing_ok=True)  # waiting processes then find the store
    store = Store(path, key)
    if not is_new:
        store.verify(corpus.name, quiet)
    return store


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
        self._manifest = _read_manifest(path)
        for name, expected in (key or {"version": VERSION}).items():
            if (found := self._manifest["key"].get(name)) != expected:
                raise UserError(
                    f"{path} was made with {name} = {found!r}, expected {expected!r}: remove it, and it is made again"
                )
        self.sha256: str = self._manifest["sha256"]
        self.train, self.validation = (
            Tokens(path, split, self._manifest["dtype"], self._manifest["splits"][split]) for split in SPLITS
        )

    def verify(self, name: str = "tokens", quiet: bool = True) -> None:
        """Compare all files with the sha256 sums of the manifest, several at a time.

        Args:
          name: of the text, for the progress line.
          quiet: print no progress.

        Raises:
          UserError: they differ.
        """
        if _digest_of(self._manifest) != self.sha256:
            raise _damaged(self.path, f"{_MANIFEST} does not match its own sha256")
        files = [file for split in self._manifest["splits"].values() for file in split["files"]]
        with (
            Progress(f"checking {name}", sum(file["bytes"] for file in files), quiet) as progress,
            concurrent.futures.ThreadPoolExecutor(_workers()) as pool,
        ):
            digests = pool.map(lambda file: _sha256(self.path / file["name"]), files)
            for file, digest in zip(files, digests):
                if digest != file["sha256"]:
                    raise _damaged(self.path, f"{file['name']} does not match its sha256")
                progress.advance(file["bytes"])


class Tokens:
    """The token ids of one split, read from the disk without keeping them in memory.

    Attributes:
      documents: int64 `[documents]`, the start of each document; empty with packing "stream".
      characters, bytes: length of the split's text, in code points and in UTF-8.
    """

    def __init__(self, folder: Path, split: str, dtype: str, facts: dict):
        self._folder, self._dtype = folder, np.dtype(dtype)
        self.characters, self.bytes = facts["characters"], facts["bytes"]
        shards = [file for file in facts["files"] if file["name"] != _documents_file(split)]
        self._names = [shard["name"] for shard in shards]
        self._ends = [0, *itertools.accumulate(shard["bytes"] // self._dtype.itemsize for shard in shards)]
        for file in facts["files"]:
            _check_size(folder, file)
        self._file = functools.lru_cache(_OPEN_FILES)(_OpenFile)
        self.documents = np.zeros(0, np.int64)
        if facts["documents"]:
            self.documents = np.memmap(folder / _documents_file(split), "<i8", "r")

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Windows of the text.

        Args:
          starts: int `[n]`, the index of each window's first token.
          length: tokens of a window.

        Returns:
          int32 `[n, length]`.

        Raises:
          IndexError: a window is not within the text.
          UserError: a file was removed or truncated since the store was opened.
        """
        windows = np.empty((len(starts), length), np.int32)
        for window, start in zip(windows, np.asarray(starts).tolist()):
            if start < 0 or start + length > len(self):
                raise IndexError(f"tokens {start} … {start + length} of {len(self)}")
            self._fill(window, start)
        return windows

    def _fill(self, window: np.ndarray, start: int) -> None:
        shard, filled, size = bisect_right(self._ends, start) - 1, 0, self._dtype.itemsize
        while filled < len(window):
            count = min(len(window) - filled, self._ends[shard + 1] - start)
            path = self._folder / self._names[shard]
            try:
                data = os.pread(self._file(path).descriptor, count * size, (start - self._ends[shard]) * size)
            except OSError as error:
                raise UserError(f"{path} cannot be read: {error.strerror}") from error
            if len(data) != count * size:
                raise _damaged(self._folder, f"{path.name} is truncated")
            window[filled : filled + count] = np.frombuffer(data, self._dtype)
            shard, filled, start = shard + 1, filled + count, start + count


class _OpenFile:
    """A file that stays open while it is referenced."""

    def __init__(self, path: Path):
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self):
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


# -------------------------------------------------------------------------------------------------------------- making


def _make(path: Path, key: dict, corpus: Corpus, tokenizer: tokenizers.Tokenizer, quiet: bool) -> None:
    partial = path.with_suffix(".partial")
    if not (partial / _MANIFEST).exists():
        partial.mkdir(exist_ok=True)
        finished = _finished(partial)
        with Progress(f"tokenising {corpus.name}", corpus.bytes, quiet) as progress:
            try:
                shards = _write_shards(partial, finished, corpus, tokenizer, key["packing"], progress)
            except TextChangedError:  # its shards must not be reused
                shutil.rmtree(partial, ignore_errors=True)
                raise
        manifest = {"key": key, "dtype": _dtype(tokenizer).str, "splits": _splits(partial, shards)}
        manifest["sha256"] = _digest_of(manifest)
        write_bytes(partial / _MANIFEST, json.dumps(manifest, indent=1).encode(), sync=True)
    for file in (partial / _JOURNAL, *partial.glob("*.starts")):
        file.unlink(missing_ok=True)
    if not path.exists():
        partial.rename(path)
    shutil.rmtree(partial, ignore_errors=True)  # left if two processes wrote it, on a file system without locks


def _finished(partial: Path) -> dict[str, dict]:
    """The intact shards of an interrupted attempt, from its journal; removes the other files."""
    finished = {}
    journal = partial / _JOURNAL
    for line in journal.read_text().splitlines() if journal.exists() else ():
        with contextlib.suppress(ValueError, KeyError, TypeError, OSError):
            record = json.loads(line)
            if all(_sha256(partial / file["name"]) == file["sha256"] for file in record["files"]):
                finished[record["name"]] = record
    kept = {file["name"] for record in finished.values() for file in record["files"]}
    for file in partial.iterdir():
        if file.name not in kept:
            file.unlink()
    for record in finished.values():
        _append(journal, record)
    return finished


def _write_shards(partial, finished, corpus, tokenizer, packing, progress) -> list[dict]:
    """Write the missing shards; the journal's records of all."""
    known = frozenset(finished)

    def encode(job):
        name, unit = job
        return name, _encode(tokenizer, unit, only_measure=name in known)

    workers, shards = _workers(), []
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        results = _in_order(pool, encode, _jobs(corpus, tokenizer, packing), ahead=2 * workers)
        for name, group in itertools.groupby(results, operator.itemgetter(0)):
            units = _counted((unit for _, unit in group), progress)
            if name not in finished:
                finished[name] = _write_shard(partial, name, units)
            elif hashlib.sha256(b"".join(u.text_sha256 for u in units)).hexdigest() != finished[name]["text_sha256"]:
                raise TextChangedError(f"{corpus.name} changed while it was read: run the command again")
            shards.append(finished[name])
    return shards


def _workers() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _counted(units: Iterable["_Encoded"], progress: Progress) -> Iterator["_Encoded"]:
    for unit in units:
        progress.advance(unit.bytes)
        yield unit


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
    """A unit's tokens, the index of each document's first token; its text's length and digest."""

    tokens: np.ndarray
    starts: np.ndarray
    characters: int
    bytes: int
    text_sha256: bytes


def _jobs(corpus: Corpus, tokenizer: tokenizers.Tokenizer, packing: str) -> Iterator[tuple[str, list[_Part]]]:
    """(Shard, unit) for the whole text."""
    for split, group in itertools.groupby(corpus.pieces(), operator.itemgetter(0)):
        pieces = (piece for _, piece in group)
        parts = _stream(pieces, tokenizer) if packing == "stream" else _documents(pieces, tokenizer)
        for number, unit in enumerate(_units(parts)):
            yield f"{split}-{number // SHARD:05d}", unit


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


def _encode(tokenizer: tokenizers.Tokenizer, unit: list[_Part], only_measure: bool) -> _Encoded:
    text = "".join(part.text for part in unit)
    encoded = text.encode()
    ids = [] if only_measure else [tokenizer.encode(part.text, part.continues) for part in unit]
    firsts = np.cumsum([0, *map(len, ids)])[:-1]
    starts = firsts[[part.begins for part in unit]] if ids else firsts
    tokens = np.concatenate(ids).astype(_dtype(tokenizer)) if ids else firsts
    return _Encoded(tokens, starts.astype("<i8"), len(text), len(encoded), hashlib.sha256(encoded).digest())


def _dtype(tokenizer: tokenizers.Tokenizer) -> np.dtype:
    size = tokenizer.vocab_size
    return np.dtype("u1" if size <= 1 << 8 else "<u2" if size <= 1 << 16 else "<u4")


def _write_shard(partial: Path, name: str, units: Iterable[_Encoded]) -> dict:
    """Write the units of a shard, and record it in the journal."""
    record = {"name": name, "tokens": 0, "documents": 0, "characters": 0, "bytes": 0}
    text = hashlib.sha256()
    with _NewFile(partial / f"{name}.bin") as tokens, _NewFile(partial / f"{name}.starts") as starts:
        for unit in units:
            tokens.write(unit.tokens)
            starts.write(unit.starts + record["tokens"])
            record["tokens"] += len(unit.tokens)
            record["documents"] += len(unit.starts)
            record["characters"] += unit.characters
            record["bytes"] += unit.bytes
            text.update(unit.text_sha256)
    record["text_sha256"] = text.hexdigest()
    record["files"] = [tokens.facts, starts.facts]
    _append(partial / _JOURNAL, record)
    return record


class _NewFile:
    """A file of arrays, renamed to its path when it is complete and synced; `facts` are its name, size and sha256."""

    def __init__(self, path: Path):
        self._path, self._unfinished = path, path.with_name(f"{path.name}.{os.getpid()}.new")
        self._digest, self._size, self._file = hashlib.sha256(), 0, None

    def __enter__(self):
        self._file = self._unfinished.open("wb")
        return self

    def write(self, array: np.ndarray) -> None:
        data = array.tobytes()
        self._file.write(data)
        self._digest.update(data)
        self._size += len(data)

    def __exit__(self, kind, *_):
        try:
            with self._file:
                self._file.flush()
                os.fsync(self._file.fileno())
            if kind is None:
                os.replace(self._unfinished, self._path)
                self.facts = {"name": self._path.name, "bytes": self._size, "sha256": self._digest.hexdigest()}
        finally:
            self._unfinished.unlink(missing_ok=True)


def _splits(partial: Path, shards: list[dict]) -> dict[str, dict]:
    """The manifest's part about the splits; writes their documents' starts."""
    splits = {}
    for split in SPLITS:
        here = [shard for shard in shards if shard["name"].startswith(f"{split}-")]
        facts = {name: sum(shard[name] for shard in here) for name in ("tokens", "documents", "characters", "bytes")}
        facts["files"] = [shard["files"][0] for shard in here]
        if facts["documents"]:
            first = 0
            with _NewFile(partial / _documents_file(split)) as starts:
                for shard in here:
                    starts.write(np.fromfile(partial / shard["files"][1]["name"], "<i8") + first)
                    first += shard["tokens"]
            facts["files"].append(starts.facts)
        splits[split] = facts
    return splits


# --------------------------------------------------------------------------------------------------------------- files


def _documents_file(split: str) -> str:
    return f"{split}.documents.bin"


def _append(journal: Path, record: dict) -> None:
    with journal.open("a") as file:
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of(manifest: dict) -> str:
    return cache.digest({name: value for name, value in manifest.items() if name != "sha256"})


def _read_manifest(path: Path) -> dict:
    file = path / _MANIFEST
    try:
        if not stat.S_ISREG(file.lstat().st_mode):
            raise _damaged(path, f"{_MANIFEST} is not a regular file")
        manifest = files.read_json(file)
        _check_manifest(manifest)
        return manifest
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}): remove {path}, and it is made again") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, f"{_MANIFEST} is not one of a token store") from error


def _check_manifest(manifest: dict) -> None:
    """Raise unless the fields are as `_make` writes them; files are named without a folder."""
    if manifest["dtype"] not in ("|u1", "<u2", "<u4") or not isinstance(manifest["sha256"], str):
        raise ValueError
    manifest["key"]["version"]
    for split in SPLITS:
        facts = manifest["splits"][split]
        sizes = [facts[name] for name in ("tokens", "documents", "characters", "bytes")]
        sizes += [file["bytes"] for file in facts["files"]]
        if not all(type(size) is int and size >= 0 for size in sizes):
            raise ValueError
        names = [file["name"] for file in facts["files"]]
        expected = [_documents_file(split)] if facts["documents"] else []
        shards = [name for name in names if name not in expected]
        if shards + expected != names or not all(re.fullmatch(rf"{split}-\d{{5}}\.bin", name) for name in shards):
            raise ValueError


def _check_size(folder: Path, file: dict) -> None:
    path = folder / file["name"]
    try:
        found = path.lstat()
    except OSError as error:
        raise _damaged(folder, f"{path.name}: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        raise _damaged(folder, f"{path.name} is not a regular file")
    if found.st_size != file["bytes"]:
        raise _damaged(folder, f"{path.name} has {found.st_size} bytes instead of {file['bytes']}")


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
        yield  # without locks both write the same files
