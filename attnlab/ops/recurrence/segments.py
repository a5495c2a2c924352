"""The state after each segment of a packed sequence."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.ops.recurrence import chunked
from attnlab.ops.recurrence.terms import Terms, within_lengths


def states(terms: Terms, segment_ids, lengths, entering, size: int):
    """The states after S segments, `[..., S, H, K, V]`; zeros where a sequence has fewer or a segment is padding.

    The chunk in which a segment ends is recomputed from the state before the chunk, up to the segment's last token.

    Args:
      terms: the terms of T tokens.
      segment_ids: int `[..., T]`, not traced.
      lengths: int `[...]`, or None.
      entering: the states before each chunk of `size` tokens, `[n, ..., H, K, V]`.

    Raises:
      ValueError: the ids are traced.
    """
    if isinstance(segment_ids, jax.core.Tracer):
        raise ValueError("return_state='segments' counts the segments, but segment_ids are traced: close over them")
    *batch, length = np.shape(segment_ids)
    if not length:
        return jnp.zeros((*batch, 0, *entering.shape[-3:]), entering.dtype)
    ends = _ends(np.asarray(segment_ids).reshape(math.prod(batch), length))  # [B, S]
    chunk = np.maximum(ends, 0) // size
    at = chunk[..., None] * size + np.arange(size)
    rows = np.arange(len(ends))[:, None]

    def gather(x):
        x = x.reshape(len(ends), *x.shape[len(batch) :])
        return x[rows[..., None], np.minimum(at, length - 1)]

    entering = entering.reshape(len(entering), len(ends), *entering.shape[len(batch) + 1 :])
    cut = within_lengths(jax.tree.map(gather, terms), ends - chunk * size + 1, 0)
    _, after, _ = chunked.run(cut, entering[chunk, rows], size)
    # An end of −1 marks a missing segment.
    first = np.pad(ends + 1, ((0, 0), (1, 0)))[:, :-1]
    exists = (ends >= 0) & (first < (length if lengths is None else jnp.reshape(lengths, (-1, 1))))
    after = jnp.where(exists[..., None, None, None], after, 0)
    return after.reshape(*batch, *after.shape[1:])


def _ends(ids):
    """The last token of each segment, `[B, S]`, −1 where a sequence has fewer than S."""
    last = np.ones(ids.shape, bool)
    last[:, :-1] = ids[:, 1:] != ids[:, :-1]
    ends = np.full((len(ids), last.sum(axis=1).max(initial=1)), -1)
    for row, is_last in zip(ends, last):
        positions = np.flatnonzero(is_last)
        row[: len(positions)] = positions
    return ends
