"""Hugging Face's library `tokenizers`, where files of others and texts of users enter it."""

import re
from collections.abc import Sequence

import tokenizers

from attnlab.support import files
from attnlab.support.errors import UserError

# What a regular expression has in place of one character, and a group without groups, with what follows it.
_CHARACTER = re.compile(r"\\[pP]\{[^}]*\}|\\.|\[(?:\\.|[^]\\])+\]", re.DOTALL)
_GROUP = re.compile(r"\(([^()]*)\)([*+]|\{\d*,\})?")
_REPETITION = re.compile(r"[*+]|\{\d*,\}")


def tokenizer(content: str) -> tokenizers.Tokenizer:
    """The tokenizer of a JSON text; any exception for another text."""
    for pattern in _patterns(files.parsed(content)):
        if _backtracks(pattern):
            raise ValueError(f"its pattern {pattern[:60]!r} repeats a repetition: the time for a text has no limit")
    return tokenizers.Tokenizer.from_str(content)


def encode(tokenizer: tokenizers.Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """The token ids of each text; UserError where a pattern of the tokenizer takes too long."""
    try:
        # Unlike `encode`, this releases the GIL, and computes no offsets.
        encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of Rust, and not an Exception
            raise
        raise UserError(f"the tokenizer fails on this text ({error}): use the model's own tokenizer.json") from error
    return [encoding.ids for encoding in encodings]


def _patterns(content) -> list[str]:
    """The regular expressions in the JSON of a tokenizer."""
    if isinstance(content, list):
        return [pattern for each in content for pattern in _patterns(each)]
    if not isinstance(content, dict):
        return []
    found = [content["Regex"]] if isinstance(content.get("Regex"), str) else []
    return found + [pattern for name, each in content.items() if name != "model" for pattern in _patterns(each)]


def _backtracks(pattern: str) -> bool:
    """Whether a regular expression repeats a group that repeats a part of it: its time may grow exponentially.

    >>> _backtracks(r"(?:\\s?a+)+b"), _backtracks(r"(?i:'s|'t)?|[^\\r\\n\\p{L}]?\\p{L}+|\\s+(?!\\S)")
    (True, False)
    """
    pattern = _CHARACTER.sub("x", pattern)
    while group := _GROUP.search(pattern):
        repeats = _REPETITION.search(group[1])
        if repeats and group[2]:
            return True
        pattern = pattern[: group.start()] + ("x+" if repeats or group[2] else "x") + pattern[group.end() :]
    return False
