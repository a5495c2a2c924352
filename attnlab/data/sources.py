"""Documents from files: text, JSONL, Parquet and array_record, read piece by piece in bounded memory.

The documents of a source join to one text: text files at line ends, other documents with blank lines.
"""

import codecs
import contextlib
import functools
import glob
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from attnlab.support.errors import UserError

CHUNK = 1 << 20  # bytes read at once
LONGEST_LINE = 1 << 30  # bytes of a document in JSONL
SEPARATOR = "\n\n"  # between documents that are not files
_COMPRESSED = {".gz": "gunzip", ".zst": "unzstd", ".bz2": "bunzip2", ".xz": "unxz", ".zip": "unzip"}


class Piece(NamedTuple):
    """A part of a document; `ends` at its end, `held_out` in a validation split of the source."""

    text: str
    ends: bool = True
    held_out: bool = False


@runtime_checkable
class Source(Protocol):
    """A text in pieces, which can be read several times; `feature` is where its documents hold the text, or ""."""

    feature: str

    def signature(self) -> list | None:
        """A key of the content without reading it: paths, sizes, times, …; None if there is none."""

    def pieces(self) -> Iterator[Piece]:
        """The text; UserError for files that cannot be read."""


class Files(NamedTuple):
    """Files of one kind, "text" or of `READERS`; `feature` is the field, column or feature with the text."""

    kind: str
    paths: tuple[str, ...]
    feature: str

    def signature(self) -> list | None:
        return [self.kind, self.feature, stamps(self.paths)]

    def pieces(self) -> Iterator[Piece]:
        if self.kind == "text":
            return _text_files(self.paths)
        read = READERS[self.kind]
        return joined(itertools.chain.from_iterable(read(path, self.feature) for path in self.paths))


def find(path: str, feature: str = "") -> Files:
    """The files of a path (which wins over a glob of the same name) or a glob, all of one kind."""
    expanded = os.path.expanduser(path)
    paths = [expanded] if os.path.exists(expanded) else sorted(glob.glob(expanded, recursive=True))
    if not paths:
        raise UserError(f"data.path = {path!r}: no such file, and no file matches it as a glob")
    kinds = {}
    for file in paths:
        if os.path.isdir(file):
            raise UserError(f"{file} is a folder: give a file, or a glob such as '{file}/*.txt'")
        if not os.path.isfile(file):
            raise UserError(f"{file} is a pipe or a device, and a text is read several times: write it to a file")
        kinds.setdefault(_kind(file), file)
    if len(kinds) > 1:
        named = ", ".join(f"{file} ({kind})" for kind, file in kinds.items())
        raise UserError(f"data.path = {path!r} matches files of several kinds: {named}: give a glob for one kind")
    (kind,) = kinds
    if kind in ("JSONL", "Parquet"):
        feature = feature or "text"
    return Files(kind, tuple(os.path.abspath(file) for file in paths), feature if kind != "text" else "")


def stamps(paths: Iterable[str]) -> list:
    """The path, size, time and inode of each file."""
    found = []
    for path in paths:
        with one_line(path):
            stat = os.stat(path)
        found.append([path, stat.st_size, stat.st_mtime_ns, stat.st_ino])
    return found


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
    """Raise an OSError in the block as a UserError that names the file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def _kind(path: str) -> str:
    suffix = Path(path).suffix.lower()
    if suffix in _COMPRESSED:
        raise UserError(f"{path} is compressed: decompress it first, e.g. {_COMPRESSED[suffix]} {path}")
    if ".array_record" in Path(path).name:
        return "array_record"
    return {".jsonl": "JSONL", ".ndjson": "JSONL", ".parquet": "Parquet"}.get(suffix, "text")


def _text_files(paths: tuple[str, ...]) -> Iterator[Piece]:
    """One document per file, with a newline at its end if it has none and is not the last."""
    for path in paths:
        end = ""
        for text in _text_file(path):
            end = text[-1:] or end
            yield Piece(text, ends=False)
        yield Piece("" if end == "\n" or path == paths[-1] else "\n")


def _text_file(path: str) -> Iterator[str]:
    with one_line(path), open(path, "rb") as file:
        offset, rest, first = 0, b"", True
        while True:
            read = file.read(CHUNK)
            data = rest + read
            try:
                text, used = codecs.utf_8_decode(data, "strict", not read)
            except UnicodeDecodeError as error:
                where = f"byte {offset + error.start} is 0x{data[error.start]:02x}"
                raise UserError(
                    f"{path} is not UTF-8 ({where}): convert it first, e.g. iconv -f latin1 -t utf-8"
                ) from error
            yield text.removeprefix("\ufeff") if first and text else text
            first, offset, rest = first and not text, offset + used, data[used:]
            if not read:
                return


def _jsonl_file(path: str, feature: str) -> Iterator[str]:
    """One document per line; blank lines are skipped."""
    with one_line(path), open(path, "rb") as file:
        for number, line in enumerate(iter(functools.partial(file.readline, LONGEST_LINE), b""), 1):
            if len(line) == LONGEST_LINE:
                raise UserError(
                    f"{path} line {number} has {LONGEST_LINE:,} bytes or more: give one JSON object per line"
                )
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if not line.strip():
                continue
            where = f"{path} line {number}"
            try:
                record = json.loads(line.decode())
            except UnicodeDecodeError as error:
                raise UserError(f"{where} is not UTF-8: convert it first, e.g. iconv -f latin1 -t utf-8") from error
            except (ValueError, RecursionError) as error:
                raise UserError(f"{where} is not JSON ({error}): give one JSON object per line") from error
            if not isinstance(record, dict):
                raise UserError(f"{where} is not a JSON object: give one JSON object per line")
            if feature not in record:
                raise _no_feature(where, "field", feature, record)
            yield _checked(record[feature], where, feature)


def _parquet_file(path: str, feature: str) -> Iterator[str]:
    """One document per row."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(f"{path} needs pyarrow to be read: pip install 'attnlab[parquet]'") from error
    try:
        with one_line(path), parquet.ParquetFile(path) as file:
            columns, number = file.schema_arrow.names, 0
            if feature not in columns:
                raise _no_feature(path, "column", feature, columns)
            for batch in file.iter_batches(batch_size=256, columns=[feature]):
                for value in batch.column(0):
                    number += 1
                    yield _checked(value.as_py(), f"{path} row {number}", feature)
    except UserError:
        raise
    except UnicodeDecodeError as error:
        raise UserError(f"{path} row {number + 1} is not UTF-8: write the column as UTF-8 strings") from error
    except (pyarrow.ArrowException, ValueError) as error:
        first = str(error).splitlines()[0]
        raise UserError(f"{path} is not a Parquet file that pyarrow reads ({first}): write it again") from error


def _array_record_file(path: str, feature: str) -> Iterator[str]:
    """One document per record: UTF-8, or the feature of a tf.Example."""
    from array_record.python import array_record_module

    read_text = _example_reader(feature) if feature else _decoded
    with one_line(path):
        open(path, "rb").close()  # the library's own message has many lines
    with _intact(path):
        reader = array_record_module.ArrayRecordReader(path, "readahead_buffer_size:0,max_parallelism:0")
        count = reader.num_records()
        if not count:
            reader.close()  # raises the error of a file of another format
    for start in range(0, count, 64):
        with _intact(path):
            records = reader.read(start, min(start + 64, count))
        for number, record in enumerate(records, start + 1):
            yield read_text(record, f"{path} record {number}")


@contextlib.contextmanager
def _intact(path: str):
    try:
        yield
    except Exception as error:  # the library raises RuntimeError and IndexError
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path} is not an intact array_record file ({said}): write it again") from error


def _example_reader(feature: str) -> Callable[[bytes, str], str]:
    # These classes do not need TensorFlow.
    from google.protobuf.message import DecodeError
    from tensorflow_datasets.proto import tf_example_generated_pb2 as protos

    def read(record: bytes, where: str) -> str:
        try:
            features = protos.Example.FromString(record).features.feature
        except DecodeError as error:
            raise UserError(
                f"{where} is not a tf.Example: leave data.feature empty for records of plain text"
            ) from error
        if feature not in features:
            raise _no_feature(where, "feature", feature, sorted(features))
        values = features[feature].bytes_list.value
        if len(values) != 1:
            raise UserError(f"{where}: {feature!r} holds {len(values)} strings: expected one")
        return _decoded(values[0], where)

    return read


def _decoded(record: bytes, where: str) -> str:
    try:
        return record.decode()
    except UnicodeDecodeError as error:
        hint = "name the text of tf.Example protos with data.feature, or write the records as UTF-8"
        raise UserError(f"{where} is not UTF-8 (byte {error.start} is 0x{record[error.start]:02x}): {hint}") from error


def _no_feature(where, what: str, feature: str, names: Iterable[str]) -> UserError:
    there = ", ".join(map(str, itertools.islice(names, 20))) or "(none)"
    return UserError(f"{where} has no {what} {feature!r}: choose one of {there} with --config.data.feature=…")


def _checked(value, where: str, feature: str) -> str:
    if not isinstance(value, str):
        found = "null" if value is None else f"a {type(value).__name__}"
        raise UserError(f"{where}: {feature!r} is {found}: expected text; drop such documents first")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where} contains a lone surrogate (half a character): give text in UTF-8") from error
    return value


READERS = {"JSONL": _jsonl_file, "Parquet": _parquet_file, "array_record": _array_record_file}
