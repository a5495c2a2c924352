"""A small encoder–decoder: attention as alignment between the words of an output and those of an input."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from attnlab.ops.masks import Padding
from attnlab.types import Array


class Seq2Seq(nn.Module):
    """Recurrent encoder and decoder with attention between them (Bahdanau et al. 2015, section 3).

    A bidirectional GRU reads the source. At step i the decoder's state s_{i−1} asks the source's states for a context
    c_i; then s_i = GRU([y_{i−1}; c_i], s_{i−1}), and the next token is read from [s_i; c_i].

    Attributes:
      vocab_size: V; token 0 starts an output, ends it, and fills up sources.
      width: of embeddings and of every state.
      attention: the layer that aligns, any module called `(queries [B, 1, F], memory [B, S, 2F], mask=…)`:
        `AdditiveAttention()`, `MultiHeadAttention(num_heads=1)`.

    >>> from attnlab.nn import AdditiveAttention
    >>> model = Seq2Seq(vocab_size=10, width=8, attention=AdditiveAttention())
    >>> source, lengths = jnp.array([[1, 2, 3], [4, 5, 0]]), jnp.array([3, 2])
    >>> inputs = jnp.array([[0, 3, 2, 1], [0, 5, 4, 0]])  # what was written before each step
    >>> params = model.init(jax.random.key(0), source, lengths, inputs)
    >>> model.apply(params, source, lengths, inputs).shape
    (2, 4, 10)
    """

    vocab_size: int
    width: int
    attention: nn.Module

    @nn.compact
    def __call__(
        self, source: Int[Array, "B S"], lengths: Int[Array, " B"], inputs: Int[Array, "B T"]
    ) -> Float[Array, "B T V"]:
        """Logits of each output token.

        Args:
          source: `[B, S]`, anything from each row's length on.
          lengths: `[B]`, tokens of each source.
          inputs: `[B, T]`, the token before each output; where it is −1, the model's own choice of the step before.

        Returns:
          float32 `[B, T, V]`.

        Raises:
          ValueError: the rows of the three differ in number.
        """
        if np.shape(lengths) != source.shape[:1] or inputs.shape[:1] != source.shape[:1]:
            raise ValueError(
                f"source has shape {source.shape}, lengths {np.shape(lengths)} and inputs {inputs.shape}: expected "
                "[B, S], [B] and [B, T], a row for each example"
            )
        embed = nn.Embed(self.vocab_size, self.width, name="embed")
        read = nn.Bidirectional(
            nn.RNN(nn.GRUCell(self.width), name="forward"), nn.RNN(nn.GRUCell(self.width), name="backward")
        )
        memory = read(embed(source), seq_lengths=lengths)  # [B, S, 2 · width]
        state = nn.tanh(nn.Dense(self.width, name="start")(memory[:, 0, self.width :]))

        decoder = nn.scan(
            _DecoderStep,
            variable_broadcast="params",
            variable_axes={"intermediates": 0},
            split_rngs={"params": False},
            in_axes=(nn.broadcast, nn.broadcast, 1),
            out_axes=1,
        )(self.vocab_size, self.width, self.attention, embed, name="decoder")
        _, logits = decoder((state, inputs[:, 0]), memory, lengths, inputs)
        return logits


class _DecoderStep(nn.Module):
    vocab_size: int
    width: int
    attention: nn.Module
    embed: nn.Module

    @nn.compact
    def __call__(self, carry, memory, lengths, token):
        state, chosen = carry
        previous = self.embed(jnp.where(token < 0, chosen, token))
        context = self.attention(state[:, None], memory, mask=Padding(lengths))[:, 0]
        state, _ = nn.GRUCell(self.width, name="cell")(state, jnp.concatenate([previous, context], axis=-1))
        logits = nn.Dense(self.vocab_size, name="out")(jnp.concatenate([state, context], axis=-1))
        return (state, logits.argmax(axis=-1).astype(token.dtype)), logits


def alignment(
    model: Seq2Seq, params, source: Int[Array, "B S"], lengths: Int[Array, " B"], inputs: Int[Array, "B T"]
) -> Float[Array, "B T S"]:
    """The weight with which each output looks at each source token (Bahdanau et al. 2015, figure 3).

    Arguments and errors are those of the model.

    Returns:
      `[B, T, S]`, the mean over heads; a row sums to 1.

    >>> from attnlab.nn import AdditiveAttention
    >>> model = Seq2Seq(vocab_size=10, width=8, attention=AdditiveAttention())
    >>> source, lengths, inputs = jnp.ones((2, 5), int), jnp.array([5, 2]), jnp.zeros((2, 3), int)
    >>> params = model.init(jax.random.key(0), source, lengths, inputs)
    >>> alignment(model, params, source, lengths, inputs)[1].sum(axis=0)[2:]  # nobody looks at padding
    Array([0., 0., 0.], dtype=float32)
    """
    _, sown = model.apply(params, source, lengths, inputs, mutable=["intermediates"])
    (weights,) = jax.tree.leaves(sown["intermediates"])  # [T, B, S], or [T, B, H, 1, S]
    weights = weights.reshape(*weights.shape[:2], -1, source.shape[1])
    return jnp.swapaxes(weights.mean(axis=2), 0, 1)
