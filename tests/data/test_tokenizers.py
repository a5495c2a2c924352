"""Tokenizers: round trips, streaming, saving, and one-line errors."""

import hashlib
import itertools
import json
import re
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import tokenizers as huggingface
from hypothesis import given
from hypothesis import strategies as st

from attnlab.data import characters, tokenizers
from attnlab.support.errors import UserError

TEXTS = st.text(st.characters(codec="utf-8"), min_size=1)
VOCAB_SIZE = 1024  # holds every word of such a text
ALL = pytest.mark.parametrize("kind", tokenizers.KINDS)
TRAINED = pytest.mark.parametrize("kind", ["word", "bpe", "wordpiece"])


@ALL
@given(text=TEXTS)
def test_decoding_restores_text_when_streamed_and_after_saving(tmp_path_factory, kind, text):
    tokenizer = tokenizers.make(kind, text, VOCAB_SIZE)
    ids = tokenizer.encode(text)
    assert ids.min() >= 0 and ids.max() < tokenizer.vocab_size
    assert tokenizer.decode(ids) == text == "".join(tokenizer.stream(iter(ids)))
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizers.save(tokenizer, path)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == tokenizers.sha256(tokenizer)
    again = tokenizers.load(path)
    assert again.encode(text).tolist() == ids.tolist() and again.decode(ids) == text
    empty = again.encode("")
    assert (empty.shape, empty.dtype, again.decode(empty)) == ((0,), np.int32, "")


def test_streaming_yields_complete_characters():
    tokenizer = tokenizers.ByteTokenizer()
    assert tokenizer.decode([195]) == "\ufffd" == "".join(tokenizer.stream(iter([195])))
    tokenizer = tokenizers.make("bpe", "aaa", 256)
    assert len(tokenizer.encode("a👩o")) == 6
    assert list(tokenizer.stream(iter(tokenizer.encode("a👩o")))) == ["a", "👩", "o"]


@pytest.mark.parametrize("kind", ["char", "wordpiece"])
def test_unknown_characters_are_listed(kind):
    with pytest.raises(UserError, match="'zñ': .*vocabulary.* 3: 'abc'"):
        tokenizers.make(kind, "abcabc").encode("azbñzc")


@ALL
def test_impossible_text_or_kind_is_refused(kind):
    with pytest.raises(UserError, match=r"data\.tokenizer = 'words' .*char, byte, word, bpe, wordpiece"):
        tokenizers.make("words", "abc")
    with pytest.raises(UserError):
        tokenizers.make(kind, "abc").encode("a\udcff")
    if kind in ("word", "bpe", "wordpiece"):
        with pytest.raises(UserError, match="text is empty"):
            tokenizers.make(kind, "")


DAMAGED = [
    None,
    "{",
    "[]",
    '{"kind": "words"}',
    '{"kind": "char", "characters": "ba"}',
    '{"kind": "word"}',
    '{"kind": "bpe", "tokenizer": {}}',
    '{"kind": "bpe", "tokenizer": {"model": {"type": "WordLevel", "vocab": {" ": 0}, "unk_token": " "}}}',
    '{"kind": "word", "tokenizer": {"model": {"type": "WordLevel", "vocab": {"a": 7}, "unk_token": "a"}}}',
]


@pytest.mark.parametrize("content", DAMAGED)
def test_damaged_tokenizer_file_raises_one_line(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=r"tokenizer\.json .*attnlab tokenizer"):
        tokenizers.load(path)


@given(corpus=TEXTS, text=TEXTS)
def test_bpe_encodes_unseen_texts(corpus, text):
    tokenizer = tokenizers.make("bpe", corpus, VOCAB_SIZE)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(data=st.data(), corpus=TEXTS)
def test_wordpiece_restores_any_text_of_known_characters(data, corpus):
    text = data.draw(st.text(sorted(set(corpus))))
    tokenizer = tokenizers.make("wordpiece", corpus, VOCAB_SIZE)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text == "".join(tokenizer.stream(iter(ids)))


def test_wordpiece_takes_the_longest_piece():
    tokenizer = tokenizers.make("wordpiece", "un unable able " * 9, 100)
    assert [tokenizer.decode([i]) for i in tokenizer.encode("unablea unun")] == ["unable", "a", " ", "un", "u", "n"]


@given(text=st.text("#a <unk>", min_size=1))
def test_special_token_strings_in_text_are_plain_text(text):
    for kind in ("word", "wordpiece"):
        tokenizer = tokenizers.make(kind, text, 100)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_double_hash_in_text_is_not_a_continuing_piece():
    tokenizer = tokenizers.make("wordpiece", "##a #a ba " * 9, 100)
    marked, continuing = tokenizer.encode("##a"), tokenizer.encode("ba")
    assert [tokenizer.decode([i]) for i in marked] == ["#", "#", "a"]
    assert len(continuing) == 1  # "ba", the whole word
    assert tokenizer.encode("aa")[1] not in marked  # that is "##a", the piece


def test_infrequent_words_become_unk():
    tokenizer = tokenizers.make("word", "uno, dos, dos, tres, tres, tres", 5)
    assert tokenizer.vocab_size == 5  # <unk>, the comma, the space, tres, dos
    assert tokenizer.decode(tokenizer.encode("tres, dos, uno")) == "tres, dos, <unk>"


@given(text=st.text("añ_1 \n\t.#", min_size=1))
def test_word_vocabulary_is_the_most_frequent_runs(text):
    tokenizer = tokenizers.make("word", text, VOCAB_SIZE)
    words = re.findall(r"\s{1,100}|\w{1,100}|[^\s\w]", text)
    assert [tokenizer.decode([i]) for i in tokenizer.encode(text)] == words
    counts = Counter(words)
    few = tokenizers.make("word", text, 3)
    vocab = {few.decode([i]) for i in range(1, few.vocab_size)}
    assert min(counts[word] for word in vocab) >= max((n for word, n in counts.items() if word not in vocab), default=0)


def test_vocabulary_covers_characters_outside_the_sample():
    assert tokenizers.make("char", "hello, año").characters == " ,aehloñ"  # in code point order
    for kind in ("char", "wordpiece"):
        tokenizer = tokenizers.make(kind, "a sample of it " * 9, 200, characters=" abcdefilmnoprst")
        assert tokenizer.decode(tokenizer.encode("bcd not")) == "bcd not"


@TRAINED
def test_long_runs_can_be_encoded(kind):
    for character in "a .":
        tokenizer = tokenizers.make(kind, character * 5000, VOCAB_SIZE)
        assert tokenizer.decode(tokenizer.encode(character * 5000)) == character * 5000


UNUSUAL = st.one_of(st.sampled_from(" \n\t\r\x1c\x85\u2003\u200bab'1,.#ñ二🙂<unk>"), st.characters(codec="utf-8"))


@TRAINED
@given(text=st.text(UNUSUAL, min_size=1, max_size=300))
def test_tokens_of_parts_match_the_library(kind, text):
    tokenizer = tokenizers.make(kind, text + "ab ab's 11 ,. " * 9, VOCAB_SIZE)
    library = huggingface.Tokenizer.from_str(json.dumps(tokenizer.to_dict()["tokenizer"]))
    parts = list(characters.parts([text], size=0))
    assert "".join(parts) == text
    assert max(map(len, characters.parts("una palabra " * 1000, size=100))) < 120
    assert np.concatenate([tokenizer.encode(part) for part in parts]).tolist() == library.encode(text).ids


# All pair frequencies are tied, and a hash table would order ties differently in every process.
TIES = " ".join(map("".join, itertools.permutations("abcde"))) + " "


def test_same_text_gives_same_vocabulary_in_any_process(capfd):
    program = "import sys; from attnlab.data import tokenizers as t; "
    program += "print(*(t.sha256(t.make(kind, sys.argv[1], 270)) for kind in sys.argv[2:]))"
    kinds = ["word", "bpe", "wordpiece"]
    done = subprocess.run([sys.executable, "-c", program, TIES * 2, *kinds], capture_output=True, text=True, check=True)
    for kind, other in zip(kinds, done.stdout.split()):
        assert {tokenizers.sha256(tokenizers.make(kind, TIES * 2, 270)) for _ in range(3)} == {other}
    assert capfd.readouterr() == ("", "")


@TRAINED
def test_vocabulary_has_the_requested_size_if_possible(kind):
    text = TIES * 2
    least = {"word": 2, "bpe": 256, "wordpiece": 6 + 6}[kind]
    for size in (least, least + 10):
        assert tokenizers.make(kind, text, size).vocab_size == size
    assert tokenizers.make(kind, text, 2**31 - 1).vocab_size < 1000


@pytest.mark.parametrize("kind, size, least", [("bpe", 255, "256"), ("wordpiece", 6, "7 or more")])
def test_too_small_vocabulary_names_the_minimum(kind, size, least):
    with pytest.raises(UserError, match=rf"data\.vocab_size = {size}: .*{least}"):
        tokenizers.make(kind, "ab a. ", size)
