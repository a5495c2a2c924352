"""The text of a run: tokens from a store, mixtures, and what `config.json` says about them."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from attnlab import config as configs
from attnlab.data import corpora, tokenizers
from attnlab.training import text as texts
from attnlab.training.workdir import Workdir


def load(tmp_path, workdir="run", **fields):
    config = configs.default()
    config.model.context, config.eval.windows = 8, 40
    for name, value in fields.items():
        config.data[name] = value
    return texts.load(configs.completed(config), Workdir(tmp_path / workdir))


def test_bits_are_per_character_and_per_byte(tmp_path):
    text = "año y año, una y otra vez\n" * 300
    (tmp_path / "a.txt").write_text(text)
    loaded = load(tmp_path, path=f"{tmp_path}/a.txt", tokenizer="bpe", vocab_size=280)
    held_out = corpora.read_text("text", path=f"{tmp_path}/a.txt").validation
    tokens = len(loaded.tokenizer.encode(held_out))
    assert f"{tokens:,} validation tokens" in loaded.summary
    assert loaded.bits["bits_per_character"] == tokens / len(held_out) / math.log(2)
    assert loaded.bits["bits_per_byte"] == tokens / len(held_out.encode()) / math.log(2)
    assert loaded.corpus == {
        "name": "text",
        "sha256": corpora.load("text", path=f"{tmp_path}/a.txt").sha256,
        "characters": len(text),
    }


def test_mixture_weights_windows_and_bits(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefg\n" * 900)
    (tmp_path / "b.txt").write_text("二つ\n" * 900)
    loaded = load(tmp_path, mixture=f"{tmp_path}/a.txt=3, {tmp_path}/b.txt=1", tokenizer="byte")
    windows = np.concatenate([loaded.train[step].tokens for step in range(40)])
    assert np.mean(windows.max(axis=1) > 127) == 0.25
    assert loaded.validation.windows_of_texts == [30, 10]
    assert loaded.bits["bits_per_byte"] == pytest.approx(1 / math.log(2))
    # A window of 8 tokens has 8 characters of the first text, 8 · 3 / 7 of the second.
    assert loaded.bits["bits_per_character"] == pytest.approx(40 / (30 + 10 * 3 / 7) / math.log(2))
    assert loaded.corpus["name"] == "mixture"


def test_documents_have_different_segments(tmp_path):
    lines = [json.dumps({"text": "word " * length}) for length in range(1, 60)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    options = {"path": f"{tmp_path}/a.jsonl", "tokenizer": "byte", "store": str(tmp_path / "stores")}
    batch = load(tmp_path, **options, packing="documents").train[0]
    assert list((tmp_path / "stores").glob("*/manifest.json"))
    boundary = (batch.tokens[:, :-1] == ord("\n")) & (batch.tokens[:, 1:] == ord("w"))
    np.testing.assert_array_equal(np.diff(batch.segments, axis=1), boundary)
    assert load(tmp_path, **options).train[0].segments is None


def test_tokenizer_is_trained_on_a_sample_of_a_large_text(tmp_path):
    with (tmp_path / "a.txt").open("w") as file:
        file.write("plain words " * 150_000 + "Ω")
    loaded = load(tmp_path, path=f"{tmp_path}/a.txt", tokenizer="wordpiece", vocab_size=40, tokenizer_sample=1)
    sample = corpora.load("text", path=f"{tmp_path}/a.txt").sample(1 << 20)
    assert 0.9 * 2**20 < len(sample) <= 2**20
    expected = tokenizers.make("wordpiece", sample, 40, characters=" Ωadilnoprsw")
    assert tokenizers.sha256(loaded.tokenizer) == tokenizers.sha256(expected)


def test_trained_tokenizer_is_remembered(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("remembered words\n" * 900)
    options = {"path": f"{tmp_path}/a.txt", "tokenizer": "bpe", "vocab_size": 270}
    before = tokenizers.sha256(load(tmp_path, **options).tokenizer)
    monkeypatch.setattr(corpora.Corpus, "sample", None)
    assert tokenizers.sha256(load(tmp_path, **options).tokenizer) == before


def test_text_may_move_between_starts():
    config = configs.RunConfig.of({"data.path": "here"})
    assert config.changed({"data.path": "elsewhere", "data.store": "elsewhere"}).difference(config) == ""


PEAK = """
import sys
from pathlib import Path
from attnlab.data import corpora, store, tokenizers
corpus = corpora.load("text", path=sys.argv[1])
made = store.load(corpus, tokenizers.ByteTokenizer(), folder=sys.argv[2])
made.verify()
status = Path("/proc/self/status").read_text()
print(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not report peak memory")
def test_memory_does_not_grow_with_the_text(tmp_path):
    peaks = []
    for megabytes in (5, 50):
        path = tmp_path / f"{megabytes}.txt"
        path.write_bytes(b"some text of a large file" * (megabytes * 40_000))
        command = [sys.executable, "-c", PEAK, str(path), str(tmp_path)]
        peaks.append(int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) / 1024)
    assert peaks[1] - peaks[0] < 25
