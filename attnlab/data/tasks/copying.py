"""Sources to copy, to reverse, or to pick out of noise within one sequence, for a decoder."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Int

from attnlab.data.tasks.alignments import KINDS
from attnlab.data.tasks.task_draws import Number, check_least, compiled, key_of
from attnlab.types import Array

END, START, SEPARATOR, SYMBOLS = 0, 1, 2, 3  # symbols are from 3 on


class Copies(NamedTuple):
    """Sequences with a source and its copy."""

    # int32 [B, 2·S + 2]: 1, the n symbols of the source, 2, the n symbols of the copy; padded with 0
    tokens: Int[Array, "B T"]
    # int32 [B, 2·S + 2]: from the 2 on the next symbol of the copy, then 0 for the end; −1 elsewhere
    targets: Int[Array, "B T"]
    lengths: Int[Array, "B"]  # int32 [B], n


@compiled
def copies(
    kind: str, step: Number, *, batch_size: int, lengths: Sequence[int], vocab_size: int = 32, seed: Number = 0
) -> Copies:
    """Draw sequences with a source and its copy, or its reverse.

    Args:
      kind: "copy" or "reverse".
      lengths: possible lengths of the source; S is the largest.
      vocab_size: V; symbols are 3 … V − 1.
    """
    if kind not in KINDS:
        raise ValueError(f"kind = {kind!r}: expected one of {', '.join(KINDS)}")
    check_least(batch_size=batch_size, lengths=min(lengths, default=0))
    check_least(SYMBOLS + 1, vocab_size=vocab_size)
    symbol_key, length_key = jax.random.split(key_of(step, seed))
    longest = max(lengths)
    source = jax.random.randint(symbol_key, (batch_size, longest), SYMBOLS, vocab_size, jnp.int32)
    n = jax.random.choice(length_key, jnp.array(lengths, jnp.int32), (batch_size, 1))
    at = jnp.arange(2 * longest + 2, dtype=jnp.int32)
    nth = at - n - 2  # of the output
    wanted = nth if kind == "copy" else n - 1 - nth
    from_source, from_output = (
        jnp.take_along_axis(source, jnp.clip(index, 0, longest - 1), axis=1)
        for index in (jnp.broadcast_to(at - 1, nth.shape), wanted)
    )
    tokens = jnp.select(
        [at == 0, at <= n, at == n + 1, nth < n],
        [jnp.int32(START), from_source, jnp.int32(SEPARATOR), from_output],
        END,
    )
    following = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)), constant_values=END)
    predicted = (nth >= -1) & (nth < n)  # from the separator to the last symbol
    return Copies(tokens, jnp.where(predicted, following, -1), n[:, 0])


class Selected(NamedTuple):
    """Sequences with symbols among blanks, and then their copy."""

    tokens: Int[Array, "B T"]  # int32 [B, T]: blanks 0, n symbols 2 … among them, and n times 1 at the end
    targets: Int[Array, "B N"]  # int32 [B, n], the symbols in order, of the last n tokens


@compiled
def selective_copies(
    step: Number, *, batch_size: int, length: int, symbols: int, vocab_size: int = 18, seed: Number = 0
) -> Selected:
    """Draw sequences of selective copying (Gu and Dao 2023): symbols at random places, to be repeated at the end.

    Args:
      symbols: n.
      vocab_size: V; symbols are 2 … V − 1.
    """
    check_least(batch_size=batch_size, symbols=symbols)
    check_least(2 * symbols, length=length)
    check_least(3, vocab_size=vocab_size)
    symbol_key, place_key = jax.random.split(key_of(step, seed))
    drawn = jax.random.randint(symbol_key, (batch_size, symbols), 2, vocab_size, jnp.int32)
    noise = length - symbols
    places = jnp.argsort(jax.random.uniform(place_key, (batch_size, noise)), axis=1)[:, :symbols]
    rows = jnp.arange(batch_size)[:, None]
    tokens = jnp.zeros((batch_size, length), jnp.int32).at[rows, jnp.sort(places, axis=1)].set(drawn)
    return Selected(tokens.at[:, noise:].set(1), drawn)
