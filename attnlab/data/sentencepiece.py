"""SentencePiece's tokenizers (Kudo & Richardson 2018) as published with Llama 2, Mistral, Gemma and Phi-3.

A space is the character "▁" of a token, most tokenizers prepend a space to a text, and characters without a token are
bytes like "<0xC3>". Hugging Face's `tokenizers` reads the files and encodes; vocabularies are not trained here.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import tokenizers as huggingface

from attnlab.data import characters, library
from attnlab.data.end_of_text import SENTENCEPIECE_NAMES, as_saved, ids_of
from attnlab.support.errors import UserError

_SPACE = "▁"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
# Supported steps of each part, as in the library's JSON, or their types: normalizers change only forms of characters,
# pre-tokenizers cut without dropping any.
_TO_SPACES = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
_NORMALIZERS = [
    {"type": "Prepend", "prepend": _SPACE},
    {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
    *("NFC", "NFKC", "Precompiled"),
]
_SPLITS = ["Metaspace", "Split", "Digits"]
_DECODERS = [_TO_SPACES, "Metaspace", "ByteFallback", "Fuse", _STRIP]
_KEEPING = ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")


class SentencePieceTokenizer:
    """One token per word or part of a word, with the space before it, of a SentencePiece vocabulary.

    "<s>" and the like are not added; written in a text they become one token. Decoding restores a text, except that "▁"
    becomes a space, some tokenizers normalize characters (to NFKC) or return a space after "</s>" and the like, and
    tokenizers that prepend no space lose the first space of a text.
    """

    kind = "sentencepiece"

    def __init__(self, tokenizer: huggingface.Tokenizer, end_of_text: Sequence[int] = ()):
        content = json.loads(tokenizer.to_str())
        _check(content)
        self.end_of_text = tuple(end_of_text) or ids_of(tokenizer, SENTENCEPIECE_NAMES)
        self._tokenizer = tokenizer
        self._prepends = any(step["type"] == "Prepend" for step in _steps(content["normalizer"]))
        self._strips = _strips(content["decoder"])
        self._pieces = _pieces(content)
        self._unknown = _unknown(content)
        self._word_end = _word_end(content, self._prepends)

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    def encode(self, text: str, continues: bool = False) -> np.ndarray:
        """As `Tokenizer.encode`; UserError for a character without a token if there are no byte tokens."""
        characters.utf8(text)
        parts = [text] if continues else self.parts([text])
        found = [np.zeros(0, np.int32), *(self._ids(part, continues or at > 0) for at, part in enumerate(parts))]
        ids = np.concatenate(found)
        if self._unknown is not None and (ids == self._unknown).any():
            others = text.replace(self._tokenizer.id_to_token(self._unknown), "")
            unknown = [character for character in dict.fromkeys(others) if self._unknown in self._ids(character)]
            if unknown:
                raise UserError(f"{''.join(unknown)!r}: characters not in the tokenizer's vocabulary: leave them out")
        return ids

    def _ids(self, text: str, continues: bool = False) -> np.ndarray:
        if continues and self._prepends:
            text = text.removeprefix(" ")  # the library prepends it
        (ids,) = library.encode(self._tokenizer, [text])
        return np.array(ids, np.int32)

    def parts(self, pieces: Iterable[str]) -> Iterator[str]:
        return characters.parts(pieces, word_end=self._word_end)

    def decode(self, ids, continues: bool = False) -> str:
        """The text of token ids `[length]`; invalid UTF-8 becomes U+FFFD, `continues` keeps a first space."""
        return "".join(self.stream(iter(ids), continues))

    def stream(self, ids: Iterator[int], continues: bool = False) -> Iterator[str]:
        strips = self._strips and not continues
        for text in characters.complete(self._pieces[i] for i in ids):
            if kept := text.removeprefix(" ") if strips else text:
                yield kept
            strips = False

    def to_dict(self) -> dict:
        """`{"kind": "sentencepiece", "tokenizer": the library's JSON}`, and `"end_of_text"` as `TrainedTokenizer`."""
        return as_saved(self, self._tokenizer, SENTENCEPIECE_NAMES)


def _steps(part: dict | None) -> list[dict]:
    """The steps of a normalizer, pre-tokenizer or decoder, in order."""
    if part is None:
        return []
    steps = next((part[key] for key in ("normalizers", "pretokenizers", "decoders") if key in part), None)
    return [part] if steps is None else [inner for step in steps for inner in _steps(step)]


def _check(content: dict) -> None:
    """Raise ValueError unless a tokenizer's parts are SentencePiece's and preserve texts."""
    model, tokens = content["model"], _tokens(content)
    for part, known in (("normalizer", _NORMALIZERS), ("pre_tokenizer", _SPLITS), ("decoder", _DECODERS)):
        for step in _steps(content[part]):
            if (step not in known and step["type"] not in known) or step.get("replacement", _SPACE) != _SPACE:
                raise ValueError(f"its {part} has {json.dumps(step, ensure_ascii=False)[:200]}")
    splits = _steps(content["pre_tokenizer"])
    if any(step.get("behavior", "Isolated") not in _KEEPING for step in splits):
        raise ValueError("its pre_tokenizer drops characters")
    if len(splits) > 1 and any(step.get("prepend_scheme") == "always" for step in splits):
        raise ValueError("its pre_tokenizer puts a space before every word")
    has_bytes = bool(model.get("byte_fallback"))
    decoder = [step["type"] for step in _steps(content["decoder"])]
    known = [["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]]
    known += [] if has_bytes else [["Replace", "Fuse"], ["Replace", "Fuse", "Strip"], ["Metaspace"]]
    if decoder not in known:
        raise ValueError(f"its decoder is {decoder}, not {known[0]}")
    if not (has_bytes and all(f"<0x{byte:02X}>" in tokens for byte in range(256))) and _unknown(content) is None:
        raise ValueError("it drops characters that are not in its vocabulary")


def _tokens(content: dict) -> dict[str, int]:
    """The id of each token."""
    vocabulary = content["model"]["vocab"]
    if content["model"]["type"] == "Unigram":
        vocabulary = {token: i for i, (token, _) in enumerate(vocabulary)}
    return vocabulary | {token["content"]: token["id"] for token in content["added_tokens"]}


def _unknown(content: dict) -> int | None:
    """The token of characters that are not in the vocabulary."""
    model = content["model"]
    return model.get("unk_id") if model["type"] == "Unigram" else _tokens(content).get(model.get("unk_token"))


def _strips(decoder: dict) -> bool:
    """Whether the decoder removes the space before a text."""
    return any(s["type"] == "Strip" or s.get("prepend_scheme", "never") != "never" for s in _steps(decoder))


def _pieces(content: dict) -> list[bytes]:
    """The UTF-8 bytes of each token."""
    tokens = {i: token for token, i in _tokens(content).items()}
    if missing := set(range(len(tokens))).difference(tokens):
        raise ValueError(f"its vocabulary of {len(tokens)} tokens has no token {min(missing)}")
    are_bytes = any(step["type"] == "ByteFallback" for step in _steps(content["decoder"]))
    codes = [are_bytes and _BYTE.fullmatch(tokens[i]) for i in range(len(tokens))]
    return [bytes.fromhex(c[1]) if c else tokens[i].replace(_SPACE, " ").encode() for i, c in enumerate(codes)]


def _word_end(content: dict, prepends: bool) -> re.Pattern:
    """Places before a space where a text can be cut, because no token and no added token spans them."""
    before = {pair[0] for token in _tokens(content) for pair in re.findall(rf"[^{_SPACE} ][{_SPACE} ]", token)}
    added = [token for token in content["added_tokens"] if token["content"]]
    before |= {token["content"][-1] for token in added if token["rstrip"] or prepends}
    after = {token["content"][0] for token in added} if prepends else set()
    excluded = re.escape("".join(sorted(before)))
    follows = rf"[^{re.escape(''.join(sorted(after)))}]" if after else r"[\s\S]"
    return re.compile(rf"[^\s{_SPACE}{excluded}](?= {follows})" if prepends else rf"[^\s{_SPACE}{excluded}](?= )")
