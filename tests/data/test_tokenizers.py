"""Tokenizers give back what they were given, stream what they decode, and survive a file."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnlab.data import tokenizers
from attnlab.errors import UserError

TEXTS = st.text(st.characters(codec="utf-8"), min_size=1)
BOTH = pytest.mark.parametrize("kind", tokenizers.KINDS)


@BOTH
@given(text=TEXTS)
def test_decoding_gives_back_the_text(kind, text):
    tokenizer = tokenizers.make(kind, text)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids.min() >= 0 and ids.max() < tokenizer.vocab_size


@BOTH
@given(text=TEXTS)
def test_streamed_pieces_join_to_the_text(kind, text):
    tokenizer = tokenizers.make(kind, text)
    assert "".join(tokenizer.stream(iter(tokenizer.encode(text)))) == text


def test_streamed_bytes_come_as_whole_characters():
    pieces = list(tokenizers.ByteTokenizer().stream(iter("año".encode())))
    assert pieces == ["a", "ñ", "o"]


def test_bytes_that_are_no_text_are_marked():
    tokenizer = tokenizers.ByteTokenizer()
    assert tokenizer.decode([195]) == "\ufffd" == "".join(tokenizer.stream(iter([195])))


def test_the_vocabulary_is_every_character_in_code_point_order():
    assert tokenizers.make("char", "hello, año").characters == " ,aehloñ"


@BOTH
@given(text=TEXTS)
def test_a_tokenizer_survives_its_file(tmp_path_factory, kind, text):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizers.save(tokenizers.make(kind, text), path)
    assert tokenizers.load(path).decode(tokenizers.make(kind, text).encode(text)) == text


def test_unknown_characters_are_named():
    with pytest.raises(UserError, match="'zñ': characters that the tokenizer never saw"):
        tokenizers.make("char", "abc").encode("azbñzc")


@BOTH
def test_half_a_character_is_one_line(kind):
    with pytest.raises(UserError):
        tokenizers.make(kind, "abc").encode("a\udcff")


def test_an_unknown_kind_lists_those_there_are():
    with pytest.raises(UserError, match=r"data\.tokenizer = 'word' is unknown: use one of char, byte"):
        tokenizers.make("word", "abc")


@pytest.mark.parametrize("content", [None, "{", "[]", '{"kind": "word"}', '{"kind": "char", "characters": "ba"}'])
def test_a_damaged_file_is_one_line(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=r"tokenizer\.json is no tokenizer of attnlab"):
        tokenizers.load(path)
