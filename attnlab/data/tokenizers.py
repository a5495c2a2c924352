"""Text to token ids and back, one character or one byte at a time."""

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from attnlab.errors import UserError


@runtime_checkable
class Tokenizer(Protocol):
    """What a tokenizer can do."""

    kind: str

    @property
    def vocab_size(self) -> int:
        """How many token ids there are, 0 … vocab_size − 1."""

    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text`, int32 `[length]`. Raises UserError for text that has none."""

    def decode(self, ids) -> str:
        """The text of token ids `[length]`."""

    def stream(self, ids: Iterator[int]) -> Iterator[str]:
        """The text of token ids as they come; the pieces join to what `decode` gives."""

    def to_dict(self) -> dict:
        """What `tokenizer.json` holds."""


class CharTokenizer:
    """One token a character (Unicode code point), in code point order.

    Attributes:
      characters: the vocabulary; token i is the i-th of them.

    >>> tokenizer = CharTokenizer.of("hello")
    >>> tokenizer.encode("hole").tolist(), tokenizer.decode([1, 0])
    ([1, 3, 2, 0], 'he')
    """

    kind = "char"

    def __init__(self, characters: str):
        if list(characters) != sorted(set(characters)):
            raise UserError("a character vocabulary must list each character once, in code point order")
        self.characters = characters
        self._points = _code_points(characters)

    @classmethod
    def of(cls, text: str) -> "CharTokenizer":
        """The tokenizer whose vocabulary is every character of `text`."""
        return cls(np.unique(_code_points(text)).tobytes().decode("utf-32-le"))

    @property
    def vocab_size(self) -> int:
        """How many characters there are."""
        return len(self.characters)

    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text`, int32 `[length]`.

        Raises:
          UserError: a character that the vocabulary lacks.
        """
        points = _code_points(text)
        ids = np.searchsorted(self._points, points)
        known = self._points[np.minimum(ids, self.vocab_size - 1)] == points
        if not known.all():
            unknown = "".join(dict.fromkeys(np.array(list(text))[~known]))
            raise UserError(
                f"{unknown!r}: characters that the tokenizer never saw; it knows these {self.vocab_size}: "
                f"{self.characters!r}"
            )
        return ids.astype(np.int32)

    def decode(self, ids) -> str:
        """The text of token ids `[length]`."""
        return "".join(self.characters[i] for i in ids)

    def stream(self, ids: Iterator[int]) -> Iterator[str]:
        """One character for each id."""
        return (self.characters[i] for i in ids)

    def to_dict(self) -> dict:
        """`{"kind": "char", "characters": …}`."""
        return {"kind": self.kind, "characters": self.characters}


class ByteTokenizer:
    """One token a byte of UTF-8; any text has tokens.

    >>> ByteTokenizer().encode("ñ").tolist()
    [195, 177]
    """

    kind = "byte"
    vocab_size = 256

    def encode(self, text: str) -> np.ndarray:
        """The bytes of `text`, int32 `[length]`. Raises UserError for lone surrogates, which UTF-8 lacks."""
        try:
            return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)
        except UnicodeEncodeError as error:
            raise UserError(f"{text!r} holds half a character (a lone surrogate): give text in UTF-8") from error

    def decode(self, ids) -> str:
        """The text of byte ids `[length]`; what is no UTF-8 becomes U+FFFD."""
        return bytes(int(i) for i in ids).decode("utf-8", errors="replace")

    def stream(self, ids: Iterator[int]) -> Iterator[str]:
        """Whole characters, each as soon as its last byte has come."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for i in ids:
            if piece := decoder.decode(bytes([int(i)])):
                yield piece
        if piece := decoder.decode(b"", final=True):
            yield piece

    def to_dict(self) -> dict:
        """`{"kind": "byte"}`."""
        return {"kind": self.kind}


KINDS = ("char", "byte")


def make(kind: str, text: str) -> Tokenizer:
    """The tokenizer of a kind for a text.

    Args:
      kind: "char", whose vocabulary comes from the whole text, or "byte".
      text: the whole corpus.

    Raises:
      UserError: an unknown kind.

    >>> make("char", "abba").vocab_size
    2
    """
    if kind not in KINDS:
        raise UserError(f"data.tokenizer = {kind!r} is unknown: use one of {', '.join(KINDS)}")
    return CharTokenizer.of(text) if kind == "char" else ByteTokenizer()


def save(tokenizer: Tokenizer, path: Path) -> None:
    """Writes a tokenizer as JSON."""
    path.write_text(json.dumps(tokenizer.to_dict(), ensure_ascii=False) + "\n", encoding="utf-8")


def load(path: Path) -> Tokenizer:
    """The tokenizer that `save` wrote.

    Raises:
      UserError: the file is missing, or no tokenizer.
    """
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        return (
            CharTokenizer(saved["characters"]) if saved["kind"] == "char" else {"byte": ByteTokenizer}[saved["kind"]]()
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is no tokenizer of attnlab ({error}): restore it, or train in a new workdir"
        ) from error


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), np.uint32)
