"""Sources to copy or to reverse, with the alignment of each output."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from attnlab.data.tasks.task_draws import check_least

KINDS = ("copy", "reverse")
HELD_OUT = 10  # sources whose symbols sum to a multiple of it are held out of training


class Pairs(NamedTuple):
    """Sources and their targets."""

    source: np.ndarray  # int32 [B, S], symbols from 1, padded with 0
    lengths: np.ndarray  # int32 [B], the number of symbols of each source
    inputs: np.ndarray  # int32 [B, S + 1], the token before each output, starting with 0
    targets: np.ndarray  # int32 [B, S + 1], the outputs: the symbols, then 0
    alignment: np.ndarray  # int32 [B, S + 1], index of the source symbol of each output; −1 for none


def pairs(
    kind: str,
    step: int,
    *,
    batch_size: int,
    lengths: Sequence[int],
    vocab_size: int = 32,
    held_out: bool = False,
    seed: int = 0,
) -> Pairs:
    """Draw a batch of sources to copy or to reverse.

    Args:
      kind: "copy" or "reverse".
      lengths: possible source lengths; S is the largest.
      vocab_size: symbols are 1 … vocab_size − 1.
      held_out: draw only sources whose symbols sum to a multiple of ten; otherwise, only the others.
    """
    if kind not in KINDS:
        raise ValueError(f"kind = {kind!r}: expected one of {', '.join(KINDS)}")
    check_least(lengths=min(lengths, default=0))
    check_least(2, vocab_size=vocab_size)
    draw = np.random.default_rng((seed, step, held_out))
    longest = max(lengths)
    column = np.arange(longest + 1)
    source = np.zeros((0, longest), np.int32)
    for _ in range(100):
        if len(source) >= batch_size:
            break
        drawn = draw.integers(1, vocab_size, (4 * HELD_OUT * batch_size, longest), dtype=np.int32)
        drawn[column[:-1] >= draw.choice(lengths, len(drawn))[:, None]] = 0
        source = np.concatenate([source, drawn[(drawn.sum(1) % HELD_OUT == 0) == held_out]])
    if len(source) < batch_size:
        which = "held-out" if held_out else "training"
        raise ValueError(f"too few {which} sources: raise vocab_size = {vocab_size} or lengths = {list(lengths)}")
    source = source[:batch_size]
    length = (source > 0).sum(1).astype(np.int32)

    place = column if kind == "copy" else length[:, None] - 1 - column
    alignment = np.where(column < length[:, None], place, -1).astype(np.int32)
    targets = np.where(alignment >= 0, np.take_along_axis(source, np.maximum(alignment, 0), 1), 0).astype(np.int32)
    inputs = np.concatenate([np.zeros((batch_size, 1), np.int32), targets[:, :-1]], axis=1)
    return Pairs(source, length, inputs, targets, alignment)
