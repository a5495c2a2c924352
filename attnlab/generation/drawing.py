"""Draw the next token from its logits."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from attnlab.types import Array


class Draw(NamedTuple):
    """Sampling of the next token from its logits.

    Tokens beyond `vocab_size` are dropped; then come the repetition penalty, temperature, top_k, top_p and min_p, in
    the order of `transformers`.

    Attributes:
      temperature: divides the logits; 0 takes the most likely token.
      top_k: keep the k most likely tokens; 0 for all.
      top_p: keep the fewest tokens whose probabilities sum to this or more (Holtzman et al. 2020); 1 for all.
      vocab_size: keep only the first `vocab_size` tokens, if a model has more than its tokenizer; None for all.
      min_p: keep the tokens with p ≥ min_p · max p (Nguyen et al. 2024, section 3); 0 for all.
      repetition_penalty: divides positive and multiplies negative logits of the tokens in the text so far, its prompt
        included (Keskar et al. 2019, section 4.1); 1 for no penalty.

    >>> Draw(temperature=0.0)(jnp.array([[0.0, 2.0, 1.0]]), jnp.array([0.5]))
    Array([1], dtype=int32)
    >>> seen = jnp.array([[False, True, False]])
    >>> Draw(temperature=0.0, repetition_penalty=4.0)(jnp.array([[0.0, 2.0, 1.0]]), jnp.array([0.5]), seen)
    Array([2], dtype=int32)
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    vocab_size: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __call__(
        self, logits: Float[Array, "N V"], uniform: Float[Array, " N"], seen: Bool[Array, "N V"] | None = None
    ) -> Int[Array, " N"]:
        """Draw a token for each row of logits: the first at which the cumulative probability exceeds `uniform`.

        Args:
          logits: `[N, V]`.
          uniform: `[N]`, random numbers in [0, 1).
          seen: bool `[N, V]`, the tokens of the text so far, for the repetition penalty.
        """
        logits = logits[:, : self.vocab_size]
        if seen is not None and self.repetition_penalty != 1:
            penalty = self.repetition_penalty
            penalized = jnp.where(logits > 0, logits / penalty, logits * penalty)
            logits = jnp.where(seen[:, : self.vocab_size], penalized, logits)
        if self.temperature < 1e-6:  # 0, or so near 0 that only the most likely token has weight
            return logits.argmax(axis=-1).astype(jnp.int32)
        logits = (logits - logits.max(axis=-1, keepdims=True)) / self.temperature
        if 0 < self.top_k < logits.shape[-1]:
            logits = jnp.where(logits < jax.lax.top_k(logits, self.top_k)[0][:, -1:], -jnp.inf, logits)
        if self.top_p < 1:
            logits = jnp.where(self._nucleus(logits), logits, -jnp.inf)
        if self.min_p > 0:  # the largest logit is 0
            logits = jnp.where(logits < jnp.log(self.min_p), -jnp.inf, logits)
        p = jnp.exp(logits - logits.max(axis=-1, keepdims=True))
        # Rounding may make the sum grow at a token of probability 0, which must not be drawn.
        sums = jnp.where(p > 0, jnp.cumsum(p, axis=-1), 0)
        return (sums > uniform[:, None] * sums.max(axis=-1, keepdims=True)).argmax(axis=-1).astype(jnp.int32)

    def _nucleus(self, logits):
        """Whether each token is among the most likely tokens whose probabilities sum to `top_p`."""
        order = jnp.flip(jnp.argsort(logits, axis=-1), axis=-1)
        p = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1))
        # Keep a token if the tokens before it sum to less than top_p; always keep the first, even if its p rounds to 1.
        kept = (jnp.cumsum(p, axis=-1) - p < self.top_p).at[:, 0].set(True)
        return jnp.zeros_like(kept).at[jnp.arange(len(logits))[:, None], order].set(kept)


def keys(seed: int, num_samples: int) -> Array:
    """The key of each sample's random numbers, `[num_samples]`."""
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(num_samples, dtype=jnp.int32))


def uniform(keys: Array, places: Int[Array, "N P"]) -> Float[Array, "N P"]:
    """Random numbers in [0, 1), each determined by its row's key and its place in the text."""
    draw = functools.partial(jax.random.uniform, dtype=jnp.float32)
    number = jax.vmap(lambda key, place: draw(jax.random.fold_in(key, place)), (None, 0))
    return jax.vmap(number)(keys, places)
