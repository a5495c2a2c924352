"""The state after each segment of a packed sequence."""

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.ops.recurrence import chunked
from attnlab.ops.recurrence.terms import Terms, within_lengths


def states(terms: Terms, segment_ids, entering, size: int):
    """`[..., S, H, K, V]`, the states after S segments, zeros where a sequence has fewer.

    The chunk in which a segment ends is computed again from the state before it, up to that end.

    Args:
      terms: T tokens.
      segment_ids: int `[..., T]`, not traced.
      entering: the states before each chunk of `size` tokens, `[n, ..., H, K, V]`.

    Raises:
      ValueError: traced ids.
    """
    if isinstance(segment_ids, jax.core.Tracer):
        raise ValueError("return_state='segments' counts the segments, and segment_ids are traced: close over them")
    *batch, length = np.shape(segment_ids)
    ends = _ends(np.asarray(segment_ids).reshape(-1, length))  # [B, S]
    chunk = np.maximum(ends, 0) // size
    at = chunk[..., None] * size + np.arange(size)
    rows = np.arange(len(ends))[:, None]

    def of_chunk(x):
        x = x.reshape(-1, *x.shape[len(batch) :])
        return x[rows[..., None], np.minimum(at, length - 1)]

    entering = entering.reshape(len(entering), -1, *entering.shape[len(batch) + 1 :])
    cut = within_lengths(jax.tree.map(of_chunk, terms), ends - chunk * size + 1, 0)
    # Ends of −1 are of missing segments.
    before = jnp.where((ends >= 0)[..., None, None, None], entering[chunk, rows], 0)
    _, after, _ = chunked.run(cut, before, size)
    return after.reshape(*batch, *after.shape[1:])


def _ends(ids):
    """The last token of each segment, `[B, S]`, −1 where a sequence has fewer than S."""
    last = np.ones(ids.shape, bool)
    last[:, :-1] = ids[:, 1:] != ids[:, :-1]
    ends = np.full((len(ids), max(1, int(last.sum(axis=1).max(initial=1)))), -1)
    for row, of_row in zip(ends, last):
        found = np.flatnonzero(of_row)
        row[: len(found)] = found
    return ends
