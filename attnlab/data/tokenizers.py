"""Tokenizers: text to token ids and back, by character, byte, word or subword.

Word and subword vocabularies are trained on the corpus with Hugging Face's `tokenizers`; the same text gives the same
vocabulary in every process. `published` reads the tokenizers of published models.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import tokenizers as huggingface
from tokenizers import models, pre_tokenizers, trainers

from attnlab.data import library
from attnlab.data.characters import WORD_END, check_known, code_points, complete, parts, utf8
from attnlab.data.end_of_text import NAMES, as_saved, ids_of
from attnlab.data.sentencepiece import SentencePieceTokenizer
from attnlab.support import files
from attnlab.support.errors import UserError
from attnlab.support.paths import named

# Its threads gain little, and without this setting it warns in every forked process.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@runtime_checkable
class Tokenizer(Protocol):
    """The interface of all tokenizers.

    Attributes:
      kind: "char", "byte", "word", "bpe", "wordpiece" or "sentencepiece".
      end_of_text: the tokens that end a text; trained vocabularies have none.
    """

    kind: str
    end_of_text: tuple[int, ...]

    @property
    def vocab_size(self) -> int:
        """Number of token ids, which are 0 … vocab_size − 1."""

    def encode(self, text: str, continues: bool = False) -> np.ndarray:
        """Token ids of `text`, int32 `[length]`, without added tokens; `continues`: it is a later part of `parts`.

        Raises:
          UserError: text that cannot be encoded.
        """

    def parts(self, pieces: Iterable[str]) -> Iterator[str]:
        """Cut a text in pieces, so that the parts' tokens concatenate to `encode` of the whole."""

    def decode(self, ids, continues: bool = False) -> str:
        """The text of token ids `[length]`; `continues`: they follow other tokens, so a first space stays."""

    def stream(self, ids: Iterator[int], continues: bool = False) -> Iterator[str]:
        """Decode token ids as they arrive; the pieces concatenate to `decode`."""

    def to_dict(self) -> dict:
        """The content of `tokenizer.json`."""


class CharTokenizer:
    """One token per character (Unicode code point), in code point order.

    Attributes:
      characters: the vocabulary; token i is its i-th character.

    >>> tokenizer = CharTokenizer.of("hello")
    >>> tokenizer.encode("hole").tolist(), tokenizer.decode([1, 0])
    ([1, 3, 2, 0], 'he')
    """

    kind = "char"
    end_of_text = ()

    def __init__(self, characters: str):
        if list(characters) != sorted(set(characters)):
            raise UserError("a character vocabulary must list each character once, in code point order")
        self.characters = characters
        points = code_points(characters).astype(np.int64)
        # The token of each code point; −1 for no token, and last for all larger code points.
        self._ids = np.full(points.max(initial=-1) + 2, -1, np.int32)
        self._ids[points] = np.arange(len(points))

    @classmethod
    def of(cls, text: str) -> "CharTokenizer":
        """The tokenizer of all characters of `text`."""
        return cls(np.unique(code_points(text)).tobytes().decode("utf-32-le"))

    @property
    def vocab_size(self) -> int:
        return len(self.characters)

    def encode(self, text: str, continues: bool = False) -> np.ndarray:
        """As `Tokenizer.encode`; UserError for a character that is not in the vocabulary."""
        ids = self._ids[np.minimum(code_points(text), len(self._ids) - 1)]
        if len(ids) and ids.min() < 0:
            check_known(text, self.characters)
        return ids

    def parts(self, pieces: Iterable[str]) -> Iterator[str]:
        return iter(pieces)

    def decode(self, ids, continues: bool = False) -> str:
        return "".join(self.characters[i] for i in ids)

    def stream(self, ids: Iterator[int], continues: bool = False) -> Iterator[str]:
        return (self.characters[i] for i in ids)

    def to_dict(self) -> dict:
        """`{"kind": "char", "characters": …}`."""
        return {"kind": self.kind, "characters": self.characters}


class ByteTokenizer:
    """One token per UTF-8 byte; encodes any text.

    >>> ByteTokenizer().encode("ñ").tolist()
    [195, 177]
    """

    kind = "byte"
    end_of_text = ()
    vocab_size = 256

    def encode(self, text: str, continues: bool = False) -> np.ndarray:
        """The UTF-8 bytes of `text`, int32 `[length]`; UserError for lone surrogates."""
        return np.frombuffer(utf8(text), np.uint8).astype(np.int32)

    def parts(self, pieces: Iterable[str]) -> Iterator[str]:
        return iter(pieces)

    def decode(self, ids, continues: bool = False) -> str:
        """The text of byte ids `[length]`; invalid UTF-8 becomes U+FFFD."""
        return bytes(int(i) for i in ids).decode("utf-8", errors="replace")

    def stream(self, ids: Iterator[int], continues: bool = False) -> Iterator[str]:
        return complete(bytes([int(i)]) for i in ids)

    def to_dict(self) -> dict:
        """`{"kind": "byte"}`."""
        return {"kind": self.kind}


class TrainedTokenizer:
    """One token per word or part of a word, of a trained vocabulary.

    Args:
      kind: "word", "bpe" or "wordpiece", as in `make`.
      tokenizer: the Hugging Face tokenizer with the vocabulary.
      end_of_text: the tokens that end a text; () for tokens with a usual name.

    >>> tokenizer = TrainedTokenizer.of("bpe", "low lower lowest " * 9, vocab_size=300)
    >>> [tokenizer.decode([i]) for i in tokenizer.encode("slow lower")]
    ['s', 'low', ' lower']
    """

    def __init__(self, kind: str, tokenizer: huggingface.Tokenizer, end_of_text: Sequence[int] = ()):
        self.kind = kind
        self.end_of_text = tuple(end_of_text) or ids_of(tokenizer, NAMES)
        self._tokenizer = tokenizer
        tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
        if None in tokens:
            raise ValueError(f"its vocabulary of {len(tokens)} tokens has no token {tokens.index(None)}")
        added = tokenizer.get_added_tokens_decoder()  # such as "<|endoftext|>"
        self._pieces = [added[i].content.encode() if i in added else _bytes_of(kind, t) for i, t in enumerate(tokens)]
        self._characters = "".join(token for token in tokens if len(token) == 1)
        # Bytes without a token, which the library would drop silently.
        self._unknown = set(range(256)) - {piece[0] for piece in self._pieces if len(piece) == 1}
        self._known = {} if _splits_at_spaces(tokenizer) else None
        # Some pre-tokenizers prepend a space to a text without one, so parts must begin with a space; Llama 3's and
        # Qwen's take a full stop and the following new lines as one word.
        self._word_end = _BEFORE_SPACE if self._known is None else WORD_END

    @classmethod
    def of(cls, kind: str, text: str, vocab_size: int, characters: str | None = None) -> "TrainedTokenizer":
        """Train a tokenizer on `text`; "wordpiece" can encode all `characters`.

        Raises:
          UserError: an empty text, or a vocabulary smaller than the kind's minimum.
        """
        if not text:
            raise UserError("the text is empty: give a text with at least a few thousand characters")
        # The library reserves memory for all tokens, and a text has no more than this: bytes, characters, and one for
        # each pair that is merged.
        vocab_size = min(vocab_size, 256 + 2 * len(characters or "") + 3 * len(text))
        if kind == "wordpiece":
            characters = sorted(set(text if characters is None else characters))
            return cls(kind, _train_wordpiece(text, vocab_size, characters))
        return cls(kind, _TRAIN[kind](text, vocab_size))

    @property
    def vocab_size(self) -> int:
        """Number of tokens; a short text may have fewer than requested."""
        return len(self._pieces)

    def encode(self, text: str, continues: bool = False) -> np.ndarray:
        """As `Tokenizer.encode`; "wordpiece" and a pretrained "bpe" may lack a character."""
        utf8(text)
        if self.kind == "wordpiece":
            check_known(text, self._characters)
        if self.kind == "bpe" and self._unknown and self._unknown.intersection(text.encode()):
            check_known(text, "".join(c for c in sorted(set(text)) if not self._unknown.intersection(c.encode())))
        return np.concatenate([np.zeros(0, np.int32), *map(self._encode_part, self.parts([text]))])

    def _encode_part(self, part: str) -> np.ndarray:
        if self._known is None:
            return np.frombuffer(self._ids([part])[0], np.int32)
        words = _SPACED_WORDS.findall(part)
        if len(self._known) > _MOST_KNOWN:
            self._known = {}
        known = self._known  # another thread may replace it
        new = list(set(words).difference(known))
        known.update(zip(new, self._ids(new)))
        return np.frombuffer(b"".join([known[word] for word in words]), np.int32)

    def _ids(self, texts: list[str]) -> list[bytes]:
        """The int32 tokens of each text."""
        return [np.array(ids, np.int32).tobytes() for ids in library.encode(self._tokenizer, texts)]

    def parts(self, pieces: Iterable[str]) -> Iterator[str]:
        return parts(pieces, word_end=self._word_end)

    def decode(self, ids, continues: bool = False) -> str:
        """The text of token ids `[length]`; invalid UTF-8 becomes U+FFFD."""
        return b"".join(self._pieces[i] for i in ids).decode("utf-8", errors="replace")

    def stream(self, ids: Iterator[int], continues: bool = False) -> Iterator[str]:
        return complete(self._pieces[i] for i in ids)

    def to_dict(self) -> dict:
        """`{"kind": …, "tokenizer": the library's JSON}`, and `"end_of_text"` where their names are not usual."""
        return as_saved(self, self._tokenizer, NAMES)


# Runs of white space, runs of word characters, and single other characters. Longer runs are cut, because WordPiece
# tries every prefix of a word.
_LONGEST = 100
WORDS = pre_tokenizers.Split(huggingface.Regex(rf"\s{{1,{_LONGEST}}}|\w{{1,{_LONGEST}}}|[^\s\w]"), "isolated")
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
_BEFORE_SPACE = re.compile(r"\S(?= )")
# Words with the white space before them, cut at every end of `WORD_END`. Looking up their tokens is several times
# faster than the library, which spends most of its time on finding words.
_SPACED_WORDS = re.compile(r"\s*(?:\S+|[^\S \n]\s*)*")
_MOST_KNOWN = 200_000  # about 50 MB
_UNKNOWN = "<unk>"
CONTINUES = "##"


def _train_words(text: str, vocab_size: int) -> huggingface.Tokenizer:
    trainer = trainers.WordLevelTrainer(vocab_size=vocab_size, special_tokens=[_UNKNOWN], show_progress=False)
    vocabulary = _trained(models.WordLevel(), WORDS, trainer, text).get_vocab(with_added_tokens=False)
    # A new tokenizer, because the trained one would read "<unk>" in a text as the special token.
    return untrained(models.WordLevel(vocabulary, unk_token=_UNKNOWN), WORDS)


def _train_bpe(text: str, vocab_size: int) -> huggingface.Tokenizer:
    if vocab_size < 256:
        raise UserError(f"data.vocab_size = {vocab_size}: byte-level BPE starts from the 256 bytes: use 256 or more")
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=2, initial_alphabet=BYTE_LEVEL.alphabet(), show_progress=False
    )
    return _trained(models.BPE(), BYTE_LEVEL, trainer, text)


def _train_wordpiece(text: str, vocab_size: int, characters: list[str]) -> huggingface.Tokenizer:
    continuing = [CONTINUES + c for c in characters if len(WORDS.pre_tokenize_str(c + c)) == 1]
    least = len(characters) + len(continuing)
    if vocab_size < least:
        raise UserError(
            f"data.vocab_size = {vocab_size}: the text has {len(characters)} characters, {len(continuing)} of which "
            f"can also continue a word: use {least} or more"
        )
    # By default the library numbers continuing characters in a random order, and these numbers break ties between
    # merges of equal frequency. Special tokens keep their order.
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, min_frequency=2, special_tokens=characters + continuing, show_progress=False
    )
    vocabulary = _trained(models.WordPiece(), WORDS, trainer, text).get_vocab(with_added_tokens=False)
    # A new tokenizer, because the trained one would extract special tokens before splitting a text into words.
    model = models.WordPiece(
        vocabulary, unk_token=_UNKNOWN, continuing_subword_prefix=CONTINUES, max_input_chars_per_word=_LONGEST
    )
    return untrained(model, WORDS)


def _splits_at_spaces(tokenizer: huggingface.Tokenizer) -> bool:
    """Whether no token spans a place where white space follows another character."""
    splits = tokenizer.pre_tokenizer and json.loads(tokenizer.pre_tokenizer.__getstate__())
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    added = tokenizer.get_added_tokens_decoder().values()
    return (
        (splits == json.loads(WORDS.__getstate__()) or byte_level.items() <= (splits or {}).items())
        and not any(token.lstrip or token.rstrip or token.single_word for token in added)
        and not any(character.isspace() for token in added for character in token.content)
    )


def untrained(model, pre_tokenizer) -> huggingface.Tokenizer:
    tokenizer = huggingface.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer


def _trained(model, pre_tokenizer, trainer, text: str) -> huggingface.Tokenizer:
    tokenizer = untrained(model, pre_tokenizer)
    tokenizer.train_from_iterator(parts([text]), trainer)
    return tokenizer


def _bytes_of(kind: str, token: str) -> bytes:
    """The UTF-8 bytes of a token of the library."""
    if kind == "bpe":
        try:
            return bytes(GPT2_BYTES[character] for character in token)
        except KeyError as error:
            raise ValueError(f"its token {token!r} is not in GPT-2's byte alphabet") from error
    # Only continuing word pieces begin with "##": every # of a text is a word by itself.
    return (token.removeprefix(CONTINUES) if kind == "wordpiece" else token).encode()


def _gpt2_bytes() -> dict[str, int]:
    """GPT-2's byte alphabet: printable Latin-1 characters are themselves, the other bytes follow from U+0100."""
    characters = sorted(BYTE_LEVEL.alphabet())
    printable = [ord(character) for character in characters if ord(character) < 256]
    return dict(zip(characters, printable + sorted(set(range(256)) - set(printable))))


GPT2_BYTES = _gpt2_bytes()
_TRAIN = {"word": _train_words, "bpe": _train_bpe, "wordpiece": _train_wordpiece}

TRAINED = tuple(_TRAIN)  # on a text
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
    if kind in _TRAIN:
        return TrainedTokenizer.of(kind, text, vocab_size, characters)
    return CharTokenizer.of(text if characters is None else characters) if kind == "char" else ByteTokenizer()


def save(tokenizer: Tokenizer, path: Path) -> None:
    """Write a tokenizer as JSON."""
    with named(path):
        path.write_bytes(_to_json(tokenizer))


def sha256(tokenizer: Tokenizer) -> str:
    """The hexadecimal digest of the file that `save` writes.

    >>> sha256(ByteTokenizer())[:8]
    'b187eab7'
    """
    return hashlib.sha256(_to_json(tokenizer)).hexdigest()


def load(path: Path) -> Tokenizer:
    """Load a tokenizer written by `save`.

    Raises:
      UserError: the file is missing or not a tokenizer.
    """
    try:
        return from_dict(files.read_json(path))
    except Exception as error:  # Hugging Face's library raises no narrower one
        raise UserError(
            f"{path} is not an attnlab tokenizer ({error}): restore it, or train in a new workdir"
        ) from error


def from_dict(saved: dict) -> Tokenizer:
    """The tokenizer with the `to_dict` `saved`; any exception for other content.

    >>> from_dict({"kind": "byte"}).encode("a").tolist()
    [97]
    """
    kind, ends = saved.get("kind"), saved.get("end_of_text", ())
    if kind == SentencePieceTokenizer.kind:
        return SentencePieceTokenizer(library.tokenizer(json.dumps(saved["tokenizer"])), ends)
    if kind not in KINDS:
        raise ValueError(f"its kind is {kind!r}, not one of {', '.join(KINDS)}")
    if kind in _TRAIN:
        return TrainedTokenizer(kind, library.tokenizer(json.dumps(saved["tokenizer"])), ends)
    return CharTokenizer(saved["characters"]) if kind == "char" else ByteTokenizer()


def _to_json(tokenizer: Tokenizer) -> bytes:
    return (json.dumps(tokenizer.to_dict(), ensure_ascii=False) + "\n").encode()
