"""Which tokens a model takes for alike: cosine similarity, and nearest neighbours by it."""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from attnlab.types import Array


def cosine_similarity(u: Float[Array, "*M F"], v: Float[Array, "*N F"]) -> Float[Array, "..."]:
    """u·v / (‖u‖ ‖v‖) of every vector of `u` with every one of `v`; 0 where one is 0.

    Args:
      u: `[..., F]`.
      v: `[..., F]`, with axes of its own.

    Returns:
      `[axes of u, axes of v]`, in [−1, 1] to rounding.

    Raises:
      ValueError: vectors of two widths.

    >>> cosine_similarity(jnp.array([[3.0, 0.0], [1.0, 1.0]]), jnp.array([2.0, 0.0]))
    Array([1.        , 0.70710677], dtype=float32)
    """

    def unit(x):
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        squares = (x**2).sum(axis=-1, keepdims=True)
        return x * jnp.where(squares == 0, 0, jax.lax.rsqrt(jnp.where(squares == 0, 1, squares)))

    if jnp.shape(u)[-1:] != jnp.shape(v)[-1:]:
        raise ValueError(f"u has shape {jnp.shape(u)} and v {jnp.shape(v)}: give both the same width, the last axis")
    return jnp.tensordot(unit(u), unit(v), axes=(-1, -1))


def nearest(
    embedding: Float[Array, "V F"], tokens: Int[Array, "*B"], count: int
) -> tuple[Int[Array, "*B count"], Float[Array, "*B count"]]:
    """The tokens whose vectors are most like those of `tokens`, themselves left out.

    Args:
      embedding: `[V, F]`, a vector for each token, e.g. `params["params"]["embed"]["embedding"]` of a `GPT`.
      tokens: `[...]`, ids.
      count: how many neighbours of each.

    Returns:
      (ids `[..., count]`, cosine similarities `[..., count]`), the nearest first.

    Raises:
      ValueError: there are not so many others, or (where values are known) an id that is no token.

    >>> embedding = jnp.array([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])
    >>> nearest(embedding, jnp.array(0), count=2)[0]
    Array([1, 2], dtype=int32)
    """
    size = embedding.shape[0]
    if not 0 <= count < size:
        raise ValueError(f"count = {count}: a vocabulary of {size} tokens has 0 to {size - 1} neighbours of each")
    tokens = jnp.asarray(tokens)
    if not isinstance(tokens, jax.core.Tracer) and ((tokens < 0) | (tokens >= size)).any():
        raise ValueError(f"tokens = {tokens.tolist()}: expected ids from 0 to {size - 1}")
    similarity = cosine_similarity(embedding[tokens], embedding)
    itself = jnp.arange(size) == tokens[..., None]
    similarities, ids = jax.lax.top_k(jnp.where(itself, -jnp.inf, similarity), count)
    return ids, similarities
