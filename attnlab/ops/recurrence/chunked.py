"""The linear recurrence chunk by chunk: products within a chunk, and one state from chunk to chunk.

Within a chunk, let W be the erased rows, w_t = r_tᵀ diag(exp g_t) S_{t−1}, G the running sums of g, and P^{ab} the
scores a_t·b_j·exp(G_t − G_j). With S the state before the chunk, and r', q' decayed from there to their tokens,

    (I + P^{re}) W = r' S + P^{rk} V,       O = q' S + P^{qk} V − P^{qe} W

where P^{re} and P^{rk} contain the pairs j < t, P^{qk} and P^{qe} the pairs j ≤ t (Yang et al. 2024, 2025). In the
delta rule e = βk and r = k, so one unknown, U = V − W, and two sets of scores are enough: (I + P^{kk} β) U = V − k' S.

A chunk is an affine map of the state: S becomes M S + N. `summary` computes that map for any number of tokens.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from attnlab.ops.recurrence.call import RecurrenceCall
from attnlab.ops.recurrence.decays import Decays
from attnlab.ops.recurrence.substitution import solve
from attnlab.ops.recurrence.terms import Terms

_NOTHING = -750.0  # a log whose exponential is 0, also in float64


def reason_against(call: RecurrenceCall) -> str | None:
    """See `call`; this backend runs all calls."""
    return None


def untried(call: RecurrenceCall) -> str | None:
    """See `call`."""
    return None if call.platform == "cpu" else "it is for CPUs"


def run(terms: Terms, state, size: int):
    """Return (outputs `[..., T, H, G, V]`, last state `[..., H, K, V]`, state before each chunk of `size` tokens)."""
    *batch, length = terms.v.shape[:-2]
    chunks = jax.tree.map(functools.partial(by_chunk, time=len(batch), size=size), with_finite_logs(terms))
    out, last, entering = _over_chunks(chunks, state)
    return joined(out, (*batch, length), size), last, entering


def summary(run: Callable, terms: Terms, size: int):
    """Return (M `[..., H, K, K]`, N `[..., H, K, V]`) such that T tokens map a state S to M S + N, using `run`.

    Columns of a state do not mix, so M is the final state when tokens start from the identity and write nothing.
    """
    *batch, _, heads, features = terms.k.shape
    shape = (*batch, heads, features, terms.v.shape[-1])
    identity = jnp.broadcast_to(jnp.eye(features, dtype=terms.v.dtype), (*shape[:-1], features))
    before = jnp.concatenate([jnp.zeros(shape, terms.v.dtype), identity], axis=-1)
    _, after, _ = run(terms.with_more_values(), before, size)
    return after[..., shape[-1] :], after[..., : shape[-1]]


def with_finite_logs(terms: Terms) -> Terms:
    """The terms with segment starts as decays to 0, and logs bounded below: −∞ would become NaN in products with 0."""
    g, starts = terms.g, terms.starts
    if starts is not None:
        starts = starts[..., None, None]
        g = jnp.where(starts, _NOTHING, jnp.zeros((), terms.v.dtype) if g is None else g)
    return terms._replace(g=None if g is None else jnp.maximum(g, _NOTHING), starts=None)


def by_chunk(x, time, size):
    """Cut `[..., T, …]` into chunks `[n, ..., C, …]`, with zeros at the end as padding."""
    count = -(-x.shape[time] // size)
    padding = [(0, 0)] * x.ndim
    padding[time] = (0, count * size - x.shape[time])
    x = jnp.pad(x, padding).reshape(*x.shape[:time], count, size, *x.shape[time + 1 :])
    return jnp.moveaxis(x, time, 0)


def joined(x, shape, size):
    """Join chunks `[n, ..., C, …]` to `[..., T, …]`, where `shape` is (..., T): the inverse of `by_chunk`."""
    *batch, length = shape
    x = jnp.moveaxis(x, 0, len(batch))
    x = x.reshape(*batch, x.shape[len(batch)] * size, *x.shape[len(batch) + 2 :])
    return jax.lax.slice_in_dim(x, 0, length, axis=len(batch))


@jax.custom_vjp
def _over_chunks(chunks: Terms, state):
    return _forward(chunks, state)[0]


def _forward(chunks, state):
    def step(state, chunk):
        after, out = _chunk(state, chunk)
        return after, (out, state)

    last, (out, entering) = jax.lax.scan(step, state, chunks)
    return (out, last, entering), (chunks, entering)


def _backward(residuals, cotangents):
    """Go from the last chunk to the first, and recompute each from its inputs and the stored state before it."""
    chunks, entering = residuals
    d_out, d_last, d_entering = cotangents

    def step(d_after, each):
        chunk, state, d_out, d_before = each
        _, pull_back = jax.vjp(_chunk, state, chunk)
        d_state, d_chunk = pull_back((d_after, d_out))
        return d_state + d_before, d_chunk

    d_state, d_chunks = jax.lax.scan(step, d_last, (chunks, entering, d_out, d_entering), reverse=True)
    return d_chunks, d_state


_over_chunks.defvjp(_forward, _backward)


def _chunk(state, terms: Terms):
    """Return (the state after a chunk, its outputs `[..., C, H, G, V]`), from terms `[..., C, H, (G,) F]`."""
    time = state.ndim - 3
    terms = jax.tree.map(lambda x: jnp.moveaxis(x, time, -2), terms)
    state, out = _CASES[terms.case](state, terms, Decays(terms.g))
    return state, jnp.moveaxis(out, -2, time)


def _plain(state, terms, decays):
    out = decays.read(terms.q, state) + _weighted(decays.scores(terms.q, terms.k), terms.v)
    return decays.write(state, (terms.k, terms.v)), out


def _symmetric(state, terms, decays):
    k = terms.k[..., None, :, :]
    among_keys = decays.scores(k, terms.k)[..., 0, :, :] * terms.beta.mT
    values = terms.beta * solve(among_keys, terms.v - decays.read(k, state)[..., 0, :, :])
    out = decays.read(terms.q, state) + _weighted(decays.scores(terms.q, terms.k), values)
    return decays.write(state, (terms.k, values)), out


def _general(state, terms, decays):
    e, r = terms.erase[0], terms.erase[1][..., None, :, :]
    columns = jnp.concatenate([terms.k, e], axis=-2)
    among_keys, among_erased = jnp.split(decays.scores(r, columns)[..., 0, :, :], 2, axis=-1)
    read = decays.read(r, state)[..., 0, :, :] + jnp.tril(among_keys, -1) @ terms.v
    erased = solve(among_erased, read)
    values = jnp.concatenate([terms.v, -erased], axis=-2)
    out = decays.read(terms.q, state) + _weighted(decays.scores(terms.q, columns), values)
    return decays.write(state, (terms.k, terms.v), (-e, erased)), out


def _weighted(scores, values):
    return jnp.einsum("...rtj,...jv->...rtv", scores, values)


_CASES = {"no erasure": _plain, "symmetric": _symmetric, "general": _general}
