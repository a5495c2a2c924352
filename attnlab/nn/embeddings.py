"""Similarity of token embeddings: cosine similarity and nearest neighbors."""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from attnlab.nn import checks
from attnlab.types import Array


def cosine_similarity(u: Float[Array, "*M F"], v: Float[Array, "*N F"]) -> Float[Array, "..."]:
    """u·v / (‖u‖ ‖v‖) for every pair of vectors from `u` and `v`; 0 where either vector is 0.

    Args:
      u: `[..., F]`.
      v: `[..., F]`; its leading axes may differ from u's.

    Returns:
      `[*axes of u, *axes of v]`, in [−1, 1] up to rounding.

    Raises:
      ValueError: the widths F differ.

    >>> cosine_similarity(jnp.array([[3.0, 0.0], [1.0, 1.0]]), jnp.array([2.0, 0.0]))
    Array([1.        , 0.70710677], dtype=float32)
    """

    def unit(x):
        x = jnp.asarray(x)
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        squares = (x**2).sum(axis=-1, keepdims=True)
        return x * jnp.where(squares == 0, 0, jax.lax.rsqrt(jnp.where(squares == 0, 1, squares)))

    if jnp.shape(u)[-1:] != jnp.shape(v)[-1:]:
        raise ValueError(f"u has shape {jnp.shape(u)} and v {jnp.shape(v)}: give both the same width (last axis)")
    return jnp.tensordot(unit(u), unit(v), axes=(-1, -1))


def nearest(
    embedding: Float[Array, "V F"], tokens: Int[Array, "*B"], count: int
) -> tuple[Int[Array, "*B count"], Float[Array, "*B count"]]:
    """The tokens whose embeddings are most similar to the embedding of each of `tokens`, which is itself excluded.

    Args:
      embedding: `[V, F]`, one vector per token, e.g. `params["params"]["embed"]["embedding"]` of a `GPT`.
      tokens: `[...]`, token ids.
      count: number of neighbors per token.

    Returns:
      (ids `[..., count]`, cosine similarities `[..., count]`), the most similar first.

    Raises:
      ValueError: `count` exceeds the number of other tokens, or a token id is out of range (checked unless traced).

    >>> embedding = jnp.array([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])
    >>> nearest(embedding, jnp.array(0), count=2)[0]
    Array([1, 2], dtype=int32)
    """
    size = embedding.shape[0]
    if not 0 <= count < size:
        raise ValueError(
            f"count = {count}: expected 0 to {size - 1}, as each of {size} tokens has {size - 1} neighbors"
        )
    checks.in_range("tokens", tokens, size)
    tokens = jnp.asarray(tokens)
    similarity = cosine_similarity(embedding[tokens], embedding)
    itself = jnp.arange(size) == tokens[..., None]
    similarities, ids = jax.lax.top_k(jnp.where(itself, -jnp.inf, similarity), count)
    return ids, similarities
