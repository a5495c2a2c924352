"""SentencePiece tokenizers (Kudo & Richardson 2018) as published with Llama 2, Mistral, Gemma and Phi-3.

Tokens have "▁" for a space, most tokenizers prepend a space to a text, and characters without a token become bytes
like "<0xC3>". Hugging Face's `tokenizers` reads the files and encodes; vocabularies are not trained here.
"""

import json
import re
from collections.abc import Iterator, Sequence

import numpy as np
import tokenizers as huggingface

from attnlab.data import characters
from attnlab.data.library import LibraryTokenizer

_SPACE = "▁"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
# Supported steps (as in the library's JSON, or only their types): none of them drops or changes a character.
_NORMALIZERS = [
    {"type": "Prepend", "prepend": _SPACE},
    {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
]
_SPLITS = ["Metaspace", "Split", "Digits"]
_KEEPING = ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")
_TO_TEXT = [{"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}, {"type": "ByteFallback"}]
_TO_TEXT += [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]


class SentencePieceTokenizer(LibraryTokenizer):
    """One token of a SentencePiece vocabulary per word or part of a word, with the space before it.

    "<s>" and the like are not added, but where a text contains them, each becomes one token. Decoding restores a text,
    except that "▁" becomes a space, some tokenizers return a space after "</s>" and the like, and tokenizers that
    prepend no space lose the first space of a text.
    """

    kind = "sentencepiece"
    ENDS = (*LibraryTokenizer.ENDS, "</s>", "<eos>", "<end_of_turn>")  # the last three can be words in other tokenizers

    def __init__(self, tokenizer: huggingface.Tokenizer, end_of_text: Sequence[int] = ()):
        content = json.loads(tokenizer.to_str())
        tokens = content["model"]["vocab"] | {token["content"]: token["id"] for token in content["added_tokens"]}
        _check(content, tokens)
        self._prepends = any(step["type"] == "Prepend" for step in _steps(content["normalizer"]))
        self._strips = _steps(content["decoder"]) == _TO_TEXT
        super().__init__(tokenizer, _pieces(tokens), end_of_text)

    def _find_word_end(self, content: dict) -> re.Pattern:
        return super()._find_word_end(content, self._prepends)

    def encode(self, text: str, continues: bool = False) -> np.ndarray:
        """See `Tokenizer.encode`."""
        characters.utf8(text)
        ids = [np.zeros(0, np.int32)]
        for part in [text] if continues else self.parts([text]):
            # If the library prepends a space to every part, drop the space that begins a later part.
            is_later = self._prepends and (continues or len(ids) > 1)
            ids.append(self._ids(part.removeprefix(" ") if is_later else part))
        return np.concatenate(ids)

    def stream(self, ids: Iterator[int], continues: bool = False) -> Iterator[str]:
        """See `Tokenizer.stream`."""
        strips = self._strips and not continues
        for text in super().stream(ids):
            if kept := text.removeprefix(" ") if strips else text:
                yield kept
            strips = False


def _steps(part: dict | None) -> list[dict]:
    """The steps of a normalizer, pre-tokenizer or decoder, in order."""
    part = part or {}
    return next((part[key] for key in ("normalizers", "pretokenizers", "decoders") if key in part), [part] * bool(part))


def _check(content: dict, tokens: dict[str, int]) -> None:
    """Raise ValueError unless a tokenizer's parts are SentencePiece's and preserve texts."""
    splits = _steps(content["pre_tokenizer"])
    keeps = (
        all(step in _NORMALIZERS for step in _steps(content["normalizer"]))
        and all(step["type"] in _SPLITS and step.get("replacement", _SPACE) == _SPACE for step in splits)
        and all(step.get("behavior", "Isolated") in _KEEPING for step in splits)
        and (len(splits) < 2 or all(step.get("prepend_scheme") != "always" for step in splits))
        and _steps(content["decoder"]) in (_TO_TEXT, _TO_TEXT[:-1])
    )
    if not keeps:
        parts = {name: content[name] for name in ("normalizer", "pre_tokenizer", "decoder")}
        raise ValueError(f"it may change texts: {json.dumps(parts, ensure_ascii=False)[:300]}")
    if not (content["model"].get("byte_fallback") and all(f"<0x{byte:02X}>" in tokens for byte in range(256))):
        raise ValueError("it drops characters that are not in its vocabulary")


def _pieces(tokens: dict[str, int]) -> list[bytes]:
    """The UTF-8 bytes of each token."""
    if missing := set(range(len(tokens))).difference(tokens.values()):
        raise ValueError(f"its vocabulary of {len(tokens)} tokens has no token {min(missing)}")
    codes = [(token, _BYTE.fullmatch(token)) for token in sorted(tokens, key=tokens.get)]
    return [bytes.fromhex(code[1]) if code else token.replace(_SPACE, " ").encode() for token, code in codes]
