"""Sources: documents of every kind of file, in bounded memory, with one-line errors."""

import json
import os
import sys
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from attnlab.data import sources
from attnlab.support.errors import UserError

DOCUMENTS = ["un año\n", "", "二つ\nlines", "x" * 5000]


def write_jsonl(path, documents, field="text"):
    lines = [json.dumps({"id": number, field: document}) for number, document in enumerate(documents)]
    path.write_text("\n".join(lines) + "\n\n")


def write_parquet(path, documents, field="text"):
    table = pyarrow.table({"id": list(range(len(documents))), field: pyarrow.array(documents, pyarrow.string())})
    parquet.write_table(table, path, row_group_size=2)


def documents_of(path, feature="") -> list[str]:
    documents, document = [], ""
    for piece in sources.find(str(path), feature).pieces():
        document += piece.text
        if piece.ends:
            documents.append(document)
            document = ""
    assert not document
    return documents


@pytest.mark.parametrize(
    "name, write, feature",
    [
        ("a.jsonl", write_jsonl, ""),
        ("a.ndjson", write_jsonl, "body"),
        ("a.parquet", write_parquet, ""),
        ("a.parquet", write_parquet, "body"),
    ],
)
def test_documents_are_joined_by_blank_lines(tmp_path, name, write, feature):
    write(tmp_path / name, DOCUMENTS, feature or "text")
    expected = [document + "\n\n" for document in DOCUMENTS[:-1]] + DOCUMENTS[-1:]
    assert documents_of(tmp_path / name, feature) == expected


def test_files_of_one_kind_are_joined_in_name_order(tmp_path):
    for name in ("b", "a"):
        write_jsonl(tmp_path / f"{name}.jsonl", [f"{name}{i}" for i in range(2)])
    assert documents_of(tmp_path / "*.jsonl") == ["a0\n\n", "a1\n\n", "b0\n\n", "b1"]


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_chunks_do_not_cut_characters(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(sources, "CHUNK", chunk)
    (tmp_path / "a.txt").write_text("\ufeffaño\r\n二つ🙂" * 9)
    (tmp_path / "b.txt").write_text("")
    (tmp_path / "c.txt").write_text("end")
    assert documents_of(tmp_path / "*.txt") == [("\ufeffaño\r\n二つ🙂" * 9)[1:] + "\n", "\n", "end"]


def test_invalid_byte_is_counted_from_the_start_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "CHUNK", 10)
    (tmp_path / "a.txt").write_bytes("ñ".encode() * 17 + b"\xff" + b"a" * 50)
    with pytest.raises(UserError, match=r"a\.txt is not UTF-8 .*byte 34 .*0xff"):
        documents_of(tmp_path / "a.txt")
    (tmp_path / "a.txt").write_bytes(b"a" * 25 + "ñ".encode()[:1])
    with pytest.raises(UserError, match=r"\(byte 25 is 0xc3\)"):
        documents_of(tmp_path / "a.txt")


@pytest.mark.parametrize(
    "name, write, feature, message",
    [
        ("a.jsonl", (Path.write_bytes, b'{"text": "a"}\n{"text": '), "", r"a\.jsonl line 2 is not JSON"),
        ("a.jsonl", (Path.write_bytes, b'{"text": "\xf1"}'), "", r"line 1 is not JSON in UTF-8"),
        ("a.jsonl", (Path.write_bytes, b'{"text": "\\ud800"}'), "", r"line 1 .*lone surrogate"),
        ("a.jsonl", (Path.write_bytes, b'["text"]'), "", r"line 1 .*JSON object"),
        ("a.jsonl", (Path.write_bytes, b'{"body": "a", "id": 3}'), "", r"line 1 .*'text'.* body, id"),
        ("a.jsonl", (Path.write_bytes, b'{"text": null}'), "", r"line 1: 'text' is null"),
        ("a.jsonl", (Path.write_bytes, b"[" * 100_000), "", r"line 1 is not JSON"),
        ("a.parquet", (Path.write_bytes, b"PAR1 no"), "", r"a\.parquet cannot be read"),
        ("a.parquet", (write_parquet, ["a"], "body"), "", r"row 1 has no 'text': .* id, body"),
        ("a.parquet", (write_parquet, ["a", None]), "", r"row 2: 'text' is null"),
        ("a.parquet", (write_parquet, ["a"]), "id", r"row 1: 'id' is a int"),
        ("a.txt", (os.mkfifo,), "", r"a\.txt is a pipe or a device"),
        ("a.txt.gz", (Path.write_bytes, b""), "", r"a\.txt\.gz is compressed: decompress it"),
        ("a.array_record-00000-of-00001", (Path.write_bytes, b""), "", r"use tfds:NAME"),
    ],
)
def test_unreadable_document_raises_one_line(tmp_path, name, write, feature, message):
    write, *arguments = write
    write(tmp_path / name, *arguments)
    with pytest.raises(UserError, match=message) as error:
        documents_of(tmp_path / name, feature)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_files_of_several_kinds_are_refused(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["a"])
    (tmp_path / "b.txt").write_text("b")
    with pytest.raises(UserError, match=r"a\.jsonl \(JSONL\), .*b\.txt \(text\)"):
        documents_of(tmp_path / "*")


def test_missing_permission_raises_one_line(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "a.txt").write_text("a")
    monkeypatch.setattr(sources, "open", refuse, raising=False)
    with pytest.raises(UserError, match=r"a\.txt .*Permission denied"):
        documents_of(tmp_path / "a.txt")


def test_missing_library_names_the_extra(tmp_path, monkeypatch):
    write_parquet(tmp_path / "a.parquet", ["a"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"a\.parquet needs pyarrow: pip install 'attnlab\[data\]'"):
        documents_of(tmp_path / "a.parquet")
