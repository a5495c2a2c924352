"""Linear attention: the softmax gives way to a product of features, and the sum over keys can be carried along.

With a feature map φ and the causal sum over j ≤ i (Katharopoulos et al. 2020, equations 7 to 12),

    o_i = φ(q_i)ᵀ S_i / φ(q_i)ᵀ z_i,    S_i = Σ_j φ(k_j) v_jᵀ,    z_i = Σ_j φ(k_j)

Three forms give one answer. `naive` writes all weights φ(q_i)·φ(k_j) out: O(T²), the specification. `recurrent` carries
(S, z) from token to token: T steps. `chunked` carries them from chunk to chunk and is naive within one: time O(T·C),
products large enough for the machine.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Integer

from attnlab.ops import checks
from attnlab.types import Array

FORMS = ("chunked", "naive", "recurrent")


class LinearState(NamedTuple):
    """What linear attention knows of the keys so far; of one size, however many there were.

    Attributes:
      kv: S, `[..., Hk, D, Dv]`, D here the number of features that the feature map makes.
      k: z, `[..., Hk, D]`.

    >>> k = v = jnp.ones((7, 2, 4))  # length 7, 2 heads of 4
    >>> _, state = linear_attention(k, k, v, return_state=True)
    >>> state.kv.shape, state.k.shape
    ((2, 4, 4), (2, 4))
    """

    kv: Float[Array, "*B Hk D Dv"]
    k: Float[Array, "*B Hk D"]


def elu_plus_one(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """elu(x) + 1: positive, so that weights are (Katharopoulos et al. 2020, equation 7).

    >>> elu_plus_one(jnp.array([-1.0, 0.0, 1.0]))
    Array([0.36787945, 1.        , 2.        ], dtype=float32)
    """
    # Not elu(x) + 1: exp(x) − 1 has lost the digits that adding 1 would need, and is −1 already at x = −18.
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0)))


def linear_attention(
    q: Float[Array, "*B Tq H D"],
    k: Float[Array, "*B Tk Hk D"],
    v: Float[Array, "*B Tk Hk Dv"],
    *,
    causal: bool = True,
    feature_map: Callable = elu_plus_one,
    normalize: bool = True,
    lengths: Integer[Array, "*B"] | None = None,
    state: LinearState | None = None,
    return_state: bool = False,
    impl: str = "chunked",
    chunk_size: int = 64,
):
    """Attention without a softmax, in time linear in the length (Katharopoulos et al. 2020, equations 7 to 12).

    Features, sums and the state are float32 (float64 for float64). A query that sees no key returns 0.

    Args:
      q: `[..., Tq, H, D]`.
      k: `[..., Tk, Hk, D]`, H a multiple of Hk: head h of q reads head h // (H / Hk).
      v: `[..., Tk, Hk, Dv]`.
      causal: query i sees keys j ≤ i, and all that `state` holds; Tq = Tk then. False: every key.
      feature_map: φ, along the last axis; positive where `normalize`.
      normalize: divide by φ(q)·z, so that the weights of a row sum to 1.
      lengths: `[...]`, keys at this index of their row and after it are padding, neither seen nor kept.
      state: of the keys that came before.
      return_state: also return the state after these keys.
      impl: "chunked", "naive" or "recurrent". Differentiated, "recurrent" keeps a state for every token.
      chunk_size: C, tokens of a chunk; the last may be ragged.

    Returns:
      out `[..., Tq, H, Dv]` in q's type, or (out, `LinearState`).

    Raises:
      ValueError: shapes that do not fit, an unknown form, causal with Tq ≠ Tk; in one line.

    >>> q = k = v = jax.random.normal(jax.random.key(0), (2, 100, 4, 8))
    >>> first, state = linear_attention(q[:, :60], k[:, :60], v[:, :60], return_state=True)
    >>> then = linear_attention(q[:, 60:], k[:, 60:], v[:, 60:], state=state)
    >>> whole = linear_attention(q, k, v, impl="naive")
    >>> bool(jnp.allclose(jnp.concatenate([first, then], 1), whole, atol=1e-5))
    True
    """
    q, k, v = checks.queries_keys_values(q, k, v)
    batch, (q_length, num_heads, _), (kv_length, kv_heads, value_dim) = q.shape[:-3], q.shape[-3:], v.shape[-3:]
    if impl not in FORMS:
        raise ValueError(f"impl = {impl!r}: expected one of {', '.join(FORMS)}")
    if not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size = {chunk_size}: expected a whole number of tokens, 1 or more")
    if state is not None and not isinstance(state, LinearState):
        raise ValueError(f"state is a {type(state).__name__}: expected the LinearState that return_state=True gave")
    if causal and q_length != kv_length:
        raise ValueError(f"causal, but q has {q_length} tokens and k {kv_length}: give both the same, or causal=False")
    lengths = checks.whole("lengths", lengths)
    if lengths is not None and lengths.shape != batch:
        raise ValueError(f"lengths has shape {lengths.shape}, expected {batch}: one for each row")

    # The heads of q that share a head of k stand beside it: [..., T, Hk, H / Hk, D].
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    q_features = feature_map(q.astype(dtype).reshape(*q.shape[:-2], kv_heads, num_heads // kv_heads, q.shape[-1]))
    real = True if lengths is None else (jnp.arange(kv_length) < lengths[..., None])[..., None, None]
    # Zeros before the feature map as well: 0 · NaN is NaN, in its derivative too.
    k_features = jnp.where(real, feature_map(jnp.where(real, k.astype(dtype), 0)), 0)
    # A last value of 1 makes z a column of S: numerator and denominator are one product.
    v = jnp.concatenate([jnp.where(real, v.astype(dtype), 0), jnp.ones((*v.shape[:-1], 1), dtype)], axis=-1)
    shape = (*batch, kv_heads, k_features.shape[-1], value_dim)
    before = jnp.zeros((*shape[:-1], value_dim + 1), dtype) if state is None else _joined(state, shape, dtype)

    if not causal:
        after = before + _outer(k_features, v)
        if impl == "naive":
            out = _read(q_features, before) + _weighted(_weights(q_features, k_features), v)
        else:
            out = _read(q_features, after)
    else:
        out, after = {"naive": _naive, "recurrent": _recurrent}.get(impl, _chunked)(
            q_features, k_features, v, before, min(chunk_size, max(kv_length, 1))
        )
    numerator, denominator = out[..., :-1], out[..., -1:]
    if normalize:
        # Where no key is seen both are 0; the inner `where` keeps 0/0 out of the derivative as well. Divided by its own
        # size first, for the derivative squares the denominator, and features may be as small as 1e-30.
        seen = denominator != 0
        size = jax.lax.stop_gradient(jnp.where(seen, denominator, 1))
        numerator = jnp.where(seen, (numerator / size) / jnp.where(seen, denominator / size, 1), 0)
    out = numerator.reshape(*batch, q_length, num_heads, value_dim).astype(q.dtype)
    return (out, LinearState(after[..., :-1], after[..., -1])) if return_state else out


def _naive(q, k, v, state, chunk_size=None):
    weights = _weights(q, k)
    visible = jnp.tril(jnp.ones(weights.shape[-2:], bool))
    return _read(q, state) + _weighted(jnp.where(visible, weights, 0), v), state + _outer(k, v)


def _recurrent(q, k, v, state, chunk_size=None):
    def step(state, token):
        q, k, v = token
        state = state + k[..., :, None] * v[..., None, :]
        return state, jnp.einsum("...hgd,...hde->...hge", q, state)

    batch_axes = q.ndim - 4
    by_token = (jnp.moveaxis(x, batch_axes, 0) for x in (q, k, v))
    state, out = jax.lax.scan(step, state, tuple(by_token))
    return jnp.moveaxis(out, 0, batch_axes), state


def _chunked(q, k, v, state, chunk_size):
    batch_axes, length = q.ndim - 4, q.shape[-4]
    chunks = -(-length // chunk_size)

    def by_chunk(x):
        """`[..., T, …]` to `[chunks, ..., C, …]`; features of 0 fill the last one up, and add nothing."""
        padding = [(0, 0)] * x.ndim
        padding[batch_axes] = (0, chunks * chunk_size - length)
        x = jnp.pad(x, padding)
        x = x.reshape(*x.shape[:batch_axes], chunks, chunk_size, *x.shape[batch_axes + 1 :])
        return jnp.moveaxis(x, batch_axes, 0)

    # Backward the weights within a chunk are computed again: what is kept is one state a chunk.
    @jax.checkpoint
    def step(state, chunk):
        out, state = _naive(*chunk, state)
        return state, out

    state, out = jax.lax.scan(step, state, (by_chunk(q), by_chunk(k), by_chunk(v)))
    out = jnp.moveaxis(out, 0, batch_axes)
    out = out.reshape(*out.shape[:batch_axes], chunks * chunk_size, *out.shape[batch_axes + 2 :])
    return jax.lax.slice_in_dim(out, 0, length, axis=batch_axes), state


def _weights(q, k):
    return jnp.einsum("...qhgd,...khd->...hgqk", q, k)


def _weighted(weights, v):
    return jnp.einsum("...hgqk,...khe->...qhge", weights, v)


def _read(q, state):
    return jnp.einsum("...qhgd,...hde->...qhge", q, state)


def _outer(k, v):
    return jnp.einsum("...khd,...khe->...hde", k, v)


def _joined(state, shape, dtype):
    """S and z as one array."""
    for name, x, expected in (("state.kv", state.kv, shape), ("state.k", state.k, shape[:-1])):
        if jnp.shape(x) != expected:
            raise ValueError(f"{name} has shape {jnp.shape(x)}, expected {expected}: give what return_state=True gave")
    return jnp.concatenate([state.kv, state.k[..., None]], axis=-1).astype(dtype)
