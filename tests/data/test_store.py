"""Token stores: the tokens of the whole text, bit for bit, despite interruptions and damage."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from attnlab.data import cache, corpora, sources, store, tokenizers
from attnlab.support.errors import UserError

TEXTS = {
    "lines": "una línea, y otra\n" * 4000,
    "long words": ("x" * 20_000 + " ") * 8,
    "no spaces": "二つ" * 4000,
    "white space": ("  \n\t  a " * 9 + "\r\n\r\n") * 3000,
    "unusual spaces": "a\u2003b\x1c c\x85 \n" * 20_000,
}


def all_of(tokens: store.Tokens) -> np.ndarray:
    return tokens.read(np.array([0]), len(tokens))[0]


def digest_of(stored: store.Store) -> str:
    return json.loads((stored.path / "manifest.json").read_text())["sha256"]


def corpus_of(folder: Path, text: str):
    (folder / "text.txt").write_bytes(text.encode())
    return corpora.load("text", path=str(folder / "text.txt"))


@pytest.fixture
def small(monkeypatch):
    """Units of a few thousand characters."""
    monkeypatch.setattr(store, "UNIT", 3000)


@pytest.mark.parametrize(
    "kind, text",
    [("bpe", text) for text in TEXTS] + [(kind, "unusual spaces") for kind in tokenizers.KINDS if kind != "bpe"],
)
def test_cutting_a_text_changes_no_token(kind, text, tmp_path, monkeypatch, small):
    monkeypatch.setattr(sources, "CHUNK", 1000)
    text = TEXTS[text]
    tokenizer, corpus = tokenizers.make(kind, text, 400), corpus_of(tmp_path, text)
    stored = store.load(corpus, tokenizer, folder=tmp_path)
    cut = int(0.9 * len(text))
    for tokens, part in ((stored.train, text[:cut]), (stored.validation, text[cut:])):
        np.testing.assert_array_equal(all_of(tokens), tokenizer.encode(part))
        assert (tokens.characters, tokens.bytes) == (len(part), len(part.encode()))


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_documents_are_encoded_one_by_one(kind, tmp_path, small):
    draw = random.Random(0)
    documents = ["año " * draw.randint(1, 900) for _ in range(40)] + [""]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": document}) for document in documents))
    corpus = corpora.load("text", path=f"{tmp_path}/a.jsonl")
    text = "\n\n".join(documents)
    tokenizer = tokenizers.make(kind, text, 300)
    stored = store.load(corpus, tokenizer, packing="documents", folder=tmp_path)
    whole = [document + "\n\n" for document in documents[:-1]]
    cut = int(0.9 * len(text))
    expected, position = {"train": [], "validation": []}, 0
    for document in whole:  # the document across both splits becomes two
        at = min(max(cut - position, 0), len(document))
        expected["train"] += [document[:at]] * (at > 0)
        expected["validation"] += [document[at:]] * (at < len(document))
        position += len(document)
    for split, tokens in (("train", stored.train), ("validation", stored.validation)):
        encoded = [tokenizer.encode(document) for document in expected[split]]
        np.testing.assert_array_equal(all_of(tokens), np.concatenate(encoded))
        np.testing.assert_array_equal(tokens.documents, np.cumsum([0, *map(len, encoded)])[:-1])


def test_windows_are_the_text_at_their_starts(tmp_path, small):
    text = "".join(f"{number} " for number in range(9000))
    stored = store.load(corpus_of(tmp_path, text), tokenizers.ByteTokenizer(), folder=tmp_path)
    starts = np.array([0, 5999, 6000, 1, 17, len(stored.train) - 15_000])
    for start, window in zip(starts, stored.train.read(starts, 15_000)):
        assert bytes(window.tolist()).decode() == text[start : start + 15_000]
    for start in (-1, len(stored.train) - 14_999):
        with pytest.raises(IndexError):
            stored.train.read(np.array([start]), 15_000)


@pytest.mark.parametrize("size, bits", [(256, 8), (257, 16), ((1 << 16) + 1, 32)])
def test_tokens_take_as_few_bytes_as_the_vocabulary_needs(size, bits, tmp_path):
    text = "".join(map(chr, range(0x20000, 0x20000 + size))) * 2
    stored = store.load(corpus_of(tmp_path, text), tokenizers.make("char", text), folder=tmp_path)
    assert (stored.path / "train.bin").stat().st_size == len(stored.train) * bits // 8
    np.testing.assert_array_equal(all_of(stored.train), (np.arange(size * 2) % size)[: int(0.9 * size * 2)])


def test_store_depends_on_text_tokenizer_split_and_packing(tmp_path):
    corpus = corpus_of(tmp_path, TEXTS["lines"])
    byte, char = tokenizers.ByteTokenizer(), tokenizers.make("char", TEXTS["lines"])
    half = corpora.load("text", path=f"{tmp_path}/text.txt", validation_fraction=0.5)
    calls = [(corpus, byte, "stream"), (corpus, char, "stream"), (half, byte, "stream"), (corpus, byte, "documents")]
    stores = [store.load(c, t, packing=packing, folder=tmp_path) for c, t, packing in calls]
    assert len({one.path for one in stores}) == len(set(map(digest_of, stores))) == 4
    times = [(one.path / "manifest.json").stat().st_mtime_ns for one in stores]
    again = [store.load(c, t, packing=packing, folder=tmp_path) for c, t, packing in calls]
    assert [(one.path / "manifest.json").stat().st_mtime_ns for one in again] == times


def test_number_of_workers_does_not_change_the_store(tmp_path, monkeypatch, small):
    corpus, tokenizer = corpus_of(tmp_path, TEXTS["lines"]), tokenizers.make("bpe", TEXTS["lines"], 300)
    reference = store.load(corpus, tokenizer, folder=tmp_path / "reference")
    for workers in (1, 5):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=workers: range(n), raising=False)
        assert digest_of(store.load(corpus, tokenizer, folder=tmp_path / f"by {workers}")) == digest_of(reference)


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncate(file):
    os.truncate(file, 100)


def replace_by_device(file):
    file.unlink()
    file.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    "damage, name, noticed",
    [
        (Path.unlink, "manifest.json", "at the start"),
        (truncate, "validation.documents.bin", "at the start"),
        (replace_by_device, "train.bin", "at the start"),
        (flip_a_bit, "manifest.json", "at the start"),
        (flip_a_bit, "train.bin", "by verify"),
        (flip_a_bit, "validation.documents.bin", "by verify"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_damage_is_noticed_at_start_except_flipped_token_bits(damage, name, noticed, tmp_path):
    arguments = corpus_of(tmp_path, TEXTS["lines"]), tokenizers.make("byte", "")
    stored = store.load(*arguments, packing="documents", folder=tmp_path)
    damage(stored.path / name)
    if noticed == "by verify":
        stored = store.load(*arguments, packing="documents", folder=tmp_path)
        with pytest.raises(UserError, match=f"is damaged .{name} does not match its sha256.: remove it"):
            stored.verify()
    else:
        with pytest.raises(UserError, match=f"is damaged .{name}.*: remove it to have it rebuilt") as error:
            store.load(*arguments, packing="documents", folder=tmp_path)
        assert "\n" not in str(error.value)


def test_store_of_another_tokenizer_is_refused(tmp_path):
    corpus, char = corpus_of(tmp_path, TEXTS["lines"]), tokenizers.make("char", TEXTS["lines"])
    stored = store.load(corpus, tokenizers.ByteTokenizer(), folder=tmp_path)
    other = store.load(corpus, char, folder=tmp_path)
    shutil.rmtree(other.path)
    stored.path.rename(other.path)
    with pytest.raises(UserError, match="its key differs"):
        store.load(corpus, char, folder=tmp_path)


def test_bit_flipped_while_a_store_is_written_is_noticed(tmp_path, monkeypatch):
    write = store._NewFile.write

    def write_wrongly(self, array):
        write(self, array)
        self._file.seek(-1, os.SEEK_CUR)
        self._file.write(b"\0")

    monkeypatch.setattr(store._NewFile, "write", write_wrongly)
    with pytest.raises(UserError, match=r"train\.bin does not match its sha256"):
        store.load(corpus_of(tmp_path, TEXTS["lines"]), tokenizers.ByteTokenizer(), folder=tmp_path / "stores")
    assert not list((tmp_path / "stores").glob("*/"))


def test_unwritable_folder_raises_one_line(tmp_path, monkeypatch):
    corpus = corpus_of(tmp_path, TEXTS["lines"])
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written .*--config"):
        store.load(corpus, tokenizers.ByteTokenizer(), folder=tmp_path / "file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # the default
    stored = store.load(corpus, tokenizers.ByteTokenizer())
    assert stored.path.parent == tmp_path / "attnlab" / "tokens" == cache.folder()


def test_changed_text_leaves_no_partial_store(tmp_path):
    corpus = corpus_of(tmp_path, TEXTS["lines"])
    (tmp_path / "text.txt").write_text(TEXTS["lines"].upper())
    with pytest.raises(UserError, match="changed while it was read"):
        store.load(corpus, tokenizers.ByteTokenizer(), folder=tmp_path / "store")
    assert not list((tmp_path / "store").glob("*.partial"))


# ------------------------------------------------------------------------------------------------------ real processes

PROGRAM = """
import json, sys
from attnlab.data import corpora, store, tokenizers
from attnlab.support.errors import UserError
path, folder, kind = sys.argv[1:]
store.UNIT = 20_000
try:
    corpus = corpora.load("text", path=path)
    tokenizer = tokenizers.make(kind, corpus.sample(100_000), 300, corpus.alphabet)
    print("ready", flush=True)
    made = store.load(corpus, tokenizer, packing="documents", folder=folder, quiet=False)
    print(json.loads((made.path / "manifest.json").read_text())["sha256"], flush=True)
except UserError as error:
    sys.exit(f"error: {error}")
"""


def started(path, folder, kind="bpe", before=(), **options) -> subprocess.Popen:
    command = [*before, sys.executable, "-c", PROGRAM, str(path), str(folder), kind]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, **options)


def finished(path, folder, kind="bpe", **options) -> str:
    out, error = started(path, folder, kind, **options).communicate()
    assert not error, error
    return out.split()[-1]


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """A text of 2 MB."""
    path = tmp_path_factory.mktemp("large") / "text.txt"
    path.write_text(corpora.read_text("python_docs").text * 4)
    return path


def test_only_one_of_several_processes_writes_the_store(large, tmp_path):
    several = [started(large, tmp_path) for _ in range(2)]
    out = [one.communicate() for one in several]
    assert len({text.split()[-1] for text, _ in out}) == 1 and not any(error for _, error in out)
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1


@pytest.mark.slow
def test_store_after_kills_equals_an_undisturbed_one(large, tmp_path):
    reference, folder, draw = finished(large, tmp_path / "reference"), tmp_path / "killed", random.Random(0)
    undisturbed, left = started(large, tmp_path / "timed"), 0
    assert undisturbed.stdout.readline() == "ready\n"
    start = time.monotonic()
    undisturbed.communicate()
    seconds = time.monotonic() - start
    for kill in range(6):
        process = started(large, folder)
        assert process.stdout.readline() == "ready\n"
        time.sleep(seconds * (kill + draw.random()) / 6)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        left += bool(list(folder.glob("*.partial")))
        if kill % 3 == 2:
            assert finished(large, folder) == reference
            assert not list(folder.glob("*.partial"))
            shutil.rmtree(folder)
    assert finished(large, folder) == reference and left


def test_full_disk_prints_one_line_and_a_retry_succeeds(large, tmp_path):
    limited = ("bash", "-c", 'ulimit -f 30 && exec "$@"', "-")  # KiB per file
    _, error = started(large, tmp_path / "store", kind="byte", before=limited).communicate()
    assert len(error.splitlines()) == 1 and "make room there, or name another folder" in error, error
    assert finished(large, tmp_path / "store", kind="byte") == finished(large, tmp_path / "reference", kind="byte")
    assert not list((tmp_path / "store").glob("*.partial"))
