"""The linear recurrence for accelerators: all chunks at once, and scans over states only.

With S the state before a chunk, every case of the recurrence has the form (with P and q' as in `chunked`)

    X = U + W S,        O = q' S + P X,        S becomes a ∘ S + k'ᵀ X

X is what the chunk writes, k' are its keys decayed to its end, and a is its decay. U, W, P, q', k' and a do not depend
on S, so batched products compute them for all chunks at once. S takes two small products per chunk, for several groups
of chunks at once. Without erasure, W is 0 and an associative scan computes S.

Products have operands of the inputs' type and sums in float32; decays, inverses and states are float32. The gradient
recomputes everything: only the arrays of the call are stored.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from attnlab.ops.recurrence.call import RecurrenceCall
from attnlab.ops.recurrence.chunked import by_chunk, joined, with_finite_logs
from attnlab.ops.recurrence.decays import Decays
from attnlab.ops.recurrence.products import product, rounded
from attnlab.ops.recurrence.substitution import solve
from attnlab.ops.recurrence.terms import Terms
from attnlab.types import Array, DType


class Inside(NamedTuple):
    """The parts of n chunks that do not depend on states.

    Attributes:
      q: q', `[n, ..., H, G, C, K]`.
      p: P, `[n, ..., H, G, C, N]`, for the N rows of X.
      k: k', `[n, ..., H, N, K]`.
      u: U, `[n, ..., H, N, V]`.
      w: W, `[n, ..., H, N, K]`; None for 0.
      a: the decays of whole chunks, `[n, ..., H, K]` or `[n, ..., H, 1]`; None for 1.
    """

    q: Array
    p: Array
    k: Array
    u: Array
    w: Array | None
    a: Array | None


def reason_against(call: RecurrenceCall) -> str | None:
    """See `call`; this backend runs all calls."""
    return None


def untried(call: RecurrenceCall) -> str | None:
    """See `call`."""
    return None if call.platform != "cpu" else "it is for GPUs and TPUs"


def run(terms: Terms, state, size: int, operand: DType):
    """Return (outputs `[..., T, H, G, V]`, last state `[..., H, K, V]`, state before each chunk of `size` tokens).

    `operand` is the type of the products' operands; sums are in float32 or wider.
    """
    *batch, length = terms.v.shape[:-2]
    count = -(-length // size)
    members = _MEMBERS if terms.case != "no erasure" and count >= 2 * _MEMBERS else count
    out, last, entering = _run(terms, state, size, members, operand)
    out, entering = (x.reshape(members, -1, *x.shape[1:]) for x in (out, entering))
    out = joined(joined(out, (out.shape[1], *batch, members * size), size), (*batch, length), members * size)
    return out, last, jnp.moveaxis(entering, 0, 1).reshape(-1, *state.shape)[:count].astype(state.dtype)


@functools.partial(jax.checkpoint, static_argnums=(2, 3, 4))
def _run(terms, state, size, members, operand):
    time = state.ndim - 3
    # Round to the narrow type early: GPUs spend their time moving the arrays between products.
    narrow = {name: rounded(getattr(terms, name), operand) for name in ("q", "k", "v")}

    def in_groups(x):
        x = by_chunk(by_chunk(x, time, members * size), time + 1, size)  # [M, groups, ..., C, H, …]
        return jnp.moveaxis(x.reshape(-1, *x.shape[2:]), time + 1, -2)

    chunks = jax.tree.map(in_groups, with_finite_logs(terms._replace(**narrow)))
    inside = _CASES[terms.case](chunks, Decays(chunks.g, operand))
    a = inside.a if inside.a is None else jnp.broadcast_to(inside.a, (*inside.k.shape[:-2], inside.a.shape[-1]))
    wide = (None if y is None else y.astype(state.dtype) for y in (inside.k, inside.u, inside.w))
    entering, x, last = _states(operand, members, *wide, a, state)
    out = product("...gck,...kv->...gcv", inside.q, entering, operand)
    out = out + product("...gcn,...nv->...gcv", inside.p, x, operand)
    return jnp.moveaxis(out, -2, time + 1), last, entering


def _plain(terms, decays):
    p = decays.scores(terms.q, terms.k)
    return Inside(decays.from_start(terms.q), p, decays.to_end(terms.k), terms.v, None, decays.whole)


def _symmetric(terms, decays):
    keys = terms.k[..., None, :, :]
    among_keys, p = _scores(decays, (keys, terms.q), terms.k)
    right = terms.beta * terms.v, -terms.beta * decays.from_start(keys)[..., 0, :, :]
    u, w = solve(terms.beta * among_keys[..., 0, :, :], right, decays.operand)  # β (I + A βᵀ)⁻¹ = (I + β A)⁻¹ β
    return Inside(decays.from_start(terms.q), p, decays.to_end(terms.k), u, w, decays.whole)


def _general(terms, decays):
    (e, r), dtype = terms.erase, decays.operand
    r = r[..., None, :, :]
    among, p = _scores(decays, (r, terms.q), jnp.concatenate([terms.k, e], axis=-2))
    among_keys, among_erased = jnp.split(among[..., 0, :, :], 2, axis=-1)
    written = product("...tj,...jv->...tv", jnp.tril(among_keys, -1), terms.v, dtype)
    u, w = solve(among_erased, (-written, -decays.from_start(r)[..., 0, :, :]), dtype)
    k = jnp.concatenate([decays.to_end(terms.k), decays.to_end(e)], axis=-2)
    u, w = jnp.concatenate([terms.v, u], axis=-2), jnp.concatenate([jnp.zeros_like(w), w], axis=-2)
    return Inside(decays.from_start(terms.q), p, k, u, w, decays.whole)


def _scores(decays, sets, columns):
    """`Decays.scores` of several sets of rows, at once with decays by feature, because they share large factors."""
    if decays.g is None or decays.g.shape[-1] == 1:
        return [decays.scores(rows, columns) for rows in sets]
    ends = [sum(x.shape[-3] for x in sets[: n + 1]) for n in range(len(sets) - 1)]
    return jnp.split(decays.scores(jnp.concatenate(sets, axis=-3), columns), ends, axis=-3)


_CASES = {"no erasure": _plain, "symmetric": _symmetric, "general": _general}

# -------------------------------------------------------------------------------------------------------------- states

# Chunks per group, M. With erasure, n chunks take 2·M + n / M steps: all groups run at once from [I | 0], which gives
# their maps; a scan over the maps gives the state before each group; all groups run at once again, from these states.
_MEMBERS = 8


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _states(operand, members, k, u, w, a, state):
    """Return (the state before each chunk `[n, ..., H, K, V]`, X `[n, ..., H, N, V]`, the last state).

    Axis n holds the first chunks of all groups, then the second chunks, and so on, up to chunk `members`.
    """
    return _forward(operand, members, k, u, w, a, state)[0]


def _forward(operand, members, k, u, w, a, state):
    k, u, w = (None if y is None else rounded(y, operand) for y in (k, u, w))  # once, not in each step
    if w is None:
        written = product("...nk,...nv->...kv", k, u, operand)
        after = _composed(a, written.at[0].add(_decayed(None if a is None else a[0], state)))
        entering = jnp.concatenate([state[None], after[:-1]])
        return (entering, u, after[-1]), (k, w, a, None, entering, u)

    def step(state, chunk):
        k, u, w, a = chunk
        x, fewer = product("...nk,...kv->...nv", w, state, operand), u.shape[-1]
        x = jnp.concatenate([x[..., :-fewer], x[..., -fewer:] + u], axis=-1)  # u adds to the last columns only
        x = rounded(x, operand)
        return _decayed(a, state) + product("...nk,...nv->...kv", k, x, operand), (rounded(state, operand), x)

    chunks, starts, maps = _by_member(members, k, u, w, a), state[None], None
    if (groups := len(k) // members) > 1:
        features = state.shape[-2]
        identity = jnp.broadcast_to(jnp.eye(features, dtype=state.dtype), (groups, *state.shape[:-1], features))
        both = jnp.concatenate([identity, jnp.zeros((groups, *state.shape), state.dtype)], axis=-1)
        both, _ = lax.scan(lambda both, chunk: (step(both, chunk)[0], None), both, chunks)
        maps = both[..., :features]
        starts = _starts(maps, both[..., features:], state)
    last, chunk_results = lax.scan(step, starts, chunks)
    entering, x = jax.tree.map(_flat, chunk_results)
    return (entering, x, last[-1]), (k, w, a, maps, entering, x)


def _backward(operand, members, residuals, cotangents):
    """Scan in reverse for the cotangent of the state after each chunk; the other cotangents are batched products."""
    k, w, a, maps, entering, x = residuals
    d_entering, d_x, d_last = cotangents
    if w is None:
        decays = None if a is None else jnp.concatenate([a, jnp.ones_like(a[:1])])
        d_after = _composed(decays, jnp.concatenate([d_entering, d_last[None]]), reverse=True)
        d_state, d_after = d_after[0], d_after[1:]
        d_x = d_x + product("...nk,...kv->...nv", k, d_after, operand)
    else:

        def step(d_after, chunk):
            k, d_x, w, a, d_before = chunk
            d_x = d_x + product("...nk,...kv->...nv", k, d_after, operand)
            d_before = d_before + _decayed(a, d_after) + product("...nk,...nv->...kv", w, d_x, operand)
            return d_before, (rounded(d_after, operand), d_x)

        chunks, ends = _by_member(members, k, d_x, w, a, d_entering), d_last[None]
        if maps is not None:
            nothing = jnp.zeros((len(maps), *d_last.shape), d_last.dtype)
            added, _ = lax.scan(lambda d, chunk: (step(d, chunk)[0], None), nothing, chunks, reverse=True)
            ends = _starts(maps.mT, added, d_last, reverse=True)
        d_states, chunk_results = lax.scan(step, ends, chunks, reverse=True)
        d_state, (d_after, d_x) = d_states[0], jax.tree.map(_flat, chunk_results)
    d_k = product("...nv,...kv->...nk", x, d_after, operand)
    d_w = None if w is None else product("...nv,...kv->...nk", d_x, entering, operand)
    d_a = None
    if a is not None:
        d_a = (entering.astype(a.dtype) * d_after).sum(axis=-1)
        d_a = d_a if a.shape[-1] > 1 else d_a.sum(axis=-1, keepdims=True)
    return d_k, d_x, d_w, d_a, d_state


_states.defvjp(_forward, _backward)


def _by_member(members, *arrays):
    """Reshape arrays `[n, ...]` to `[M, groups, ...]`."""
    return jax.tree.map(lambda x: x.reshape(members, -1, *x.shape[1:]), arrays)


def _flat(x):
    return x.reshape(-1, *x.shape[2:])


def _starts(maps, added, state, reverse=False):
    """The state before each group, where a group maps S to `maps S + added`; after each group with `reverse`."""
    return lax.scan(lambda s, group: (group[0] @ s + group[1], s), state, (maps, added), reverse=reverse)[1]


def _decayed(a, state):
    return state if a is None else a[..., None] * state


def _composed(a, written, reverse=False):
    """S_n = a_n ∘ S_{n−1} + written_n for all n, by composing neighbours; with `reverse`, S_n = a_n ∘ S_{n+1} + …."""
    if a is None:
        return lax.cumsum(written, reverse=reverse)

    def compose(first, second):
        return first[0] * second[0], first[1] * second[0] + second[1]

    return lax.associative_scan(compose, (a[..., None], written), reverse=reverse)[1]
