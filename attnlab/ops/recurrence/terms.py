"""The arrays of a linear recurrence: checked, in the type of the computation, with heads repeated to match states."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from attnlab.ops import checks
from attnlab.types import Array


class Terms(NamedTuple):
    """The arrays of T tokens and H states.

    Padding is zero in all arrays, so it does not decay, erase, write or read.

    Attributes:
      q: `[..., T, H, G, K]`, scaled: the G queries that read a state.
      k: `[..., T, H, K]`.
      v: `[..., T, H, V]`.
      g: `[..., T, H, K]`, or `[..., T, H, 1]` for a decay of the whole state; None for 0.
      beta: `[..., T, H, 1]`, for the delta rule: e = βk, r = k, and βk is written.
      erase: (e, r), `[..., T, H, K]` each.
      starts: bool `[..., T]`, whether a token is the first of its segment; None if no token is.
    """

    q: Array
    k: Array
    v: Array
    g: Array | None = None
    beta: Array | None = None
    erase: tuple[Array, Array] | None = None
    starts: Array | None = None

    @property
    def case(self) -> str:
        """The kind of erasure: "no erasure", "symmetric" (e = βk, r = k) or "general"."""
        return "symmetric" if self.beta is not None else "no erasure" if self.erase is None else "general"

    def general(self) -> "Terms":
        """The same recurrence with e and r in place of β."""
        if self.beta is None:
            return self
        write = self.beta * self.k
        return self._replace(k=write, beta=None, erase=(write, self.k))

    def with_more_values(self) -> "Terms":
        """The same recurrence with K more features of v, all 0: nothing is written to these columns of the state."""
        zeros = jnp.zeros((*self.v.shape[:-1], self.k.shape[-1]), self.v.dtype)
        return self._replace(v=jnp.concatenate([self.v, zeros], axis=-1))


def terms_of(q, k, v, g, beta, erase) -> Terms:
    """Return the terms of a call, with q not yet scaled. Raise ValueError for arrays that do not fit together."""
    q, k, v = (checks.floating(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    _check_heads(q, k, v)
    if beta is not None and erase is not None:
        raise ValueError("beta and erase are both set: beta is the erasure (βk, k) where βk is written, so pass one")
    if erase is not None and (not isinstance(erase, tuple | list) or len(erase) != 2):
        raise ValueError(f"erase is a {type(erase).__name__}: expected a pair (e, r)")
    by_head, features = v.shape[:-1], k.shape[-1]
    g = fitting("g", g, by_head, (*by_head, features))
    beta = fitting("beta", beta, by_head)
    if erase is not None:
        erase = tuple(fitting(f"erase[{n}]", x, (*by_head, features)) for n, x in enumerate(erase))
    heads = v.shape[-2]
    q = jnp.repeat(q, max(1, heads // q.shape[-2]), axis=-2)
    terms = Terms(
        q=q.reshape(*by_head, q.shape[-2] // heads, features),
        k=jnp.repeat(k, heads // k.shape[-2], axis=-2),
        v=v,
        g=g[..., None] if g is not None and g.ndim == len(by_head) else g,
        beta=None if beta is None else beta[..., None],
        erase=erase,
    )
    dtype = jnp.result_type(jnp.float32, *jax.tree.leaves(terms))
    return jax.tree.map(lambda x: x.astype(dtype), terms)


def _check_heads(q, k, v) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if jnp.ndim(x) < 3 or 0 in x.shape[-2:]:
            raise ValueError(f"{name} has shape {jnp.shape(x)}, expected [..., length, heads, features]")
        if x.shape[:-2] != q.shape[:-2]:
            raise ValueError(f"{name} has (batch, length) {x.shape[:-2]} and q has {q.shape[:-2]}: give all the same")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"k has {k.shape[-1]} features per head and q has {q.shape[-1]}: give both the same")
    queries, keys, values = (x.shape[-2] for x in (q, k, v))
    if queries % keys or values % keys or max(queries, values) % min(queries, values):
        raise ValueError(
            f"q, k and v have {queries}, {keys} and {values} heads: expected multiples of k's for q and v, "
            "one of them a multiple of the other"
        )


def fitting(name: str, x, *shapes):
    """Return x as a floating array, or None for None. Raise ValueError if its shape is not one of `shapes`."""
    x = checks.floating(name, x)
    if x is not None and x.shape not in shapes:
        raise ValueError(f"{name} has shape {x.shape}, expected {' or '.join(map(str, shapes))}")
    return x


def within_lengths(terms: Terms, lengths, first: Array | int) -> Terms:
    """The terms with zeros for padding; `first` is the index of the first token."""
    if lengths is None:
        return terms
    inside = jnp.arange(terms.v.shape[-3]) + first < lengths[..., None]

    def masked(x):
        return jnp.where(inside[(..., *(None,) * (x.ndim - inside.ndim))], x, jnp.zeros((), x.dtype))

    return jax.tree.map(masked, terms)


def scaled(terms: Terms, scale) -> Terms:
    """The terms with q times `scale`; None for 1/√K."""
    if scale is None:
        scale = terms.k.shape[-1] ** -0.5
    elif jnp.ndim(scale):
        raise ValueError(f"scale has shape {jnp.shape(scale)}, expected (): one number for all queries")
    return terms._replace(q=terms.q * jnp.asarray(scale, terms.q.dtype))


def starts_of(segment_ids, before=None):
    """Whether each token's id differs from the previous id; `before` `[..., 1]` is the id before the first token."""
    before = segment_ids[..., :1] if before is None else before
    return segment_ids != jnp.concatenate([before, segment_ids[..., :-1]], axis=-1)
