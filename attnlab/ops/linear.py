"""Linear attention: a product of features replaces the softmax, so the sum over keys becomes a recurrent state.

With a feature map φ and the causal sum over j ≤ i (Katharopoulos et al. 2020, equations 7 to 12),

    o_i = φ(q_i)ᵀ S_i / φ(q_i)ᵀ z_i,    S_i = Σ_j φ(k_j) v_jᵀ,    z_i = Σ_j φ(k_j)

The specification, `naive`, computes all weights φ(q_i)·φ(k_j) in O(T²). `chunked` and `recurrent` are forms of
`attnlab.linear_recurrence` without decay and erasure; z is then one more column of S.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Integer

from attnlab.ops import checks
from attnlab.ops.recurrence import linear_recurrence
from attnlab.types import Array

FORMS = ("chunked", "naive", "recurrent")


class LinearState(NamedTuple):
    """The state of linear attention after some keys; its size does not depend on their number.

    Attributes:
      kv: S, `[..., Hk, D, Dv]`, where D is the number of features of the feature map.
      k: z, `[..., Hk, D]`.

    >>> k = v = jnp.ones((2, 64, 4, 8))  # batch 2, length 64, 4 heads of 8
    >>> _, state = linear_attention(k, k, v, return_state=True)
    >>> state.kv.shape, state.k.shape
    ((2, 4, 8, 8), (2, 4, 8))
    """

    kv: Float[Array, "*B Hk D Dv"]
    k: Float[Array, "*B Hk D"]


def elu_plus_one(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """elu(x) + 1, which is positive, as weights must be (Katharopoulos et al. 2020, equation 7)."""
    # Not elu(x) + 1: elu(x) = exp(x) − 1 loses digits that adding 1 cannot restore, and rounds to −1 if x ≤ −18.
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

    Features, sums and the state are float32 (float64 for float64). Fully masked rows return 0.

    Args:
      q: `[..., Tq, H, D]`.
      k: `[..., Tk, Hk, D]`, H a multiple of Hk: head h of q uses head h // (H / Hk).
      v: `[..., Tk, Hk, Dv]`.
      causal: query i attends to keys j ≤ i and to all keys of `state`; requires Tq = Tk. False: i attends to every key.
      feature_map: φ, applied along the last axis; must be positive if `normalize`.
      normalize: divide by φ(q)·z, so that the weights of a row sum to 1.
      lengths: `[...]`, tokens per sequence; later keys are padding, masked and excluded from the state.
      state: the state after the preceding keys.
      return_state: also return the state after these keys.
      impl: "chunked", "naive" or "recurrent". When differentiated, "recurrent" stores a state for every token.
      chunk_size: tokens per chunk; the last chunk may be shorter.

    Returns:
      out `[..., Tq, H, Dv]` in q's type, or (out, `LinearState`).

    Raises:
      ValueError: shapes that do not fit, an unknown form, causal with Tq ≠ Tk.
      TypeError: forward-mode derivatives of "chunked".

    >>> q = k = v = jax.random.normal(jax.random.key(0), (2, 128, 4, 8))
    >>> first, state = linear_attention(q[:, :64], k[:, :64], v[:, :64], return_state=True)
    >>> second = linear_attention(q[:, 64:], k[:, 64:], v[:, 64:], state=state)
    >>> at_once = linear_attention(q, k, v, impl="naive")
    >>> bool(jnp.allclose(jnp.concatenate([first, second], 1), at_once, atol=1e-5))
    True
    """
    q, k, v = checks.queries_keys_values(q, k, v)
    lengths = _checked(q, k, v, causal, lengths, state, impl, chunk_size)
    q_features, k_features, v = _features(q, k, v, feature_map, lengths)
    value_dim = v.shape[-1] - 1
    before = _initial_state(state, k_features, v)
    if causal and impl != "naive":
        by_head = q_features.reshape(*q.shape[:-1], q_features.shape[-1])
        options = {"scale": 1.0, "state": before, "return_state": True, "impl": impl, "chunk_size": chunk_size}
        out, after = linear_recurrence(by_head, k_features, v, **options)
        out = out.reshape(*q_features.shape[:-1], value_dim + 1)
    elif causal:
        out, after = _naive(q_features, k_features, v, before)
    else:
        after = before + _outer(k_features, v)
        if impl == "naive":
            out = _read(q_features, before) + _weighted(_weights(q_features, k_features), v)
        else:
            out = _read(q_features, after)
    numerator, denominator = out[..., :-1], out[..., -1:]
    if normalize:
        numerator = quotient(numerator, denominator)
    out = numerator.reshape(*q.shape[:-1], value_dim).astype(q.dtype)
    return (out, LinearState(after[..., :-1], after[..., -1])) if return_state else out


def _checked(q, k, v, causal, lengths, state, impl, chunk_size):
    batch, q_length, kv_length = q.shape[:-3], q.shape[-3], k.shape[-3]
    if impl not in FORMS:
        raise ValueError(f"impl = {impl!r}: expected one of {', '.join(FORMS)}")
    if not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size = {chunk_size}: expected an integer number of tokens, 1 or more")
    if state is not None and not isinstance(state, LinearState):
        raise ValueError(f"state is a {type(state).__name__}: expected the LinearState that return_state=True returned")
    if causal and q_length != kv_length:
        raise ValueError(f"causal, but q has {q_length} tokens and k {kv_length}: give both the same, or causal=False")
    checks.warn_of_swapped_axes(q, k, v)
    return checks.lengths("lengths", lengths, batch, kv_length)


def _features(q, k, v, feature_map, lengths):
    """φ(q) `[..., Tq, Hk, H / Hk, D]`, φ(k) `[..., Tk, Hk, D]` and (v, 1) `[..., Tk, Hk, Dv + 1]`."""
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    kv_length, kv_heads = k.shape[-3:-1]
    q = q.astype(dtype).reshape(*q.shape[:-2], kv_heads, q.shape[-2] // kv_heads, q.shape[-1])
    inside = True if lengths is None else (jnp.arange(kv_length) < lengths[..., None])[..., None, None]
    # At padding, φ(k), v and k before the feature map are all 0, because 0 · NaN is NaN, in the derivative too.
    k_features = jnp.where(inside, feature_map(jnp.where(inside, k.astype(dtype), 0)), 0)
    # A 1 after the features of each value makes z a column of S: numerator and denominator are one product.
    v = jnp.concatenate([jnp.where(inside, v.astype(dtype), 0), jnp.ones((*v.shape[:-1], 1), dtype)], axis=-1)
    return feature_map(q), k_features, v


def quotient(numerator, denominator):
    """numerator / denominator, or 0 where the denominator is 0, as in a fully masked row."""
    # The inner `where` keeps 0/0 out of the derivative as well. The first division is by a constant, because the
    # derivative of a quotient squares its denominator: the square of a feature of 1e-30 is 0 in float32.
    nonzero = denominator != 0
    size = jax.lax.stop_gradient(jnp.where(nonzero, denominator, 1))
    return jnp.where(nonzero, (numerator / size) / jnp.where(nonzero, denominator / size, 1), 0)


def _naive(q, k, v, state):
    weights = _weights(q, k)
    visible = jnp.tril(jnp.ones(weights.shape[-2:], bool))
    return _read(q, state) + _weighted(jnp.where(visible, weights, 0), v), state + _outer(k, v)


def _weights(q, k):
    return jnp.einsum("...qhgd,...khd->...hgqk", q, k)


def _weighted(weights, v):
    return jnp.einsum("...hgqk,...khe->...qhge", weights, v)


def _read(q, state):
    return jnp.einsum("...qhgd,...hde->...qhge", q, state)


def _outer(k, v):
    return jnp.einsum("...khd,...khe->...hde", k, v)


def _initial_state(state, k_features, v):
    """S and z as one array `[..., Hk, D, Dv + 1]`, zeros for None."""
    shape = (*k_features.shape[:-3], *k_features.shape[-2:], v.shape[-1] - 1)
    if state is None:
        return jnp.zeros((*shape[:-1], v.shape[-1]), v.dtype)
    for name, x, expected in (("state.kv", state.kv, shape), ("state.k", state.k, shape[:-1])):
        if jnp.shape(x) != expected:
            raise ValueError(
                f"{name} has shape {jnp.shape(x)}, expected {expected}: pass what return_state=True returned"
            )
    return jnp.concatenate([state.kv, state.k[..., None]], axis=-1).astype(v.dtype)
