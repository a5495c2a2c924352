"""Positional encodings that are added to the embeddings: learned and sinusoidal."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float, Int

from attnlab.nn import checks
from attnlab.types import Array, DType


def sinusoidal(positions: Int[Array, "*T"], features: int) -> Float[Array, "*T features"]:
    """Sinusoidal positional encoding (Vaswani et al. 2017, section 3.5).

    PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i + 1) = cos(pos / 10000^(2i/d)). PE(pos + k) is PE(pos)
    with each pair of features rotated by an angle that does not depend on pos.

    Args:
      positions: `[...]`, positions in the sequence.
      features: d, the width; even.

    Returns:
      float32 `[..., features]`.

    Raises:
      ValueError: `features` is odd.

    >>> print(np.asarray(sinusoidal(jnp.arange(2), 4)).round(2))
    [[0.   1.   0.   1.  ]
     [0.84 0.54 0.01 1.  ]]
    """
    if features % 2:
        raise ValueError(f"sinusoidal positions rotate pairs of features, but there are {features}: use an even number")
    # In float64 on the host, because positions multiply the rounding error that a float32 power would have.
    frequencies = np.asarray(1.0 / 10_000.0 ** (np.arange(0, features, 2) / features), np.float32)
    angles = jnp.asarray(positions)[..., None].astype(jnp.float32) * frequencies
    return jnp.stack([jnp.sin(angles), jnp.cos(angles)], axis=-1).reshape(*angles.shape[:-1], features)


class LearnedPositions(nn.Module):
    """A learned vector for each of `context` positions (Vaswani et al. 2017, section 3.5; as in GPT-2).

    Attributes:
      context: number of positions.
      features: width of a vector.
      embedding_init: initializer of `embedding` `[context, features]`.
      dtype: type of the result; None for the embedding's type.

    >>> table = LearnedPositions(context=8, features=4)
    >>> table.init_with_output(jax.random.key(0), jnp.arange(3))[0].shape
    (3, 4)
    """

    context: int
    features: int
    embedding_init: nn.initializers.Initializer = nn.initializers.normal(0.02)
    dtype: DType | None = None

    @nn.compact
    def __call__(self, positions: Int[Array, "*T"]) -> Float[Array, "*T features"]:
        """Look up the vectors of `positions` `[..., T]`, each in [0, context).

        Raises:
          ValueError: T exceeds the context, or a position is out of range (checked unless traced).
        """
        if np.ndim(positions) and np.shape(positions)[-1] > self.context:
            raise ValueError(
                f"a sequence of {np.shape(positions)[-1]} tokens is longer than the {self.context} learned positions: "
                "cut it, or use rotary, alibi or sinusoidal positions"
            )
        checks.in_range("positions", positions, self.context, remedy="cut the sequence, or use a larger context")
        embedding = self.param("embedding", self.embedding_init, (self.context, self.features))
        return jnp.take(embedding, positions, axis=0).astype(self.dtype or embedding.dtype)


def within_segments(segments: Int[Array, "*B T"]) -> Int[Array, "*B T"]:
    """int32 positions that restart with each run of equal ids, that is, with each document in a sequence."""
    index = jnp.broadcast_to(jnp.arange(segments.shape[-1], dtype=jnp.int32), segments.shape)
    is_first = jnp.concatenate([jnp.ones_like(segments[..., :1], bool), segments[..., 1:] != segments[..., :-1]], -1)
    return index - lax.cummax(jnp.where(is_first, index, 0), axis=index.ndim - 1)
