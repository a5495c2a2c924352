"""The base class of tokenizers from Hugging Face's library `tokenizers`, trained on a text or published."""

import json
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import tokenizers

from attnlab.data import characters
from attnlab.support.errors import UserError

# The library's threads gain little, and without this setting it warns in every forked process.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class LibraryTokenizer(characters.Tokenizer):
    """A tokenizer from the library; subclasses define `kind` and `encode`.

    Attributes:
      ENDS: usual names of the tokens that end a text.
      end_of_text: the tokens that end a text; by default, the tokens named in `ENDS`.
    """

    ENDS = ("<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "<|return|>")

    def __init__(self, tokenizer: tokenizers.Tokenizer, pieces: list[bytes], end_of_text: Sequence[int] = ()):
        self._tokenizer, self._pieces, self.vocab_size = tokenizer, pieces, len(pieces)
        self._word_end = self._find_word_end(json.loads(tokenizer.to_str()))
        ids = (tokenizer.token_to_id(name) for name in self.ENDS)
        self._usual_ends = tuple(sorted(i for i in ids if i is not None))
        self.end_of_text = tuple(end_of_text) or self._usual_ends

    def _find_word_end(self, content: dict, prepends: bool = False, before: str = " ") -> re.Pattern:
        """Return a pattern that matches where a text can be cut: before a character of `before`, not inside a token.

        Args:
          content: the library's JSON.
          prepends: whether the normalizer puts a space at the start of a text, and after each added token.
        """
        added = content["added_tokens"]
        if any(re.match(r"[\s▁]", token["content"]) and (token["single_word"] or prepends) for token in added):
            return re.compile("(?!)")  # because such a token depends on the character before its space
        texts = (piece.decode(errors="replace") for piece in self._pieces)
        spanned = {pair[0] for text in texts for pair in re.findall(rf"[^\s▁][{before}]", text)}
        spanned |= {token["content"][-1] for token in added if token["rstrip"] or prepends}
        spanned |= {unicodedata.normalize("NFC", character) for character in spanned}
        is_normalized = "NFC" in json.dumps(content["normalizer"]) and any(token["normalized"] for token in added)
        # A partial or unnormalized character may stand for any character that is not ASCII.
        ends = r"[!-~]" if "\ufffd" in spanned or (spanned and is_normalized) else r"\S"
        after = {token["content"][0] for token in added if prepends}
        excluded, after = (re.escape("".join(sorted(chars))) for chars in (spanned | {"▁"}, after))
        follows = (rf"[^{after}]" if after else r"[\s\S]") if prepends else ""
        return re.compile(rf"(?![{excluded}]){ends}(?=[{before}]{follows})")

    def parts(self, pieces: Iterable[str]) -> Iterator[str]:
        """See `Tokenizer.parts`; cuts are at ends of words."""
        return characters.parts(pieces, word_end=self._word_end)

    def _ids(self, text: str) -> np.ndarray:
        """The library's tokens for a text, int32 `[length]`."""
        try:
            # Unlike `encode`, this releases the GIL and computes no offsets.
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # Rust's panic, which is not an Exception
                raise
            raise UserError(
                f"the tokenizer fails on this text ({error}): use the model's own tokenizer.json"
            ) from error
        return np.array(encoding.ids, np.int32)

    def stream(self, ids: Iterator[int], continues: bool = False) -> Iterator[str]:
        """See `Tokenizer.stream`."""
        return characters.complete(self._pieces[i] for i in ids)

    def to_dict(self) -> dict:
        """`{"kind": …, "tokenizer": the library's JSON}`, and `"end_of_text"` if not the default."""
        saved = {"kind": self.kind, "tokenizer": json.loads(self._tokenizer.to_str())}
        return saved if self.end_of_text == self._usual_ends else saved | {"end_of_text": list(self.end_of_text)}
