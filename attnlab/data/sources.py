"""Documents from text, JSONL and Parquet files, read piece by piece in bounded memory.

The documents of a source are joined into one text: text files at a newline, other documents by a blank line.
"""

import codecs
import contextlib
import functools
import glob
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from attnlab.support.errors import UserError
from attnlab.support.extras import require

CHUNK = 1 << 20  # bytes read at once
LONGEST_LINE = 1 << 30  # bytes of a JSONL document
SEPARATOR = "\n\n"  # between documents that are not files


class Piece(NamedTuple):
    """A part of a document; `ends`: whether it is the last part; `held_out`: whether it is in the validation split."""

    text: str
    ends: bool = True
    held_out: bool = False


@runtime_checkable
class Source(Protocol):
    """A text in pieces that can be read several times; `feature` names the field with the documents' text, if any."""

    feature: str

    def signature(self) -> list | None:
        """A key that identifies the content without reading it: paths, sizes, times, …; None if there is none."""

    def pieces(self) -> Iterator[Piece]:
        """Yield the text; raise UserError for files that cannot be read."""


class PythonDocs(NamedTuple):
    """The language reference that comes with CPython, topic by topic; it differs between Python versions."""

    feature: str = ""

    def signature(self) -> None:
        return None

    def pieces(self) -> Iterator[Piece]:
        from pydoc_data.topics import topics

        return joined((text.strip() + "\n\n\n" for _, text in sorted(topics.items())), separator="")


class Files(NamedTuple):
    """Files of one kind, "text", "JSONL" or "Parquet"; `feature` is the field or column with the text."""

    kind: str
    paths: tuple[str, ...]
    feature: str

    def signature(self) -> list:
        return [self.kind, self.feature, stamps(self.paths)]

    def pieces(self) -> Iterator[Piece]:
        if self.kind == "text":
            return _text_files(self.paths)
        read = _jsonl_file if self.kind == "JSONL" else _parquet_file
        return joined(itertools.chain.from_iterable(read(path, self.feature) for path in self.paths))


def find(path: str, feature: str = "") -> Files:
    """Find the files of a path or a glob, all of one kind; a path wins over a glob of the same name."""
    expanded = os.path.expanduser(path)
    paths = [expanded] if os.path.exists(expanded) else sorted(glob.glob(expanded, recursive=True))
    if not paths:
        raise UserError(f"data.path = {path!r}: no such file, and no file matches it as a glob")
    kinds = {_kind(file): file for file in paths}
    if len(kinds) > 1:
        named = ", ".join(f"{file} ({kind})" for kind, file in kinds.items())
        raise UserError(f"data.path = {path!r} matches files of several kinds: {named}: give a glob for one kind")
    (kind,) = kinds
    return Files(kind, tuple(map(os.path.abspath, paths)), "" if kind == "text" else feature or "text")


def _kind(path: str) -> str:
    if os.path.isdir(path):
        raise UserError(f"{path} is a folder: give a file, or a glob such as '{path}/*.txt'")
    if not os.path.isfile(path):
        raise UserError(f"{path} is a pipe or a device, but a text is read several times: write it to a file")
    suffix = Path(path).suffix.lower()
    if suffix in (".gz", ".zst", ".bz2", ".xz", ".zip"):
        raise UserError(f"{path} is compressed: decompress it first")
    if ".array_record" in Path(path).name:
        raise UserError(f"{path}: array_record is read as a TFDS dataset: use tfds:NAME, or write JSONL or Parquet")
    return {".jsonl": "JSONL", ".ndjson": "JSONL", ".parquet": "Parquet"}.get(suffix, "text")


def stamps(paths: Iterable[str]) -> list:
    """The path, size, time and inode of each file."""
    entries = []
    for path in paths:
        with one_line(path):
            stat = os.stat(path)
        entries.append([path, stat.st_size, stat.st_mtime_ns, stat.st_ino])
    return entries


def joined(documents: Iterable[str], separator: str = SEPARATOR, held_out: bool = False) -> Iterator[Piece]:
    """Documents with a separator after each but the last."""
    before = None
    for document in documents:
        if before is not None:
            yield Piece(before + separator, True, held_out)
        before = document
    if before is not None:
        yield Piece(before, True, held_out)


@contextlib.contextmanager
def one_line(path):
    """Convert an OSError in the block to a UserError that names the file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def _text_files(paths: tuple[str, ...]) -> Iterator[Piece]:
    """One document per file, with a newline at its end if it has none and is not the last."""
    for path in paths:
        end = ""
        for text in _text_file(path):
            end = text[-1:] or end
            yield Piece(text, ends=False)
        yield Piece("" if end == "\n" or path == paths[-1] else "\n")


def _text_file(path: str) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    with one_line(path), open(path, "rb") as file:
        for data in itertools.chain(iter(functools.partial(file.read, CHUNK), b""), [b""]):
            try:
                yield decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                offset = file.tell() - len(error.object) + error.start
                raise UserError(
                    f"{path} is not UTF-8 (byte {offset} is 0x{error.object[error.start]:02x}): convert it first, "
                    "e.g. iconv -f latin1 -t utf-8"
                ) from error


def _jsonl_file(path: str, feature: str) -> Iterator[str]:
    """One document per line; blank lines are skipped."""
    with one_line(path), open(path, "rb") as file:
        for number, line in enumerate(iter(functools.partial(file.readline, LONGEST_LINE), b""), 1):
            if not line.strip():
                continue
            where = f"{path} line {number}"
            try:
                record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (ValueError, RecursionError) as error:
                raise UserError(f"{where} is not JSON in UTF-8 ({error}): give one JSON object per line") from error
            if not isinstance(record, dict):
                raise UserError(f"{where} is not a JSON object: give one JSON object per line")
            yield _text_of(record, where, feature)


def _parquet_file(path: str, feature: str) -> Iterator[str]:
    """One document per row."""
    pyarrow = require("pyarrow", "data", path)
    from pyarrow import parquet

    number = 0
    try:
        with one_line(path), parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            for batch in file.iter_batches(batch_size=256, columns=[feature] if feature in columns else columns):
                for record in batch.to_pylist():
                    number += 1
                    yield _text_of(record, f"{path} row {number}", feature)
    except UserError:
        raise
    except (pyarrow.ArrowException, ValueError) as error:  # also text that is not UTF-8
        first = str(error).splitlines()[0]
        raise UserError(f"{path} cannot be read after row {number} ({first}): write it again, in UTF-8") from error


def _text_of(record: dict, where: str, feature: str) -> str:
    if feature not in record:
        names = ", ".join(itertools.islice(record, 20)) or "(none)"
        raise UserError(f"{where} has no {feature!r}: choose one of {names} with --config.data.feature=…")
    text = record[feature]
    if not isinstance(text, str):
        kind = "null" if text is None else f"a {type(text).__name__}"
        raise UserError(f"{where}: {feature!r} is {kind}: expected text; drop such documents first")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where} contains a lone surrogate (half a character): give text in UTF-8") from error
    return text
