"""The base class of tokenizers, and shared functions: code points, UTF-8, and cuts between words."""

import codecs
import re
from collections.abc import Iterable, Iterator

import numpy as np

from attnlab.support.errors import UserError

WORD_END = re.compile(r"\S(?=[ \n])")  # both Python and the library treat space and new line as white space


class Tokenizer:
    """The base class of all tokenizers.

    Attributes:
      kind: "char", "byte", "word", "bpe", "wordpiece" or "sentencepiece".
      vocab_size: number of token ids, which are 0 … vocab_size − 1.
      end_of_text: the tokens that end a text; trained vocabularies have none.
    """

    kind: str
    vocab_size: int
    end_of_text: tuple[int, ...] = ()

    def encode(self, text: str, continues: bool = False) -> np.ndarray:
        """Token ids of `text`, int32 `[length]`, without added tokens; `continues` marks any but the first of `parts`.

        Raises:
          UserError: text that cannot be encoded.
        """
        raise NotImplementedError

    def parts(self, pieces: Iterable[str]) -> Iterator[str]:
        """Cut a text, passed in pieces, into parts whose tokens concatenate to `encode` of the whole."""
        return iter(pieces)

    def decode(self, ids, continues: bool = False) -> str:
        """The text of token ids `[length]`; if `continues`, they follow other tokens, so a space at the start stays.

        Invalid UTF-8 becomes U+FFFD.
        """
        return "".join(self.stream(iter(ids), continues))

    def stream(self, ids: Iterator[int], continues: bool = False) -> Iterator[str]:
        """Decode token ids as they arrive; the pieces concatenate to `decode`."""
        raise NotImplementedError

    def to_dict(self) -> dict:
        """The content of `tokenizer.json`."""
        raise NotImplementedError


def parts(pieces: Iterable[str], size: int = 100_000, word_end: re.Pattern = WORD_END) -> Iterator[str]:
    """Cut a text into parts of about `size` characters, after matches of `word_end`, so that no word is cut."""
    text = ""
    for piece in pieces:
        start, search_from = 0, max(size, len(text) - 1)  # no match is possible before this
        text += piece
        while match := word_end.search(text, search_from):
            yield text[start : match.end()]
            start, search_from = match.end(), match.end() + size
        text = text[start:]
    if text:
        yield text


def check_known(text: str, characters: str) -> None:
    """Raise UserError if `text` contains characters not in `characters`."""
    unknown = set(text).difference(characters)
    if unknown:
        named = "".join(dict.fromkeys(character for character in text if character in unknown))
        raise UserError(
            f"{named!r}: characters not in the tokenizer's vocabulary; it has these {len(characters)}: {characters!r}"
        )


def utf8(text: str) -> bytes:
    """The UTF-8 bytes of a text; raises UserError for lone surrogates."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{text!r} contains a lone surrogate (half a character): give text in UTF-8") from error


def complete(pieces: Iterable[bytes]) -> Iterator[str]:
    """Decode UTF-8 from pieces, yielding each character as soon as its last byte arrives."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for piece in pieces:
        if characters := decoder.decode(piece):
            yield characters
    if characters := decoder.decode(b"", final=True):
        yield characters


def code_points(text: str) -> np.ndarray:
    """The code points of a text, uint32 `[length]`, including lone surrogates."""
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), np.uint32)
