"""The compiled decoding loop, which draws several tokens of each text on the device."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attnlab.generation import drawing
from attnlab.generation.drawing import Draw
from attnlab.nn import GPT
from attnlab.ops.cross_entropy import loss_of_logits
from attnlab.types import Array

AHEAD = 64  # most tokens that one loop draws for a text before they are yielded


class State(NamedTuple):
    """Texts on the device, one per row."""

    token: Array  # int32 [N], the newest token, not in the caches yet
    caches: tuple[Any, ...]  # one per layer, of all tokens before `token`; each has a length [N]
    keys: Array  # [N], keys of the random numbers
    place: Array  # int32 [N], tokens drawn so far
    active: Array  # bool [N]
    seen: Array | None = None  # bool [N, V], tokens in the text, for a repetition penalty


def rolls(model: GPT) -> bool:
    """Whether caches roll on beyond the context; otherwise the last half of the context is read again."""
    return model.config.position_encoding not in ("learned", "sinusoidal")


@functools.partial(jax.jit, static_argnames=("model", "draw", "end"), donate_argnames="state")
def decode_ahead(model: GPT, draw: Draw, end: tuple[int, ...], params, state: State, ahead, max_tokens):
    """Draw up to `ahead` ≤ `AHEAD` tokens on the device, fewer if all texts end or a cache that cannot roll is full.

    Texts end at a token in `end`, or after `max_tokens` tokens. Return the state; tokens and log-probabilities
    `[N, AHEAD]`; and the number `[N]` of valid tokens.
    """
    rows = len(state.token)
    # Drawn before the loop, because within it random bits would take half of a small model's time.
    numbers = drawing.uniform(state.keys, state.place[:, None] + jnp.arange(AHEAD, dtype=jnp.int32))
    state = state._replace(active=state.active & (state.place < max_tokens))
    first = state.place

    def goes_on(carry):
        step, state, _, _ = carry
        full = False if rolls(model) else state.caches[0].length >= model.config.context
        return (step < ahead) & state.active.any() & ~(state.active & full).any()

    def extend(carry):
        step, state, drawn, logprobs = carry
        # Texts that have ended add nothing to the caches.
        logits, caches = model.apply(
            params, state.token[:, None], caches=state.caches, lengths=state.active.astype(jnp.int32)
        )
        logits = logits[:, 0]
        tokens = draw(logits, numbers[:, step], state.seen)
        scores = -loss_of_logits(logits, tokens).astype(jnp.float32)
        write = functools.partial(jax.lax.dynamic_update_index_in_dim, index=step, axis=1)
        place = state.place + state.active
        ended = jnp.isin(tokens, jnp.array(end, jnp.int32)) | (place >= max_tokens)
        seen = None if state.seen is None else state.seen.at[jnp.arange(rows), tokens].max(state.active)
        token = jnp.where(state.active, tokens, state.token)
        state = State(token, caches, state.keys, place, state.active & ~ended, seen)
        return step + 1, state, write(drawn, tokens), write(logprobs, scores)

    drawn, logprobs = (jnp.zeros((rows, AHEAD), dtype) for dtype in (jnp.int32, jnp.float32))
    carry = jnp.int32(0), state, drawn, logprobs
    _, state, drawn, logprobs = jax.lax.while_loop(goes_on, extend, carry)
    return state, drawn, logprobs, state.place - first
