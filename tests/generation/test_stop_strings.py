"""Stop strings and end-of-text tokens."""

import pytest

from attnlab.data.tokenizers import make
from attnlab.generation.stop_strings import StopStrings, before_stop, cut
from attnlab.support.errors import UserError
from tests.data.sentencepiece_families import sentencepiece

TEXT = "low lower lowest, or so. <|endoftext|>\n\n" * 30


@pytest.mark.parametrize("kind", ["char", "byte", "word", "bpe", "wordpiece"])
def test_stop_string_is_found_whatever_the_tokens(kind):
    tokenizer = make(kind, TEXT, vocab_size=300)
    tokens = tokenizer.encode("lower lowest, or so. lower").tolist()
    last = StopStrings(["st, o", "nowhere"] if kind in ("byte", "bpe") else ["st, o"], tokenizer).after(tokens, known=0)
    assert "st, o" in tokenizer.decode(tokens[:last]) and "st, o" not in tokenizer.decode(tokens[: last - 1])


def test_text_without_stop_string_goes_on():
    tokenizer = make("char", TEXT)
    tokens = tokenizer.encode("low, or lower").tolist()
    assert StopStrings(["so", "\n"], tokenizer).after(tokens, known=0) is None
    assert StopStrings([], tokenizer).after(tokens, known=0) is None
    tokens = list("aé".encode())  # the first one, two and three bytes decode to "a", "a\ufffd" and "aé"
    stops = StopStrings(["\ufffd"], make("byte", TEXT))
    assert [stops.after(tokens[:last], known=0) for last in (1, 2, 3)] == [None] * 3
    assert stops.after([*tokens, *"\ufffdb".encode()], known=3) == 7


def test_stop_string_may_begin_with_the_space_of_the_first_token():
    tokenizer = sentencepiece("mistral")
    tokens = tokenizer.encode(" lower ones", continues=True).tolist()
    last = StopStrings([" lo"], tokenizer).after(tokens, known=0)
    assert last is not None and " lo" in tokenizer.decode(tokens[:last], continues=True) and last < len(tokens)


def test_first_of_several_stop_strings_cuts():
    assert cut("a b.c", [".", " b"]) == ("a", " b")
    assert cut("a b.c", ["b.", "b"]) == ("a ", "b")
    assert cut("abc", ["b", "abc"]) == ("a", "b")  # "b" is complete before "abc"
    assert cut("abc", ["c", "bc"]) == ("a", "bc")
    assert cut("a", ["b"]) == ("a", None)


@pytest.mark.parametrize("stop", [["END"], ["ENDE", "N", "xEN"], ["EEND"], ["E", "EEND"]])
@pytest.mark.parametrize("text", ["one ENENDED", "xE", "xEEEND."])
def test_streamed_text_is_the_text_before_the_stop_string(text, stop):
    """Text arrives in pieces of one character or several; nothing that was printed has to be taken back."""
    for size in (1, 2, 5, len(text)):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert "".join(before_stop(pieces, stop)) == cut(text, stop)[0]
    assert not any(s in cut(text, stop)[0] for s in stop)


def test_streaming_ends_at_the_stop_string():
    pieces = iter("one. two")
    assert "".join(before_stop(pieces, ["."])) == "one"
    assert "".join(pieces) == " two"


@pytest.mark.parametrize(
    "kind, stop, message",
    [
        ("char", "", "stop string is empty"),
        ("char", "日", "stop string '日': .*'日': .*vocabulary"),
        ("wordpiece", "Q", "stop string 'Q'"),
        ("word", "lo", None),
        ("word", "r l", None),  # "lower", " ", "low"
        ("word", "horse", "stop string 'horse': "),
        ("word", "r  l", None),  # two spaces are two tokens
        ("word", "r;l", "stop string 'r;l'"),
        ("byte", "日", None),
    ],
)
def test_stop_string_that_no_tokens_form_raises_one_line(kind, stop, message):
    tokenizer = make(kind, TEXT.replace("\n\n", "\n"), vocab_size=300)
    if message is None:
        StopStrings([stop], tokenizer)
    else:
        with pytest.raises(UserError, match=message.replace("(", "\\(")) as error:
            StopStrings([stop], tokenizer)
        assert "\n" not in str(error.value)
