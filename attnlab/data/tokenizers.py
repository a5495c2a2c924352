"""Text to token ids and back: by character, by byte, by word and by subword.

Word and subword vocabularies are trained on the corpus by Hugging Face's `tokenizers`; the same text gives the same
vocabulary, in every process.
"""

import codecs
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import tokenizers as huggingface
from tokenizers import decoders, models, pre_tokenizers, trainers

from attnlab.errors import UserError

# Its threads gain little, and unless this is set it warns in every process forked after they ran.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


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
        _check_known(text, self.characters)
        return np.searchsorted(self._points, _code_points(text)).astype(np.int32)

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
        return np.frombuffer(_utf8(text), np.uint8).astype(np.int32)

    def decode(self, ids) -> str:
        """The text of byte ids `[length]`; what is no UTF-8 becomes U+FFFD."""
        return bytes(int(i) for i in ids).decode("utf-8", errors="replace")

    def stream(self, ids: Iterator[int]) -> Iterator[str]:
        """Whole characters, each as soon as its last byte has come."""
        return _whole_characters(bytes([int(i)]) for i in ids)

    def to_dict(self) -> dict:
        """`{"kind": "byte"}`."""
        return {"kind": self.kind}


class TrainedTokenizer:
    """One token a word, or a part of one, from a vocabulary trained on a text.

    Args:
      kind: "word", "bpe" or "wordpiece", as in `make`.
      tokenizer: of Hugging Face's library, with the vocabulary.

    >>> tokenizer = TrainedTokenizer.of("bpe", "low lower lowest " * 9, vocab_size=300)
    >>> [tokenizer.decode([i]) for i in tokenizer.encode("slow lower")]
    ['s', 'low', ' lower']
    """

    def __init__(self, kind: str, tokenizer: huggingface.Tokenizer):
        self.kind = kind
        self._tokenizer = tokenizer
        tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
        if None in tokens:
            raise ValueError(f"its vocabulary of {len(tokens)} has no token {tokens.index(None)}")
        added = tokenizer.get_added_tokens_decoder()  # such as "<|endoftext|>"
        self._pieces = [added[i].content.encode() if i in added else _bytes_of(kind, t) for i, t in enumerate(tokens)]
        self._characters = "".join(token for token in tokens if len(token) == 1)
        # Bytes without a token, of which the library would say nothing.
        self._unknown = set(range(256)) - {piece[0] for piece in self._pieces if len(piece) == 1}

    @classmethod
    def of(cls, kind: str, text: str, vocab_size: int) -> "TrainedTokenizer":
        """The tokenizer of a kind whose vocabulary comes from `text`.

        Raises:
          UserError: an empty text, a vocabulary smaller than the kind's least.
        """
        if not text:
            raise UserError("the text is empty: give a text with at least a few thousand characters")
        return cls(kind, _TRAIN[kind](text, vocab_size))

    @property
    def vocab_size(self) -> int:
        """How many tokens there are; fewer than asked for where the text has no more."""
        return len(self._pieces)

    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text`, int32 `[length]`.

        Raises:
          UserError: lone surrogates; a character that the corpus of a "wordpiece" or a pretrained "bpe" lacks.
        """
        _utf8(text)
        if self.kind == "wordpiece":
            _check_known(text, self._characters)
        if self.kind == "bpe" and self._unknown and self._unknown.intersection(text.encode()):
            _check_known(text, "".join(c for c in sorted(set(text)) if not self._unknown.intersection(c.encode())))
        # Before a text that begins with none, some put a space: parts must not begin so.
        word_end = _BEFORE_SPACE if getattr(self._tokenizer.pre_tokenizer, "add_prefix_space", False) else _WORD_END
        ids = (self._tokenizer.encode(part, add_special_tokens=False).ids for part in _parts(text, word_end=word_end))
        return np.fromiter(itertools.chain.from_iterable(ids), np.int32)

    def decode(self, ids) -> str:
        """The text of token ids `[length]`; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self._pieces[i] for i in ids).decode("utf-8", errors="replace")

    def stream(self, ids: Iterator[int]) -> Iterator[str]:
        """Whole characters, each as soon as its last byte has come."""
        return _whole_characters(self._pieces[i] for i in ids)

    def to_dict(self) -> dict:
        """`{"kind": …, "tokenizer": the library's JSON}`."""
        return {"kind": self.kind, "tokenizer": json.loads(self._tokenizer.to_str())}


# Runs of white space, runs of word characters, and any other character by itself; together they are the text. Longer
# runs are cut, for WordPiece tries every length of a word's beginning.
_LONGEST = 100
_WORDS = pre_tokenizers.Split(huggingface.Regex(rf"\s{{1,{_LONGEST}}}|\w{{1,{_LONGEST}}}|[^\s\w]"), "isolated")
_BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
_WORD_END = re.compile(r"\S(?=[ \n])")  # what is white space to the library is so to Python
_BEFORE_SPACE = re.compile(r"\S(?= )")
_UNKNOWN = "<unk>"
_CONTINUES = "##"


def _train_words(text: str, vocab_size: int) -> huggingface.Tokenizer:
    trainer = trainers.WordLevelTrainer(vocab_size=vocab_size, special_tokens=[_UNKNOWN], show_progress=False)
    vocabulary = _trained(models.WordLevel(), _WORDS, trainer, text).get_vocab(with_added_tokens=False)
    # A new one, for the trained one takes "<unk>" in a text for the token.
    return _untrained(models.WordLevel(vocabulary, unk_token=_UNKNOWN), _WORDS)


def _train_bpe(text: str, vocab_size: int) -> huggingface.Tokenizer:
    if vocab_size < 256:
        raise UserError(f"data.vocab_size = {vocab_size}: byte-level BPE has the 256 bytes, use 256 or more")
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=2, initial_alphabet=_BYTE_LEVEL.alphabet(), show_progress=False
    )
    return _trained(models.BPE(), _BYTE_LEVEL, trainer, text)


def _train_wordpiece(text: str, vocab_size: int) -> huggingface.Tokenizer:
    characters = sorted(set(text))
    continuing = [_CONTINUES + c for c in characters if len(_WORDS.pre_tokenize_str(c + c)) == 1]
    least = len(characters) + len(continuing)
    if vocab_size < least:
        raise UserError(
            f"data.vocab_size = {vocab_size}: the text has {len(characters)} characters, and {len(continuing)} of them "
            f"may also continue a word: use {least} or more"
        )
    # Left to itself the library numbers continuing characters in the random order of a hash map, and these numbers
    # decide between merges of the same frequency. Special tokens are numbered as they are given.
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, min_frequency=2, special_tokens=characters + continuing, show_progress=False
    )
    vocabulary = _trained(models.WordPiece(), _WORDS, trainer, text).get_vocab(with_added_tokens=False)
    # A new one, for the trained one takes special tokens out of a text before it looks for words.
    model = models.WordPiece(
        vocabulary, unk_token=_UNKNOWN, continuing_subword_prefix=_CONTINUES, max_input_chars_per_word=_LONGEST
    )
    return _untrained(model, _WORDS)


def _untrained(model, pre_tokenizer) -> huggingface.Tokenizer:
    tokenizer = huggingface.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer


def _trained(model, pre_tokenizer, trainer, text: str) -> huggingface.Tokenizer:
    tokenizer = _untrained(model, pre_tokenizer)
    tokenizer.train_from_iterator(_parts(text), trainer)
    return tokenizer


def _parts(text: str, size: int = 100_000, word_end: re.Pattern = _WORD_END) -> Iterator[str]:
    """`text` in parts of about `size` characters, for the library needs hundreds of bytes for each.

    They end where white space follows something else. No word goes on there, so the cuts change no token.
    """
    start = 0
    while start < len(text):
        found = word_end.search(text, start + size)
        end = found.end() if found else len(text)
        yield text[start:end]
        start = end


def _bytes_of(kind: str, token: str) -> bytes:
    """What a token of the library stands for, in UTF-8."""
    if kind == "bpe":
        try:
            return bytes(_GPT2_BYTES[character] for character in token)
        except KeyError as error:
            raise ValueError(f"its token {token!r} is not written in GPT-2's bytes") from error
    # No word piece but a continuing one begins with two #: each # of a text is a word by itself.
    return (token.removeprefix(_CONTINUES) if kind == "wordpiece" else token).encode()


def _gpt2_bytes() -> dict[str, int]:
    """The characters by which GPT-2 writes bytes: a visible one of Latin-1 is its own, the rest follow from U+0100."""
    characters = sorted(_BYTE_LEVEL.alphabet())
    own = [ord(character) for character in characters if ord(character) < 256]
    return dict(zip(characters, own + sorted(set(range(256)) - set(own))))


_GPT2_BYTES = _gpt2_bytes()
_TRAIN = {"word": _train_words, "bpe": _train_bpe, "wordpiece": _train_wordpiece}

KINDS = ("char", "byte", *_TRAIN)


def make(kind: str, text: str, vocab_size: int = 1024) -> Tokenizer:
    """The tokenizer of a kind for a text.

    Args:
      kind: one of `KINDS`:
        "char", every character of the text;
        "byte", the bytes of UTF-8;
        "word", the most frequent words, where runs of word characters, runs of white space and single other
          characters count as words; "<unk>", one of the vocabulary, stands for the rest, and is decoded so. It
          counts as right where it stands for any word, so bits per character do not compare with other kinds';
        "bpe", byte-level BPE as in GPT-2 (Sennrich et al. 2016, Radford et al. 2019): the pairs that are most
          frequent are merged, beginning with bytes, so that any text has tokens;
        "wordpiece", as in BERT (Schuster & Nakajima 2012, Wu et al. 2016, Devlin et al. 2019): the longest piece that
          a word begins with, then the longest that goes on from there, marked "##". Merges choose the vocabulary, as
          the library has it, not likelihood. Unlike BERT's it keeps capitals and white space, so that decoding gives
          back any text in the corpus' characters.
      text: the whole corpus.
      vocab_size: of "word", "bpe" and "wordpiece", at most; pairs that the text has once are not merged.

    Raises:
      UserError: an unknown kind; of trained ones, an empty text or a vocabulary smaller than the kind's least.

    >>> make("char", "abba").vocab_size
    2
    >>> tokenizer = make("wordpiece", "low lower lowest " * 9, vocab_size=30)
    >>> [tokenizer.decode([i]) for i in tokenizer.encode("lowers")]
    ['lower', 's']
    """
    if kind not in KINDS:
        raise UserError(f"data.tokenizer = {kind!r} is unknown: use one of {', '.join(KINDS)}")
    if kind in _TRAIN:
        return TrainedTokenizer.of(kind, text, vocab_size)
    return CharTokenizer.of(text) if kind == "char" else ByteTokenizer()


def pretrained(folder: Path) -> TrainedTokenizer | None:
    """The byte-level BPE whose files lie in a folder, as Hugging Face's libraries write them for GPT-2.

    Args:
      folder: with `tokenizer.json`, or with `vocab.json` and `merges.txt`.

    Returns:
      A tokenizer of kind "bpe", "<|endoftext|>" and other added tokens included; None where there are no such files.

    Raises:
      UserError: files that cannot be read, a tokenizer of another kind.
    """
    whole, vocabulary, merges = (folder / name for name in ("tokenizer.json", "vocab.json", "merges.txt"))
    file = whole if whole.exists() else vocabulary
    if not file.exists():
        return None
    if not whole.exists() and not merges.exists():
        raise UserError(f"{merges} is missing, which belongs to {vocabulary}: put it there")
    try:
        if whole.exists():
            tokenizer = huggingface.Tokenizer.from_str(whole.read_text(encoding="utf-8"))
        else:
            tokenizer = _untrained(models.BPE.from_file(str(vocabulary), str(merges)), _BYTE_LEVEL)
            tokenizer.decoder = decoders.ByteLevel()
            if tokenizer.token_to_id(_END_OF_TEXT) is not None:
                tokenizer.add_special_tokens([_END_OF_TEXT])
        parts = json.loads(tokenizer.to_str())
        kinds = [(parts[part] or {}).get("type") for part in ("model", "decoder", "normalizer")]
        if kinds not in (["BPE", "ByteLevel", None], ["BPE", None, None]):
            raise ValueError(f"its model, decoder and normalizer are {kinds}, not BPE, ByteLevel and none")
        _check_splits(parts["pre_tokenizer"])
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.model.dropout = None  # the same text, the same tokens
        return TrainedTokenizer("bpe", tokenizer)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    except Exception as error:  # Hugging Face's library raises no narrower one
        raise UserError(f"{file} is no byte-level BPE as GPT-2's is ({error}): put its files there") from error


def _check_splits(pre_tokenizer: dict | None) -> None:
    """Raises ValueError where splitting a text into words would lose some of it, or add to it."""
    steps = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer or {}])
    keeps = all(
        step.get("behavior", "Isolated") in ("Isolated", "MergedWithPrevious", "MergedWithNext") for step in steps
    )
    kinds = [step.get("type") for step in steps]
    if kinds[-1:] != ["ByteLevel"] or not set(kinds) <= {"Split", "Digits", "ByteLevel"} or not keeps:
        raise ValueError(f"its pre-tokenizer is {kinds}, not ByteLevel")
    if len(steps) > 1 and any(step.get("add_prefix_space") for step in steps):
        raise ValueError("its pre-tokenizer puts a space before every word (add_prefix_space)")


_END_OF_TEXT = "<|endoftext|>"


def save(tokenizer: Tokenizer, path: Path) -> None:
    """Writes a tokenizer as JSON."""
    path.write_bytes(_to_json(tokenizer))


def sha256(tokenizer: Tokenizer) -> str:
    """The digest of the file that `save` writes, in hexadecimal.

    >>> sha256(ByteTokenizer())[:8]
    'b187eab7'
    """
    return hashlib.sha256(_to_json(tokenizer)).hexdigest()


def load(path: Path) -> Tokenizer:
    """The tokenizer that `save` wrote.

    Raises:
      UserError: the file is missing, or no tokenizer.
    """
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        kind = saved.get("kind")
        if kind not in KINDS:
            raise ValueError(f"its kind is {kind!r}, not one of {', '.join(KINDS)}")
        if kind in _TRAIN:
            return TrainedTokenizer(kind, huggingface.Tokenizer.from_str(json.dumps(saved["tokenizer"])))
        return CharTokenizer(saved["characters"]) if kind == "char" else ByteTokenizer()
    except Exception as error:  # Hugging Face's library raises no narrower one
        raise UserError(
            f"{path} is no tokenizer of attnlab ({error}): restore it, or train in a new workdir"
        ) from error


def _to_json(tokenizer: Tokenizer) -> bytes:
    return (json.dumps(tokenizer.to_dict(), ensure_ascii=False) + "\n").encode()


def _check_known(text: str, characters: str) -> None:
    """Raises UserError for characters of `text` that are none of `characters`."""
    unknown = set(text).difference(characters)
    if unknown:
        named = "".join(dict.fromkeys(character for character in text if character in unknown))
        raise UserError(
            f"{named!r}: characters that the tokenizer never saw; it knows these {len(characters)}: {characters!r}"
        )


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{text!r} holds half a character (a lone surrogate): give text in UTF-8") from error


def _whole_characters(pieces: Iterable[bytes]) -> Iterator[str]:
    """The text of UTF-8 in pieces, each character as soon as its last byte has come."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for piece in pieces:
        if characters := decoder.decode(piece):
            yield characters
    if characters := decoder.decode(b"", final=True):
        yield characters


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), np.uint32)
