"""Associative recall: pairs of keys and values, then queried keys, side by side or spread."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Int

from attnlab.data.tasks.task_draws import Number, check_least, compiled, key_of
from attnlab.types import Array

BLANK = 0


class Recall(NamedTuple):
    """Sequences of multi-query associative recall."""

    # int32 [B, 3·P + 2·R]: n pairs key, value, key, value, … after 2·(P − n) zeros, R more pairs, then P queried keys
    tokens: Int[Array, "B T"]
    targets: Int[Array, "B P"]  # int32 [B, P], the last value of each queried key
    pairs: Int[Array, " B"]  # int32 [B], n


@compiled
def recall(
    step: Number, *, batch_size: int, pairs: Sequence[int], vocab_size: int = 256, rewrites: int = 0, seed: Number = 0
) -> Recall:
    """Draw sequences of multi-query associative recall (Arora et al. 2023).

    Keys and values of a sequence are distinct. The queries go through all keys in random order, then start over.

    Args:
      pairs: possible numbers of pairs of a sequence; P is the largest.
      vocab_size: V; keys are 1 … h, values h + 1 … 2·h, where h = (V − 1) // 2.
      rewrites: R further pairs, with keys drawn from the earlier pairs; the last value of a key is its answer.
    """
    check_least(batch_size=batch_size, pairs=min(pairs, default=0))
    check_least(0, rewrites=rewrites)
    check_least(2 * (max(pairs) + rewrites) + 1, vocab_size=vocab_size)
    most, half = max(pairs), (vocab_size - 1) // 2
    # A single draw, because each draw adds a second to the compilation of a loop around this function.
    drawn = jax.random.uniform(key_of(step, seed), (batch_size, 2 * half + most + 1 + rewrites))
    drawn, again = drawn[:, : 2 * half + most + 1], drawn[:, 2 * half + most + 1 :]
    number = jnp.array(pairs, jnp.int32)[(drawn[:, -1:] * len(pairs)).astype(jnp.int32)]
    shuffled = jnp.argsort(drawn[:, : 2 * half].reshape(batch_size, 2, half), axis=-1).astype(jnp.int32)
    keys, values = 1 + shuffled[:, 0, :most], 1 + half + shuffled[:, 1, : most + rewrites]

    blank = jnp.arange(most) < most - number  # for pairs that the sequence does not have
    shown = jnp.where(blank[..., None], BLANK, jnp.stack([keys, values[:, :most]], axis=2))
    rewritten = most - number + (again * number).astype(jnp.int32)
    more = jnp.stack([jnp.take_along_axis(keys, rewritten, axis=1), values[:, most:]], axis=2)
    # The index of the last value that is written to each key, by its first pair or by a later pair.
    writes_key = rewritten[:, :, None] == jnp.arange(most)
    last = jnp.where(writes_key, most + jnp.arange(rewrites)[:, None], 0).max(axis=1, initial=0)
    last = jnp.maximum(last, jnp.arange(most))
    # Sorted by random numbers with blank pairs last, the first `number` are the shown pairs in random order.
    order = jnp.argsort(drawn[:, 2 * half : -1] + blank, axis=1)
    queried = jnp.take_along_axis(order, jnp.arange(most) % number, axis=1)
    queries = jnp.take_along_axis(keys, queried, axis=1)
    targets = jnp.take_along_axis(values, jnp.take_along_axis(last, queried, axis=1), axis=1)
    pairs_of = [x.reshape(batch_size, -1) for x in (shown, more)]
    tokens = jnp.concatenate([*pairs_of, queries], axis=1)
    return Recall(tokens, targets, number[:, 0])


class Spread(NamedTuple):
    """Sequences of multi-query associative recall with queries at a distance."""

    tokens: Int[Array, "B T"]  # int32 [B, T]: P pairs key, value, key, value, …, then the keys again among filler
    targets: Int[Array, "B T"]  # int32 [B, T], the key's value where the key recurs, −1 elsewhere


@compiled
def spread_recall(
    step: Number,
    *,
    batch_size: int,
    pairs: int,
    length: int,
    vocab_size: int = 8192,
    noise: bool = False,
    seed: Number = 0,
) -> Spread:
    """Draw sequences of multi-query associative recall as in figure 2 of Arora et al. 2023 (arXiv 2312.04927).

    Each key is queried once, an even number n of tokens after the end of the pairs. The numbers n are drawn without
    replacement, with probability ∝ (n / 2 + 1)^−0.99, so they are mostly small and sometimes large.

    Args:
      pairs: P.
      length: T, 4·P or more.
      vocab_size: V; keys are 1 … h, values h + 1 … 2·h, where h = (V − 1) // 2.
      noise: whether the filler is uniform over all V tokens; otherwise it is 0.
    """
    check_least(batch_size=batch_size, pairs=pairs)
    check_least(4 * pairs, length=length)
    check_least(2 * pairs + 1, vocab_size=vocab_size)
    half, places = (vocab_size - 1) // 2, (length - 2 * pairs) // 2
    symbol_key, place_key, noise_key = jax.random.split(key_of(step, seed), 3)
    # The first indices in a random order are a draw without replacement.
    drawn = jax.lax.top_k(jax.random.uniform(symbol_key, (batch_size, 2, half)), pairs)[1].astype(jnp.int32)
    keys, values = 1 + drawn[:, 0], 1 + half + drawn[:, 1]
    # The largest sums of log-probability and Gumbel noise are draws without replacement (Yellott 1977).
    weights = -0.99 * jnp.log(1.0 + jnp.arange(places))
    place = jax.lax.top_k(weights + jax.random.gumbel(place_key, (batch_size, places)), pairs)[1]
    rows, at = jnp.arange(batch_size)[:, None], 2 * pairs + 2 * place
    filler = jnp.zeros((batch_size, length), jnp.int32)
    if noise:
        filler = jax.random.randint(noise_key, filler.shape, 0, vocab_size, jnp.int32)
    shown = jnp.stack([keys, values], axis=2).reshape(batch_size, -1)
    tokens = filler.at[:, : 2 * pairs].set(shown).at[rows, at].set(keys)
    return Spread(tokens, jnp.full_like(tokens, -1).at[rows, at].set(values))
