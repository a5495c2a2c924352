"""The compiled loop of decoding, which draws several tokens of each text on the device."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attnlab.generation import drawing
from attnlab.generation.drafts import Lookup
from attnlab.generation.drawing import Draw
from attnlab.nn import GPT
from attnlab.ops.masks import SlidingWindow
from attnlab.types import Array

AHEAD = 64  # most tokens that one loop draws for a text before they are yielded


class LoopOptions(NamedTuple):
    """Static options of the compiled loop."""

    draw: Draw
    end: tuple[int, ...] = ()  # tokens that end a text
    draft: int = 0  # tokens guessed in each step


class State(NamedTuple):
    """Texts on the device, one a row."""

    token: Array  # int32 [N], the newest token, not in the caches yet
    caches: tuple[Any, ...]  # of all tokens before it, one a layer; each has a length [N]
    keys: Array  # [N], keys of the random numbers
    place: Array  # int32 [N], tokens drawn so far
    active: Array  # bool [N]
    seen: Array | None = None  # bool [N, V], tokens in the text, for a repetition penalty
    lookup: Lookup | None = None  # the last tokens, for drafts


def empty(model: GPT, rows: int) -> State:
    """The state of texts of which nothing has been read, to compile programs with."""
    zeros = jnp.zeros(rows, jnp.int32)
    keys = drawing.keys(seed=0, num_samples=rows)
    return State(zeros, model.empty_caches(rows), keys, zeros, jnp.ones(rows, bool))


def rolls(model: GPT) -> bool:
    """Whether caches of long texts go on; otherwise the last half of the context is read again."""
    return model.positions not in ("learned", "sinusoidal")


@functools.partial(jax.jit, static_argnames=("model", "options"), donate_argnames="state")
def decode_ahead(model: GPT, options: LoopOptions, params, state: State, ahead, max_tokens):
    """Draw tokens on the device, until a text has `ahead` ≤ `AHEAD` more, or a cache that cannot roll is full.

    Returns the state; tokens and log-probabilities `[N, AHEAD + draft + 1]`; and the number `[N]` of valid ones.
    """
    params = _with_more_positions(model, params, options.draft)
    rows, width = len(state.token), AHEAD + options.draft + 1
    # Before the loop, because within it random bits would take half of a small model's time.
    numbers = drawing.uniform(state.keys, state.place[:, None] + jnp.arange(width))
    state = state._replace(active=state.active & (state.place < max_tokens))

    def goes_on(carry):
        state, _, _, count = carry
        full = False if rolls(model) else state.caches[0].length >= model.context
        return state.active.any() & ~_any(state, (count >= ahead) | full)

    def may_pay(carry):
        return carry[0].lookup.may_pay(options.draft, carry[0].active)

    step = functools.partial(_extend, model, options, params, numbers, max_tokens)
    no_guess = jnp.zeros((rows, 0), jnp.int32)

    def single(carry):
        return step(carry, no_guess)

    def drafted(carry):
        return step(carry, carry[0].lookup.propose(options.draft))

    def both(carry):
        # Loops: with a `lax.cond` for each pass, a small model took a tenth longer even where no draft was taken.
        carry = jax.lax.while_loop(lambda carry: goes_on(carry) & ~may_pay(carry), single, carry)
        return jax.lax.while_loop(lambda carry: goes_on(carry) & may_pay(carry), drafted, carry)

    drawn, logprobs = jnp.zeros((rows, width), jnp.int32), jnp.zeros((rows, width))
    carry = state, drawn, logprobs, jnp.zeros(rows, jnp.int32)
    return jax.lax.while_loop(goes_on, both if options.draft else single, carry)


def _any(state, condition):
    """Whether an active text meets a condition `[N]`."""
    return (state.active & condition).any()


def _with_more_positions(model, params, count):
    """Parameters with room for guesses behind the last learned position, which are fed but never kept."""
    if not count or model.positions != "learned":
        return params
    table = params["params"]["positions"]["embedding"]
    longer = {"positions": {"embedding": jnp.pad(table, ((0, count), (0, 0)))}}
    return {**params, "params": {**params["params"], **longer}}


def _extend(model, options, params, numbers, max_tokens, carry, guessed):
    """One pass over the newest token and the guesses `[N, K]`, which keeps 1 to K + 1 of the tokens it draws.

    A guess is right if it would be drawn in its place, with the random number of the place. So the tokens equal those
    of single steps (and not only in distribution, as in Leviathan et al. 2023).
    """
    state, drawn, logprobs, count = carry
    fed = jnp.concatenate([state.token[:, None], guessed], axis=1)
    # With drafts the ring has more places than the context, so a mask limits it to the context.
    mask = SlidingWindow(left=model.context - 1) if options.draft else None
    longer = model.clone(context=model.context + options.draft)
    # One token is kept of each text that is active, so any layer can leave out the others.
    lengths = None if guessed.shape[1] else state.active.astype(jnp.int32)
    logits, caches = longer.apply(params, fed, mask=mask, caches=state.caches, lengths=lengths)
    places = count[:, None] + jnp.arange(fed.shape[1])
    tokens = _draw(options.draw, logits, jnp.take_along_axis(numbers, places, axis=1), state.seen, guessed)
    left = max_tokens - state.place
    if not rolls(model):
        left = jnp.minimum(left, model.context - state.caches[0].length)
    kept, ended = _kept(options, left, state, tokens, guessed)
    if lengths is None:  # a KVCache can take back what it has read
        caches = tuple(cache._replace(length=cache.length - fed.shape[1] + kept) for cache in caches)
    newest = jnp.take_along_axis(tokens, jnp.maximum(kept - 1, 0)[:, None], axis=1)[:, 0]
    place = state.place + kept
    scores = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0] - jax.nn.logsumexp(logits, axis=-1)
    write = jax.vmap(jax.lax.dynamic_update_slice_in_dim, (0, 0, 0, None))
    drawn, logprobs = write(drawn, tokens, count, 0), write(logprobs, scores, count, 0)
    state = State(
        jnp.where(kept > 0, newest, state.token),
        caches,
        state.keys,
        place,
        state.active & ~ended & (place < max_tokens),
        None if state.seen is None else _with_tokens(state.seen, tokens, kept),
        None if state.lookup is None else state.lookup.append(tokens, kept),
    )
    return state, drawn, logprobs, count + kept


def _draw(draw: Draw, logits, numbers, seen, guessed):
    """Tokens `[N, K + 1]`, each drawn as if the guesses before it were right."""
    rows, size = numbers.shape
    if seen is not None:
        added = jnp.cumsum(jax.nn.one_hot(guessed, logits.shape[-1], dtype=jnp.int32), axis=1) > 0
        seen = seen[:, None] | jnp.pad(added, ((0, 0), (1, 0), (0, 0)))
        seen = seen.reshape(rows * size, -1)
    return draw(logits.reshape(rows * size, -1), numbers.reshape(-1), seen).reshape(rows, size)


def _kept(options, left, state, tokens, guessed):
    """The number of drawn tokens `[N, K + 1]` that each text keeps, and whether it ends with the last of them."""
    kept = jnp.minimum(1 + jnp.cumprod(tokens[:, :-1] == guessed, axis=1, dtype=jnp.int32).sum(axis=1), left)
    ended = jnp.zeros_like(state.active)
    if options.end:
        ends = (tokens[..., None] == jnp.array(options.end)).any(axis=-1)
        first = jnp.where(ends.any(axis=1), ends.argmax(axis=1), tokens.shape[1])
        ended = first < kept
        kept = jnp.minimum(kept, first + 1)
    return jnp.where(state.active, kept, 0), ended


def _with_tokens(seen, tokens, kept):
    """`seen` `[N, V]` with the first `kept` of each row's tokens."""
    tokens = jnp.where(jnp.arange(tokens.shape[1]) < kept[:, None], tokens, seen.shape[1])  # beyond all: dropped
    return jax.vmap(lambda row, ids: row.at[ids].set(True, mode="drop"))(seen, tokens)
