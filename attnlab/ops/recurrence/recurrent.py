"""The specification of the linear recurrence: one token after another, to be read beside its formula.

For each token t, with the state S of its head, `[K, V]`,

    S_t = (I − e_t r_tᵀ) · diag(exp g_t) · S_{t−1} + k_t v_tᵀ        o_t = q_tᵀ S_t

The state decays, then its content at r is erased, then a value is written at k; the query reads the result.
"""

import jax
import jax.numpy as jnp

from attnlab.ops.recurrence.call import RecurrenceCall
from attnlab.ops.recurrence.terms import Terms

_FEW = 4  # up to this many tokens, going token by token is faster


def run(terms: Terms, state):
    """Return (outputs `[..., T, H, G, V]`, the last state `[..., H, K, V]`), from the state before the first token."""

    def step(state, token):
        if token.starts is not None:
            state = jnp.where(token.starts[..., None, None, None], 0, state)
        if token.g is not None:
            state = jnp.exp(token.g)[..., None] * state
        if token.erase is not None:
            e, r = token.erase
            state = state - e[..., :, None] * jnp.einsum("...k,...kv->...v", r, state)[..., None, :]
        state = state + token.k[..., :, None] * token.v[..., None, :]
        return state, jnp.einsum("...gk,...kv->...gv", token.q, state)

    time = state.ndim - 3
    by_token = jax.tree.map(lambda x: jnp.moveaxis(x, time, 0), terms.general())
    state, out = jax.lax.scan(step, state, by_token)
    return jnp.moveaxis(out, 0, time), state


def reason_against(call: RecurrenceCall) -> str | None:
    """See `call`."""
    return None if call.split is None else "it goes token by token, which context_parallel cannot split"


def untried(call: RecurrenceCall) -> str | None:
    """See `call`."""
    return None if call.length <= _FEW else f"it is for {_FEW} tokens or fewer"
