"""The linear recurrence chunk by chunk: products within a chunk, and one state from chunk to chunk.

Within a chunk let W be the rows that are erased, w_t = r_tᵀ diag(exp g_t) S_{t−1}, and P^{ab} the scores
a_t·b_j·exp(G_t − G_j). With S the state before the chunk, r' and q' decayed up to their token (Yang et al. 2024, 2025),

    (I + P^{re}) W = r' S + P^{rk} V,       O = q' S + P^{qk} V − P^{qe} W

where P^{re} and P^{rk} have the pairs j < t, the others j ≤ t. In the delta rule e = βk and r = k are the keys, so one
unknown U = V − W needs two sets of scores: (I + P^{kk} β) U = V − k' S.

A chunk is an affine map of the state: S becomes M S + N. `summary` is that map for any number of tokens.
"""

import functools

import jax
import jax.numpy as jnp

from attnlab.ops.recurrence.decays import Decays
from attnlab.ops.recurrence.substitution import solve
from attnlab.ops.recurrence.terms import Terms


def run(terms: Terms, state, size: int):
    """(Outputs `[..., T, H, G, V]`, the last state `[..., H, K, V]`, the state before each chunk of `size` tokens)."""
    *batch, length = terms.v.shape[:-2]
    chunks = jax.tree.map(functools.partial(_by_chunk, time=len(batch), size=size), terms._replace(starts=None))
    starts = terms.starts
    if starts is not None:
        starts = jnp.moveaxis(_split(starts, len(batch), size), len(batch), 0)
    out, last, entering = _over_chunks(chunks, starts, state)
    out = jnp.moveaxis(out, 0, len(batch))
    out = out.reshape(*batch, out.shape[len(batch)] * size, *out.shape[-3:])
    return jax.lax.slice_in_dim(out, 0, length, axis=len(batch)), last, entering


def summary(terms: Terms, size: int):
    """(M `[..., H, K, K]`, N `[..., H, K, V]`) with which T tokens turn a state S into M S + N.

    Columns of a state do not mix: M is the state after the tokens if they find the identity and write nothing.
    """
    *batch, _, heads, features = terms.k.shape
    shape = (*batch, heads, features, terms.v.shape[-1])
    identity = jnp.broadcast_to(jnp.eye(features, dtype=terms.v.dtype), (*shape[:-1], features))
    before = jnp.concatenate([jnp.zeros(shape, terms.v.dtype), identity], axis=-1)
    _, after, _ = run(terms.with_more_values(), before, size)
    return after[..., shape[-1] :], after[..., : shape[-1]]


def _split(x, time, size):
    """`[..., T, …]` to `[..., n, C, …]`: zeros at the end, which are padding."""
    count = -(-x.shape[time] // size)
    padding = [(0, 0)] * x.ndim
    padding[time] = (0, count * size - x.shape[time])
    return jnp.pad(x, padding).reshape(*x.shape[:time], count, size, *x.shape[time + 1 :])


def _by_chunk(x, time, size):
    """`[..., T, …]` to `[n, ..., C, …]`."""
    return jnp.moveaxis(_split(x, time, size), time, 0)


@jax.custom_vjp
def _over_chunks(chunks: Terms, starts, state):
    return _forward(chunks, starts, state)[0]


def _forward(chunks, starts, state):
    def step(state, each):
        after, out = _chunk(state, *each)
        return after, (out, state)

    last, (out, entering) = jax.lax.scan(step, state, (chunks, starts))
    return (out, last, entering), (chunks, starts, entering)


def _backward(residuals, cotangents):
    """From the last chunk to the first: each is computed again from the state before it, the only thing stored."""
    chunks, starts, entering = residuals
    d_out, d_last, d_entering = cotangents

    def step(d_after, each):
        chunk, starts, state, d_out, d_before = each
        _, pull_back = jax.vjp(lambda state, chunk: _chunk(state, chunk, starts), state, chunk)
        d_state, d_chunk = pull_back((d_after, d_out))
        return d_state + d_before, d_chunk

    d_state, d_chunks = jax.lax.scan(step, d_last, (chunks, starts, entering, d_out, d_entering), reverse=True)
    return d_chunks, None, d_state


_over_chunks.defvjp(_forward, _backward)


def _chunk(state, terms: Terms, starts):
    """(The state after a chunk, its outputs `[..., C, H, G, V]`), with terms `[..., C, H, (G,) F]`."""
    time = state.ndim - 3
    terms = jax.tree.map(lambda x: jnp.moveaxis(x, time, -2), terms)
    state, out = _CASES[terms.case](state, terms, Decays.of(terms.g, starts))
    return state, jnp.moveaxis(out, -2, time)


def _plain(state, terms, decays):
    out = decays.read(terms.q, state) + _weighted(decays.scores(terms.q, terms.k, itself=True), terms.v)
    return decays.write(state, (terms.k, terms.v)), out


def _symmetric(state, terms, decays):
    k = terms.k[..., None, :, :]
    among_keys = decays.scores(k, terms.k, itself=False)[..., 0, :, :] * terms.beta.mT
    values = terms.beta * solve(among_keys, terms.v - decays.read(k, state)[..., 0, :, :])
    out = decays.read(terms.q, state) + _weighted(decays.scores(terms.q, terms.k, itself=True), values)
    return decays.write(state, (terms.k, values)), out


def _general(state, terms, decays):
    e, r = terms.erase[0], terms.erase[1][..., None, :, :]
    read = decays.read(r, state) + _weighted(decays.scores(r, terms.k, itself=False), terms.v)
    erased = solve(decays.scores(r, e, itself=False)[..., 0, :, :], read[..., 0, :, :])
    written = _weighted(decays.scores(terms.q, terms.k, itself=True), terms.v)
    out = decays.read(terms.q, state) + written - _weighted(decays.scores(terms.q, e, itself=True), erased)
    return decays.write(state, (terms.k, terms.v), (-e, erased)), out


def _weighted(scores, values):
    return jnp.einsum("...rtj,...jv->...rtv", scores, values)


_CASES = {"no erasure": _plain, "symmetric": _symmetric, "general": _general}
