"""Corpora: exact text, one split point, read once, one-line errors."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
import tensorflow_datasets as tfds

from attnlab.data import cache, corpora, datasets
from attnlab.support.errors import UserError


class AttnlabFolktales(tfds.core.GeneratorBasedBuilder):
    """A typical TFDS text dataset: two splits, a label, two documents per split."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = tfds.features.FeaturesDict({"story": tfds.features.Text(), "label": np.int64})
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        return {split: self._generate_examples(split) for split in ("train", "test")}

    def _generate_examples(self, split):
        for key in range(2):
            yield key, {"story": f"{split} story {key} ñ", "label": key}


class AttnlabNeedsTensorflow(AttnlabFolktales):
    """A dataset whose preparation imports TensorFlow."""

    def _generate_examples(self, split):
        raise ModuleNotFoundError("No module named 'tensorflow'", name="tensorflow")
        yield


class AttnlabNeedsBeam(tfds.core.BeamBasedBuilder):
    """A dataset that Apache Beam prepares."""

    VERSION, _info = AttnlabFolktales.VERSION, AttnlabFolktales._info

    def _split_generators(self, dl_manager):
        return {"train": self._build_pcollection(None)}

    def _build_pcollection(self, pipeline):
        raise AssertionError("called without Beam")


def text_of(name, **options) -> str:
    return corpora.read_text(name, **options).text


def settled(path: Path, text: str = "") -> str:
    """Write a file that looks old enough for its sha256 to be remembered; returns its path."""
    path.write_bytes(text.encode()) if text else None
    os.utime(path, ns=(0, path.stat().st_mtime_ns - 10**10))
    return str(path)


def test_python_docs_is_the_language_reference_and_its_end_is_held_out():
    strings = corpora.read_text("python_docs", validation_fraction=0.25)
    assert strings.text.startswith(topics[min(topics)].strip()[:100]) and len(strings.text) > 400_000
    assert all(topics[name].strip() in strings.text for name in ("yield", "lambda"))
    corpus = corpora.load("python_docs", validation_fraction=0.25)
    assert len(strings.train) == corpus.train_characters == int(0.75 * len(strings.text))
    assert corpus.sha256 == hashlib.sha256(strings.text.encode()).hexdigest()


def test_corpus_knows_lengths_and_alphabet(tmp_path):
    (tmp_path / "a.txt").write_text("año, 年\n" * 300_000)
    corpus = corpora.load("text", path=f"{tmp_path}/a.txt")
    assert (corpus.characters, corpus.bytes) == (2_100_000, 3_000_000)
    assert corpus.alphabet == "\n ,aoñ年"


@pytest.mark.parametrize("size", [2000, 5000, 10**6])
def test_sample_is_evenly_spaced_or_all(tmp_path, size):
    text = "".join(f"{number:6d}\n" for number in range(20_000))
    (tmp_path / "a.txt").write_text(text)
    sample = corpora.load("text", path=f"{tmp_path}/a.txt").sample(size)
    assert size * 0.8 < len(sample) <= size or sample == text
    starts = [text.index(sample[at : at + 14]) for at in range(0, len(sample) - 14, max(1, len(sample) // 64))]
    assert starts == sorted(starts) and starts[0] == 0 and starts[-1] > 0.9 * len(text)
    assert sample == corpora.load("text", path=f"{tmp_path}/a.txt").sample(size)


def test_known_file_is_read_again_only_if_its_cached_scan_is_corrupt(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = settled(tmp_path / "a.txt", "a text to remember\n" * 99)
    before = corpora.load("text", path=path)
    with monkeypatch.context() as patch:
        patch.setattr(corpora, "_scan", None)
        assert corpora.load("text", path=path) == before
    (remembered,) = (cache.folder() / "scans").iterdir()
    for content in (b"", b"{", b"[]", remembered.read_bytes().replace(b"99", b"98", 1)[:-5], b'{"fact": {}}'):
        remembered.write_bytes(content)
        assert corpora.load("text", path=path) == before


def test_unwritable_cache_is_ignored(tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "a.txt"
    for text in ("before " * 9, "after " * 9):  # a file that changed is read again
        assert corpora.load("text", path=settled(path, text)) == corpora.load("text", path=str(path))
        assert text_of("text", path=str(path)) == text


def test_glob_joins_files_in_name_order_at_line_ends(tmp_path):
    for name, text in (("b.txt", "second\n"), ("a.txt", "first"), ("c.txt", "third"), ("a[1].txt", "a file")):
        (tmp_path / name).write_text(text)
    assert text_of("text", path=f"{tmp_path}/?.txt") == "first\nsecond\nthird"
    assert text_of("text", path=f"{tmp_path}/a[1].txt") == "a file"


@pytest.fixture
def manual(tmp_path, monkeypatch) -> Path:
    """A TFDS folder that has the text of a book, with its notices, in place of a download."""
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(tmp_path))
    (tmp_path / "downloads" / "manual").mkdir(parents=True)
    notices = "A notice\r\n*** START OF THE PROJECT GUTENBERG EBOOK ***\r\n\r\n{}\r\n*** END OF THE PROJECT ***\r\nmore"
    (tmp_path / "downloads" / "manual" / "quijote.txt").write_bytes(notices.format(STORY).encode())
    return tmp_path


STORY = "En un lugar de la Mancha, de cuyo nombre no quiero acordarme" * 5


def test_quijote_from_manual_folder_drops_gutenberg_notice(manual):
    assert text_of("quijote") == STORY + "\n"


def test_quijote_without_network_says_where_to_put_it(tmp_path, monkeypatch):
    monkeypatch.setattr(tfds.core.constants, "DATA_DIR", str(tmp_path))
    monkeypatch.setattr(datasets, "GUTENBERG_QUIJOTE", "http://127.0.0.1:9/pg2000.txt")
    monkeypatch.setattr(datasets, "RETRIES", 0)
    with pytest.raises(UserError, match=r"manual/quijote\.txt.*--config\.data\.path=FILE") as error:
        corpora.load("quijote")
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_processes_may_prepare_one_dataset_concurrently(manual):
    program = "from attnlab.data import corpora; print(corpora.load('quijote').sha256)"
    command = [sys.executable, "-c", program]
    several = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    digest = hashlib.sha256((STORY + "\n").encode()).hexdigest()
    assert [one.communicate()[0].strip() for one in several] == [digest] * 2


def test_damaged_prepared_dataset_is_refused(manual):
    corpora.load("quijote")
    (record,) = manual.rglob("*.array_record*")
    for size in (100, 0):
        os.truncate(record, size)
        with pytest.raises(UserError) as error:
            corpora.load("quijote")
        assert "\n" not in str(error.value)


def test_tfds_dataset_keeps_its_own_splits(monkeypatch):
    corpus = corpora.read_text("tfds:attnlab_folktales")
    assert sorted(corpus.train.split("\n\n")) == ["train story 0 ñ", "train story 1 ñ"]
    assert sorted(corpus.validation.strip().split("\n\n")) == ["test story 0 ñ", "test story 1 ñ"]
    prepared = corpora.load("tfds:attnlab_folktales")
    assert corpus.validation.startswith("\n\n") and len(corpus.text) == prepared.characters
    # Once prepared, it is read without its builder.
    monkeypatch.delitem(tfds.core.registered._DATASET_REGISTRY, "attnlab_folktales")
    assert corpora.load("tfds:attnlab_folktales") == prepared


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("quixote", {}, r"data\.name = 'quixote': .*tfds:NAME"),
        ("tfds:no_such_set", {}, "not a TFDS dataset"),
        ("tfds:attnlab_needs_tensorflow", {}, "attnlab_needs_tensorflow needs tensorflow, .*tfds build"),
        ("tfds:attnlab_needs_beam", {}, "attnlab_needs_beam needs Apache Beam: .*tfds build"),
        ("tfds:attnlab_folktales", {"feature": "title"}, "text features story"),
        ("python_docs", {"feature": "title"}, "has no features"),
        ("text", {}, "--config.data.path=FILE"),
        ("text", {"path": "/no/such/file.txt"}, "'/no/such/file.txt': no such file"),
        ("text", {"path": "{tmp}"}, "is a folder"),
        ("text", {"path": "{tmp}/empty.txt"}, "is empty"),
        ("python_docs", {"validation_fraction": 1.5}, r"data\.validation_fraction = 1\.5"),
        ("text", {"path": "a", "mixture": "quijote=1"}, "data.path and data.mixture"),
        ("mixture", {"mixture": "quijote"}, "'quijote': .*NAME=WEIGHT"),
        ("mixture", {"mixture": "quijote=0"}, "'quijote=0': .*NAME=WEIGHT"),
        ("mixture", {"mixture": "a=1,a=2"}, "'a=2': .*each name once"),
        ("mixture", {"mixture": "/no/such/file=1"}, "'/no/such/file': no such file"),
    ],
)
def test_unreadable_corpus_raises_one_line(tmp_path, name, options, message):
    (tmp_path / "empty.txt").write_text("")
    options = {key: value.format(tmp=tmp_path) if isinstance(value, str) else value for key, value in options.items()}
    with pytest.raises(UserError, match=message) as error:
        corpora.load(name, **options)
    assert "\n" not in str(error.value)


def test_mixture_has_one_digest_of_texts_and_weights(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"{name} text\n" * 999)

    def mixed(mixture):
        return corpora.load("mixture", mixture=mixture.format(tmp=tmp_path))

    mixture = mixed("{tmp}/a.txt=3, {tmp}/b*.txt=0.5")
    assert mixture.weights == (6, 1) and mixture.alphabet == "\n abetx"
    assert mixture.characters == sum(part.characters for part in mixture.parts)
    assert mixture.sha256 == mixed("{tmp}/a.txt=12,{tmp}/b.txt=2").sha256
    assert mixture.sha256 != mixed("{tmp}/a.txt=1, {tmp}/b.txt=1").sha256
    sample = mixture.sample(2000)
    assert 4 < sample.count("a") / sample.count("b") < 8
