"""Word and subword tokenizers, with vocabularies that Hugging Face's `tokenizers` trains on a text.

The same text gives the same vocabulary in every process. `TrainedTokenizer` also handles published byte-level BPEs.
"""

import json
import re
from collections.abc import Sequence

import numpy as np
import tokenizers as huggingface
from tokenizers import models, pre_tokenizers, trainers

from attnlab.data.characters import check_known, parts, utf8
from attnlab.data.library import LibraryTokenizer
from attnlab.support.errors import UserError

# Runs of white space, runs of word characters, and single other characters. Longer runs are cut, because WordPiece
# tries every prefix of a word.
_LONGEST = 100
WORDS = pre_tokenizers.Split(huggingface.Regex(rf"\s{{1,{_LONGEST}}}|\w{{1,{_LONGEST}}}|[^\s\w]"), "isolated")
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
_UNKNOWN = "<unk>"
CONTINUES = "##"


class TrainedTokenizer(LibraryTokenizer):
    """One token of a trained vocabulary per word or part of a word.

    Args:
      kind: "word", "bpe" or "wordpiece", as in `attnlab.data.tokenizers.make`.
      tokenizer: the Hugging Face tokenizer with the vocabulary.
      end_of_text: the tokens that end a text; () for the tokens named in `ENDS`.
    """

    def __init__(self, kind: str, tokenizer: huggingface.Tokenizer, end_of_text: Sequence[int] = ()):
        tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
        added = tokenizer.get_added_tokens_decoder()  # such as "<|endoftext|>"
        pieces = [added[i].content.encode() if i in added else _bytes_of(kind, t) for i, t in enumerate(tokens)]
        super().__init__(tokenizer, pieces, end_of_text)
        self.kind = kind
        self._characters = "".join(token for token in tokens if len(token) == 1)
        # Bytes that have no token: the library would drop them silently.
        self._unknown = set(range(256)) - {piece[0] for piece in pieces if len(piece) == 1}

    def _find_word_end(self, content: dict) -> re.Pattern:
        # Llama 3 and Qwen take a full stop and the following new lines as one word, and some tokenizers prepend a space
        # to a text that does not begin with one, so parts of other tokenizers must begin with a space.
        is_ours = any(is_same(content["pre_tokenizer"], one) for one in (WORDS, BYTE_LEVEL))
        return super()._find_word_end(content, before=" \n" if is_ours else " ")

    @classmethod
    def of(cls, kind: str, text: str, vocab_size: int, characters: str | None = None) -> "TrainedTokenizer":
        """Train a tokenizer on `text`; "wordpiece" can encode all `characters`.

        Raises:
          UserError: an empty text, or a vocabulary smaller than the kind's minimum.
        """
        if not text:
            raise UserError("the text is empty: use a text with at least a few thousand characters")
        # The library reserves memory for `vocab_size` tokens; a text cannot have more than these: bytes, characters,
        # and one for each merged pair.
        vocab_size = min(vocab_size, 256 + 2 * len(characters or "") + 3 * len(text))
        if kind == "wordpiece":
            return cls(
                kind, _train_wordpiece(text, vocab_size, sorted(set(text if characters is None else characters)))
            )
        return cls(kind, (_train_bpe if kind == "bpe" else _train_words)(text, vocab_size))

    def encode(self, text: str, continues: bool = False) -> np.ndarray:
        """See `Tokenizer.encode`; "wordpiece" and a published "bpe" may lack a character."""
        encoded = utf8(text)
        if self.kind == "wordpiece":
            check_known(text, self._characters)
        if self.kind == "bpe" and self._unknown and self._unknown.intersection(encoded):
            check_known(text, "".join(c for c in sorted(set(text)) if not self._unknown.intersection(c.encode())))
        return np.concatenate([np.zeros(0, np.int32), *map(self._ids, self.parts([text]))])


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
    # merges of equal frequency. Special tokens keep their order, so the characters are passed as special tokens.
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, min_frequency=2, special_tokens=characters + continuing, show_progress=False
    )
    vocabulary = _trained(models.WordPiece(), WORDS, trainer, text).get_vocab(with_added_tokens=False)
    # A new tokenizer, because the trained one would extract special tokens before splitting a text into words.
    model = models.WordPiece(
        vocabulary, unk_token=_UNKNOWN, continuing_subword_prefix=CONTINUES, max_input_chars_per_word=_LONGEST
    )
    return untrained(model, WORDS)


def untrained(model, pre_tokenizer) -> huggingface.Tokenizer:
    tokenizer = huggingface.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer


def _trained(model, pre_tokenizer, trainer, text: str) -> huggingface.Tokenizer:
    tokenizer = untrained(model, pre_tokenizer)
    tokenizer.train_from_iterator(parts([text]), trainer)
    return tokenizer


def is_same(saved: dict | None, pre_tokenizer) -> bool:
    """Whether `saved`, from a `tokenizer.json`, describes this pre-tokenizer."""
    return saved == json.loads(pre_tokenizer.__getstate__())


def _bytes_of(kind: str, token: str) -> bytes:
    """The UTF-8 bytes of a token, from its string in the library."""
    if kind == "bpe":
        return bytes(GPT2_BYTES[character] for character in token)
    # Only continuing word pieces begin with "##", because every # in a text is a word by itself.
    return (token.removeprefix(CONTINUES) if kind == "wordpiece" else token).encode()


def _gpt2_bytes() -> dict[str, int]:
    """GPT-2's byte alphabet: printable Latin-1 characters are themselves, the other bytes follow from U+0100."""
    characters = sorted(BYTE_LEVEL.alphabet())
    printable = [ord(character) for character in characters if ord(character) < 256]
    return dict(zip(characters, printable + sorted(set(range(256)) - set(printable))))


GPT2_BYTES = _gpt2_bytes()
