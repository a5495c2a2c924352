"""What tokenizers of Hugging Face's library `tokenizers` share: trained on a text, or of a published model."""

import json
import os
from collections.abc import Iterator, Sequence

import numpy as np
import tokenizers

from attnlab.data import characters
from attnlab.support.errors import UserError

# Its threads gain little, and without this setting it warns in every forked process.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class LibraryTokenizer:
    """A tokenizer of the library; subclasses have `kind`, and encode.

    Attributes:
      ENDS: usual names of the tokens that end a text.
      end_of_text: the tokens that end a text; () for tokens of a usual name.
    """

    kind: str
    ENDS = ("<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "<|return|>")

    def __init__(self, tokenizer: tokenizers.Tokenizer, pieces: list[bytes], end_of_text: Sequence[int] = ()):
        self._tokenizer, self._pieces = tokenizer, pieces
        ids = (tokenizer.token_to_id(name) for name in self.ENDS)
        self._usual_ends = tuple(sorted(i for i in ids if i is not None))
        self.end_of_text = tuple(end_of_text) or self._usual_ends

    @property
    def vocab_size(self) -> int:
        """Number of tokens; a short text may have fewer than requested."""
        return len(self._pieces)

    def _ids(self, text: str) -> np.ndarray:
        """The library's tokens of a text, int32 `[length]`."""
        try:
            # Unlike `encode`, this releases the GIL, and computes no offsets.
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of Rust, and not an Exception
                raise
            raise UserError(
                f"the tokenizer fails on this text ({error}): use the model's own tokenizer.json"
            ) from error
        return np.array(encoding.ids, np.int32)

    def decode(self, ids, continues: bool = False) -> str:
        """The text of token ids `[length]`; invalid UTF-8 becomes U+FFFD."""
        return "".join(self.stream(iter(ids), continues))

    def stream(self, ids: Iterator[int], continues: bool = False) -> Iterator[str]:
        """As `Tokenizer.stream`."""
        return characters.complete(self._pieces[i] for i in ids)

    def to_dict(self) -> dict:
        """`{"kind": …, "tokenizer": the library's JSON}`, and `"end_of_text"` where their names are not usual."""
        saved = {"kind": self.kind, "tokenizer": json.loads(self._tokenizer.to_str())}
        return saved if self.end_of_text == self._usual_ends else saved | {"end_of_text": list(self.end_of_text)}
