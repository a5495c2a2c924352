"""Strings that end a text."""

from collections.abc import Iterable, Iterator, Sequence

from attnlab.data.tokenizers import Tokenizer
from attnlab.support.errors import UserError


class StopStrings:
    """Strings that end a text, across token boundaries; raises UserError for a string that no tokens can form."""

    def __init__(self, strings: Sequence[str], tokenizer: Tokenizer):
        if isinstance(strings, str):
            strings = [strings]
        for string in strings:
            _check(string, tokenizer)
        self.strings, self.tokenizer = tuple(strings), tokenizer

    def after(self, tokens: list[int], known: int) -> int | None:
        """Number of tokens up to the end of the first stop string, or None; the first `known` tokens contain none."""
        if self.strings and self._is_in(tokens):
            return next((last for last in range(known + 1, len(tokens) + 1) if self._is_in(tokens[:last])), None)
        return None

    def _is_in(self, tokens: list[int]) -> bool:
        # A final U+FFFD may be part of a character that the next token completes.
        text = self.tokenizer.decode(tokens, continues=True).removesuffix("\ufffd")
        return cut(text, self.strings)[1] is not None


def cut(text: str, strings: Sequence[str]) -> tuple[str, str | None]:
    """Return the text before the stop string that ends first, and that string; without any, the whole text and None.

    If two strings end together, the longer one counts. So a growing text is cut at the same place, whatever its pieces.
    """
    matches = [(at + len(string), at, string) for string in strings if (at := text.find(string)) >= 0]
    return (text[: min(matches)[1]], min(matches)[2]) if matches else (text, None)


def before_stop(pieces: Iterable[str], strings: Sequence[str]) -> Iterator[str]:
    """Yield the pieces of a text up to the first stop string; hold back text that may begin a stop string."""
    held = ""
    for piece in pieces:
        held, string = cut(held + piece, strings)
        safe = len(held) if string else len(held) - max((_begun(held, string) for string in strings), default=0)
        if safe:
            yield held[:safe]
        if string:
            return
        held = held[safe:]
    if held:
        yield held


def _begun(text: str, string: str) -> int:
    """The length of the longest suffix of `text` that is a proper prefix of `string`."""
    return next(n for n in range(min(len(text), len(string) - 1), -1, -1) if text.endswith(string[:n]))


def _check(string: str, tokenizer: Tokenizer) -> None:
    """Raise UserError if no tokens can form a stop string."""
    if not string:
        raise UserError("a stop string is empty: give one or more characters, or remove it")
    try:
        tokenizer.encode(string)
    except UserError as error:
        raise UserError(f"no tokens can form the stop string {string!r}: {error}") from error
    if tokenizer.kind == "word" and not _made_of(string, [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]):
        raise UserError(f"no tokens can form the stop string {string!r}: the tokenizer lacks such words; choose others")


def _made_of(string: str, pieces: list[str]) -> bool:
    """Whether some concatenation of pieces contains a string."""
    if any(string in piece for piece in pieces):
        return True
    reached = {n for n in range(1, len(string)) if any(piece.endswith(string[:n]) for piece in pieces)}
    for start in range(1, len(string)):
        if start in reached:
            rest = string[start:]
            if any(piece.startswith(rest) for piece in pieces):
                return True
            reached |= {start + len(piece) for piece in pieces if piece and rest.startswith(piece)}
    return False
