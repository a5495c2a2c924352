"""Corpora: the location of a text, its length, and the start of its validation part; the text stays on the disk.

`load("python_docs")`, `load("quijote")`, `load("text", path="notes/*.txt")`, or `load("tfds:NAME")` for any TFDS text
dataset that is prepared as array_record, or can be prepared without TensorFlow and Beam. The first `load` reads the
text once; the result is remembered as long as the sizes and times of the files stay the same.
"""

import bisect
import dataclasses
import hashlib
import math
import re
import time
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from attnlab.data import cache, sources
from attnlab.data.characters import code_points
from attnlab.data.data_progress import DataProgress
from attnlab.data.sources import Piece, PythonDocs, Source
from attnlab.support.errors import UserError
from attnlab.support.extras import require

BLOCKS = 64  # number of blocks in a sample
_VERSION = 2  # version of remembered scans
_SETTLED = 2  # seconds: a file written more recently may change again without a new timestamp


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A text on the disk, split into a training and a validation part.

    Attributes:
      name: the `name` passed to `load`.
      sha256: digest of the whole text's UTF-8 bytes, starting with the training part.
      characters, bytes: length of the whole text, in code points and in UTF-8.
      documents_sha256: digest of the documents' lengths.
      train_characters: length of the training part; the rest is for validation.
      alphabet: the distinct characters of the text, in code point order.
      source: reads the text.
    """

    name: str
    sha256: str
    characters: int
    bytes: int
    documents_sha256: str
    train_characters: int
    alphabet: str
    source: Source = dataclasses.field(compare=False, repr=False)

    @property
    def parts(self) -> tuple["Corpus", ...]:
        """This corpus alone; see `Mixture.parts`."""
        return (self,)

    @property
    def weights(self) -> tuple[int, ...]:
        """A single weight of 1; see `Mixture.weights`."""
        return (1,)

    def pieces(self) -> Iterator[tuple[str, Piece]]:
        """The text in pieces, each with its split, "train" or "validation"; a document in both splits counts as two.

        Raises:
          UserError: a file that cannot be read, or a text that changed since it was scanned.
        """
        left, digest = self.train_characters, hashlib.sha256()
        for piece in self.source.pieces():
            digest.update(piece.text.encode())
            if left:
                here = piece.text[:left]
                left -= len(here)
                yield "train", Piece(here, piece.ends or not left)
                if left or len(here) == len(piece.text):
                    continue
                piece = Piece(piece.text[len(here) :], piece.ends)
            yield "validation", piece
        if digest.hexdigest() != self.sha256:
            raise UserError(f"{self.name} changed while it was read: run the command again")

    def sample(self, size: int) -> str:
        """Evenly spaced blocks of the text, about `size` bytes in all, or the whole text."""
        if self.bytes <= size:
            return "".join(piece.text for piece in self.source.pieces())
        block = max(1, size * self.characters // self.bytes // BLOCKS)
        starts = [number * (self.characters - block) // (BLOCKS - 1) for number in range(BLOCKS)]
        blocks, position = [], 0
        for text in (piece.text for piece in self.source.pieces()):
            first, last = bisect.bisect(starts, position - block), bisect.bisect_left(starts, position + len(text))
            blocks += [text[max(start - position, 0) : start + block - position] for start in starts[first:last]]
            position += len(text)
        return "".join(blocks)


class Mixture(NamedTuple):
    """Several corpora, from which windows are drawn in proportion to weights.

    Attributes:
      parts: the corpora.
      weights: one positive integer for each corpus, without a common factor.
    """

    parts: tuple[Corpus, ...]
    weights: tuple[int, ...]
    name = "mixture"

    @property
    def sha256(self) -> str:
        """Digest of the parts' digests and weights."""
        return cache.digest([[part.sha256, weight] for part, weight in zip(self.parts, self.weights)])

    @property
    def characters(self) -> int:
        """Length of all texts."""
        return sum(part.characters for part in self.parts)

    @property
    def alphabet(self) -> str:
        """The distinct characters of the texts, in code point order."""
        return "".join(sorted(set().union(*(part.alphabet for part in self.parts))))

    def sample(self, size: int) -> str:
        """Samples of the parts, in proportion to the weights; small parts are returned whole."""
        shares = [size * weight // sum(self.weights) for weight in self.weights]
        return "".join(part.sample(share) for part, share in zip(self.parts, shares))


def load(
    name: str,
    *,
    path: str = "",
    feature: str = "",
    validation_fraction: float = 0.1,
    mixture: str = "",
    quiet: bool = True,
) -> Corpus | Mixture:
    """Find a corpus, prepare it if necessary, and read it once unless the same files were read before.

    Args:
      name: "python_docs", "quijote", "text" or "tfds:NAME" (also "tfds:NAME/CONFIG").
      path: for "text", a file or a glob, whose files are joined in name order. *.jsonl, *.ndjson and *.parquet
        are read in their formats; other files are read as UTF-8 text.
      feature: for "tfds:NAME", the text feature; may be empty if there is only one. For JSONL and Parquet, the field or
        column, "text" by default.
      validation_fraction: fraction of the characters to hold out, at the end; for a TFDS dataset with a validation or
        test split, that split is held out instead.
      mixture: corpora and their weights instead of a name: "quijote=3, notes/*.txt=1, tfds:NAME=0.5".
      quiet: print no progress.

    Raises:
      UserError: an unknown name, or a path or dataset that cannot be read.

    >>> corpus = load("python_docs")
    >>> corpus.characters > 400_000, len(corpus.sha256)
    (True, 64)
    """
    if not 0 < validation_fraction < 1:
        raise UserError(f"data.validation_fraction = {validation_fraction}: expected a fraction between 0 and 1")
    if mixture and path:
        raise UserError("data.path and data.mixture are both set: name the path in the mixture, as PATH=WEIGHT")
    weights = parse_mixture(mixture) if mixture else {name: 1}
    paths = {each: "" if _is_named(each) else each for each in weights} if mixture else {name: path}
    by_name = {each: _find(each, paths[each], feature) for each in weights}
    if feature and not any(source.feature == feature for source in by_name.values()):
        raise UserError(f"data.feature = {feature!r}, but {path or ', '.join(weights)} has no features: remove it")
    parts = [_scanned(each, path or each, source, validation_fraction, quiet) for each, source in by_name.items()]
    return Mixture(tuple(parts), tuple(weights.values())) if mixture else parts[0]


class Strings(NamedTuple):
    """A text in memory, as its training and validation parts."""

    train: str
    validation: str

    @property
    def text(self) -> str:
        """Both parts."""
        return self.train + self.validation


def read_text(name: str, *, path: str = "", feature: str = "", validation_fraction: float = 0.1) -> Strings:
    """Read a corpus into memory; arguments and errors as for `load`.

    >>> train, validation = read_text("python_docs")
    >>> len(train) > 8 * len(validation)
    True
    """
    texts = {"train": [], "validation": []}
    for split, piece in load(name, path=path, feature=feature, validation_fraction=validation_fraction).pieces():
        texts[split].append(piece.text)
    return Strings("".join(texts["train"]), "".join(texts["validation"]))


def parse_mixture(mixture: str) -> dict[str, int]:
    """Parse a mixture into its corpora and their weights, as integers without a common factor.

    Args:
      mixture: NAME=WEIGHT, separated by commas; NAME is a built-in corpus, tfds:NAME, a path or a glob; WEIGHT is a
        positive number.

    Raises:
      UserError: `mixture` does not have this form.
    """
    fractions = {}
    for entry in mixture.split(","):
        name, _, weight = (word.strip() for word in entry.rpartition("="))
        if not name or name in fractions or not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", weight) or not Fraction(weight):
            raise UserError(
                f"data.mixture: {entry.strip()!r}: expected NAME=WEIGHT with a positive weight, separated by commas, "
                "each name once"
            )
        fractions[name] = Fraction(weight)
    weights = fractions.values()
    unit = Fraction(math.gcd(*(w.numerator for w in weights)), math.lcm(*(w.denominator for w in weights)))
    return {name: int(weight / unit) for name, weight in fractions.items()}


def _is_named(name: str) -> bool:
    return name in ("python_docs", "quijote") or name.startswith("tfds:")


def _find(name: str, path: str, feature: str) -> Source:
    if path:
        return sources.find(path, feature)
    if not _is_named(name):
        raise UserError(
            f"data.name = {name!r}: expected python_docs, quijote or tfds:NAME, or a text: --config.data.path=FILE, "
            "or a glob such as 'notes/*.txt'"
        )
    if name == "python_docs":
        return PythonDocs()
    for library in ("tensorflow_datasets", "array_record", "importlib_resources"):
        require(library, "data", name)
    from attnlab.data import datasets

    return datasets.find(name, feature)


# ------------------------------------------------------------------------------------------------------------ scanning


def _scanned(name: str, called: str, source: Source, validation_fraction: float, quiet: bool) -> Corpus:
    before, started = source.signature(), time.time()
    scan = before and cache.recall("scans", [_VERSION, before])
    if not scan:
        scan = _scan(name, source, before, quiet)
        if source.signature() != before:
            raise UserError(f"{called} changed while it was read: run the command again")
        if before and all(stamp[2] < (started - _SETTLED) * 1e9 for stamp in before[-1]):
            cache.remember("scans", [_VERSION, before], scan)
    if not scan["characters"]:
        raise UserError(f"{called} is empty: use a text with at least a few thousand characters")
    if len(scan["alphabet"]) < 2:
        raise UserError(f"{called} only repeats {scan['alphabet']!r}, so there is nothing to predict: use another text")
    held_out = scan.pop("held_out")
    cut = int(scan["characters"] * (1 - validation_fraction)) if held_out is None else scan["characters"] - held_out
    return Corpus(name, train_characters=cut, source=source, **scan)


def _scan(name: str, source: Source, signature: list | None, quiet: bool) -> dict:
    """Fields of a `Corpus` from one pass over its text, and the length of a separate validation split, or None."""
    digest, lengths, seen = hashlib.sha256(), hashlib.sha256(), np.zeros(0x110000, bool)  # by code point
    characters = size = length = 0
    held_out, ascii_seen = None, b""
    total = sum(stamp[1] for stamp in signature[-1]) if signature else None
    with DataProgress(f"reading {name}", total, quiet) as progress:
        for piece in source.pieces():
            encoded = piece.text.encode()
            digest.update(encoded)
            if rest := encoded.translate(None, ascii_seen).decode():  # many times faster than checking all characters
                seen[code_points(rest)] = True
                ascii_seen = bytes(np.flatnonzero(seen[:128]).tolist())
            characters, size, length = characters + len(piece.text), size + len(encoded), length + len(piece.text)
            if piece.held_out:
                held_out = (held_out or 0) + len(piece.text)
            if piece.ends:
                lengths.update(length.to_bytes(8, "little"))
                length = 0
            progress.advance(len(encoded))
    return {
        "sha256": digest.hexdigest(),
        "characters": characters,
        "bytes": size,
        "documents_sha256": lengths.hexdigest(),
        "held_out": held_out,
        "alphabet": "".join(map(chr, np.flatnonzero(seen))),
    }
