"""Weights as compressed bytes, and text that a page can embed and show.

A weight p is stored as the byte round(255·√p), which separates small weights; the largest error, near p = 1, is 0.004.
Successive checkpoints differ little, so each is stored as its difference from the previous one, modulo 256.
"""

import base64
import json
import unicodedata
import zlib
from typing import Any

import numpy as np

LONGEST_DENSE = 256  # keys; longer rows keep only their largest weights
KEPT = 8
SHOWN_AS = {" ": "·", "\n": "⏎", "\r": "␍", "\t": "⇥"}
MANTISSA = 14  # mantissa bits stored of row sums and entropies; errors up to 2⁻¹⁵ leave four digits


def quantize(weights: np.ndarray) -> np.ndarray:
    """The bytes of weights in 0 … 1: uint8 of round(255·√p)."""
    return np.rint(255 * np.sqrt(np.clip(weights, 0, 1))).astype(np.uint8)


def is_causal(weights: np.ndarray) -> bool:
    """Whether `[…, Tq, Tk]` is square, and zero above the diagonal."""
    rows, columns = weights.shape[-2:]
    return rows == columns and not weights[..., *np.triu_indices(rows, 1)].any()


def dense(weights: np.ndarray, causal: bool) -> np.ndarray:
    """The bytes of `[…, Tq, Tk]`, row by row; up to the diagonal if causal."""
    cells = np.tril_indices(weights.shape[-1]) if causal else np.indices(weights.shape[-2:]).reshape(2, -1)
    return quantize(weights[..., *cells])


def largest(weights: np.ndarray, count: int = KEPT) -> np.ndarray:
    """The bytes of each row's largest weights, by ascending key, then all these keys, four little-endian bytes each."""
    keys = np.sort(np.argpartition(weights, -count, axis=-1)[..., -count:], axis=-1)
    kept = quantize(np.take_along_axis(weights, keys, axis=-1))
    flat = (*weights.shape[:-2], -1)
    return np.concatenate(
        [kept.reshape(flat), np.ascontiguousarray(keys.astype("<u4")).view(np.uint8).reshape(flat)], -1
    )


def row_statistics(weights: np.ndarray) -> np.ndarray:
    """Sums, then entropies in nats, of the rows of `[…, Tq, Tk]`: float32 `[…, 2, Tq]`, exact to four digits."""
    exact = np.stack([weights.sum(-1), entropies(weights)], axis=-2).astype("<f4")
    dropped = np.uint32(23 - MANTISSA)
    return (((exact.view("<u4") + (1 << (dropped - 1))) >> dropped) << dropped).view("<f4")


def entropies(weights: np.ndarray) -> np.ndarray:
    """−Σ p log p of the rows of `[…, Tq, Tk]`, in nats: `[…, Tq]`."""
    positive = weights > 0
    logs = np.log(weights, where=positive, out=np.zeros_like(weights))
    return 0 - (weights * logs).sum(-1, where=positive)  # 0 − sum, because −sum would be −0 for an entropy of 0


def record(weights: np.ndarray, causal: bool, kept: bool) -> np.ndarray:
    """One prompt's statistics, then weights, of all N heads: uint8 `[S, bytes]` from `[S, N, Tq, Tk]`."""
    statistics = np.ascontiguousarray(row_statistics(weights)).view(np.uint8)
    cells = largest(weights) if kept else dense(weights, causal)
    return np.concatenate([part.reshape(len(weights), -1) for part in (statistics, cells)], axis=1)


def stream(records: np.ndarray) -> str:
    """`[S, bytes]` as differences between checkpoints, deflated, in base64."""
    differences = np.diff(records, axis=0, prepend=np.zeros_like(records[:1]))
    return base64.b64encode(zlib.compress(differences.tobytes(), 9)).decode()


def script_json(value: Any) -> str:
    """JSON for `<script type="application/json">`: ASCII in which no tag can open or close."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def shown(token: str) -> str:
    """A token as visible text: symbols for white space, controls and lone bytes; combining marks on a circle."""
    text = "".join(map(_shown_character, token)) or "∅"
    return f"◌{text}" if unicodedata.combining(text[0]) else text


def _shown_character(character: str) -> str:
    code = ord(character)
    if character in SHOWN_AS:
        return SHOWN_AS[character]
    if code < 32:
        return chr(0x2400 + code)
    if 0xDC80 <= code <= 0xDCFF:  # a byte from "surrogateescape"
        return f"⟨{code - 0xDC00:02X}⟩"
    # Zero-width joiners and non-joiners stay, because they join the parts of an emoji or shape a word.
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp", "Zs") and character not in "\u200c\u200d":
        return "·" if unicodedata.category(character) == "Zs" else f"⟨{code:04X}⟩"
    return character
