"""Tokenizers: text to token ids and back, by character, byte, word or subword.

Words and subwords need Hugging Face's library `tokenizers`, the extra `data`; `published` reads the tokenizers of
published models.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from attnlab.data.characters import Tokenizer, check_known, code_points, complete, utf8
from attnlab.support import files
from attnlab.support.errors import UserError
from attnlab.support.extras import require
from attnlab.support.paths import named


class CharTokenizer(Tokenizer):
    """One token per character (Unicode code point), in code point order.

    Attributes:
      characters: the vocabulary; token i is its i-th character.
    """

    kind = "char"

    def __init__(self, characters: str):
        if list(characters) != sorted(set(characters)):
            raise ValueError("a character vocabulary must list each character once, in code point order")
        self.characters, self.vocab_size = characters, len(characters)
        points = code_points(characters).astype(np.int64)
        # The token of each code point, −1 if there is none; the last entry, −1, is for all larger code points.
        self._ids = np.full(points.max(initial=-1) + 2, -1, np.int32)
        self._ids[points] = np.arange(len(points))

    @classmethod
    def of(cls, text: str) -> "CharTokenizer":
        """Build the tokenizer of all characters in `text`."""
        return cls(np.unique(code_points(text)).tobytes().decode("utf-32-le"))

    def encode(self, text: str, continues: bool = False) -> np.ndarray:
        """See `Tokenizer.encode`; raises UserError for a character that is not in the vocabulary."""
        ids = self._ids[np.minimum(code_points(text), len(self._ids) - 1)]
        if len(ids) and ids.min() < 0:
            check_known(text, self.characters)
        return ids

    def stream(self, ids: Iterator[int], continues: bool = False) -> Iterator[str]:
        return (self.characters[i] for i in ids)

    def to_dict(self) -> dict:
        """`{"kind": "char", "characters": …}`."""
        return {"kind": self.kind, "characters": self.characters}


class ByteTokenizer(Tokenizer):
    """One token per UTF-8 byte; encodes any text."""

    kind = "byte"
    vocab_size = 256

    def encode(self, text: str, continues: bool = False) -> np.ndarray:
        """The UTF-8 bytes of `text`, int32 `[length]`; raises UserError for lone surrogates."""
        return np.frombuffer(utf8(text), np.uint8).astype(np.int32)

    def stream(self, ids: Iterator[int], continues: bool = False) -> Iterator[str]:
        return complete(bytes([int(i)]) for i in ids)

    def to_dict(self) -> dict:
        """`{"kind": "byte"}`."""
        return {"kind": self.kind}


TRAINED = ("word", "bpe", "wordpiece")  # trained on a text
KINDS = ("char", "byte", *TRAINED)


def make(kind: str, text: str, vocab_size: int = 1024, characters: str | None = None) -> Tokenizer:
    """Build a tokenizer for a text.

    Args:
      kind: one of `KINDS`:
        "char", every character of the text;
        "byte", the bytes of UTF-8;
        "word", the most frequent words: runs of word characters, runs of white space, and single other characters. All
          other words become "<unk>"; predicting "<unk>" is right for any of them, so bits per character do not compare
          with other kinds;
        "bpe", byte-level BPE as in GPT-2 (Sennrich et al. 2016, Radford et al. 2019): starting from bytes, the most
          frequent pairs are merged, so any text can be encoded;
        "wordpiece", as in BERT (Schuster & Nakajima 2012, Wu et al. 2016, Devlin et al. 2019): the longest piece that
          begins a word, then the longest that continues it, marked "##". As in the library, the vocabulary is chosen
          by merges, not by likelihood. Unlike BERT's, it keeps capitals and white space, so decoding restores any text
          of the corpus's characters.
      text: the whole corpus, or a sample of it.
      vocab_size: maximum for "word", "bpe" and "wordpiece"; pairs that occur only once are not merged.
      characters: all characters of the corpus, for "char" and "wordpiece"; None for the characters of `text`.

    Raises:
      UserError: an unknown kind; for trained kinds, an empty text or a vocabulary smaller than the kind's minimum.

    >>> make("char", "abba").vocab_size
    2
    >>> tokenizer = make("wordpiece", "low lower lowest " * 9, vocab_size=30)
    >>> [tokenizer.decode([i]) for i in tokenizer.encode("lowers")]
    ['lower', 's']
    """
    if kind not in KINDS:
        raise UserError(f"data.tokenizer = {kind!r} is unknown: use one of {', '.join(KINDS)}")
    if kind in TRAINED:
        require("tokenizers", "data", f"data.tokenizer = {kind!r}")
        from attnlab.data.subwords import TrainedTokenizer

        return TrainedTokenizer.of(kind, text, vocab_size, characters)
    return CharTokenizer.of(text if characters is None else characters) if kind == "char" else ByteTokenizer()


def save(tokenizer: Tokenizer, path: Path) -> None:
    """Write a tokenizer as JSON."""
    with named(path):
        path.write_bytes(_to_json(tokenizer))


def sha256(tokenizer: Tokenizer) -> str:
    """The hexadecimal digest of the file that `save` writes."""
    return hashlib.sha256(_to_json(tokenizer)).hexdigest()


def load(path: Path) -> Tokenizer:
    """Load a tokenizer written by `save`.

    Raises:
      UserError: the file is missing or not a tokenizer.
    """
    try:
        return from_dict(files.read_json(path))
    except UserError:
        raise
    except Exception as error:  # Hugging Face's library raises no narrower type
        raise UserError(
            f"{path} is not an attnlab tokenizer ({error}): restore it, or train in a new workdir"
        ) from error


def from_dict(saved: dict) -> Tokenizer:
    """Build the tokenizer whose `to_dict` is `saved`; other content may raise any exception."""
    kind, ends = saved.get("kind"), saved.get("end_of_text", ())
    if kind not in (*KINDS, "sentencepiece"):
        raise ValueError(f"its kind is {kind!r}, not one of {', '.join(KINDS)}")
    if kind == "char":
        return CharTokenizer(saved["characters"])
    if kind == "byte":
        return ByteTokenizer()
    library = require("tokenizers", "data", f"a tokenizer of kind {kind!r}")
    from attnlab.data.sentencepiece import SentencePieceTokenizer
    from attnlab.data.subwords import TrainedTokenizer

    tokenizer = library.Tokenizer.from_str(json.dumps(saved["tokenizer"]))
    return (
        SentencePieceTokenizer(tokenizer, ends) if kind == "sentencepiece" else TrainedTokenizer(kind, tokenizer, ends)
    )


def _to_json(tokenizer: Tokenizer) -> bytes:
    return (json.dumps(tokenizer.to_dict(), ensure_ascii=False) + "\n").encode()
