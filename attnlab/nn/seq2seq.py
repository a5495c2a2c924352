"""A small encoder–decoder whose attention aligns output tokens with input tokens."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from attnlab.nn import checks, taps
from attnlab.ops.masks import Padding
from attnlab.types import Array


class Seq2Seq(nn.Module):
    """Recurrent encoder and decoder with attention between them (Bahdanau et al. 2015, section 3).

    A bidirectional GRU encodes the source. At step i the decoder's state s_{i−1} attends to the encoder's states, which
    gives a context c_i. Then s_i = GRU([y_{i−1}; c_i], s_{i−1}), and the next token is predicted from [s_i; c_i].

    Attributes:
      vocab_size: V; token 0 starts and ends an output, and pads sources.
      width: F, the width of embeddings and states.
      attention: the attention layer, any module that is called as `(queries [B, 1, F], memory [B, S, 2F], mask=…)`,
        e.g. `AdditiveAttention()` or `MultiHeadAttention(num_heads=1)`.

    >>> from attnlab.nn import AdditiveAttention
    >>> model = Seq2Seq(vocab_size=10, width=8, attention=AdditiveAttention())
    >>> source, lengths = jnp.array([[1, 2, 3], [4, 5, 0]]), jnp.array([3, 2])
    >>> inputs = jnp.array([[0, 3, 2, 1], [0, 5, 4, 0]])  # the previous token at each step
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
          source: `[B, S]`; tokens beyond a source's length are ignored.
          lengths: `[B]`, number of tokens in each source.
          inputs: `[B, T]`, the token before each output; after the first, −1 stands for the model's own prediction.

        Returns:
          float32 `[B, T, V]`.

        Raises:
          ValueError: the three batch sizes differ, or a token is out of range (checked unless traced).
        """
        if np.shape(lengths) != source.shape[:1] or inputs.shape[:1] != source.shape[:1]:
            raise ValueError(
                f"source has shape {source.shape}, lengths {np.shape(lengths)} and inputs {inputs.shape}: expected "
                "[B, S], [B] and [B, T], with the same batch size B"
            )
        checks.check_lengths(lengths, source)
        if not any(isinstance(x, jax.core.Tracer) for x in (source, lengths)):
            padding = np.arange(source.shape[1]) >= np.asarray(lengths)[:, None]
            checks.in_range("source", np.where(padding, 0, source), self.vocab_size)
        checks.in_range("inputs", inputs, self.vocab_size, low=-1)
        checks.in_range("inputs[:, 0]", inputs[:, 0], self.vocab_size)  # nothing is predicted before the first step
        embed = nn.Embed(self.vocab_size, self.width, name="embed")
        encode = nn.Bidirectional(
            nn.RNN(nn.GRUCell(self.width), name="forward"), nn.RNN(nn.GRUCell(self.width), name="backward")
        )
        memory = encode(embed(source), seq_lengths=lengths)  # [B, S, 2 · width]
        state = nn.tanh(nn.Dense(self.width, name="start")(memory[:, 0, self.width :]))

        decoder = nn.scan(
            _DecoderStep,
            variable_broadcast="params",
            variable_axes={"intermediates": 0, **dict.fromkeys(taps.COLLECTIONS, 0)},
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
        state, predicted = carry
        previous = self.embed(jnp.where(token < 0, predicted, token))
        context = self.attention(state[:, None], memory, mask=Padding(lengths))[:, 0]
        state, _ = nn.GRUCell(self.width, name="cell")(state, jnp.concatenate([previous, context], axis=-1))
        logits = nn.Dense(self.vocab_size, name="out")(jnp.concatenate([state, context], axis=-1))
        return (state, logits.argmax(axis=-1).astype(token.dtype)), logits


def alignment(
    model: Seq2Seq, params, source: Int[Array, "B S"], lengths: Int[Array, " B"], inputs: Int[Array, "B T"]
) -> Float[Array, "B T S"]:
    """The attention weights of output tokens on source tokens (Bahdanau et al. 2015, figure 3).

    Arguments and errors are the same as in a call of the model.

    Returns:
      `[B, T, S]`, averaged over heads; each row sums to 1.

    >>> from attnlab.nn import AdditiveAttention
    >>> model = Seq2Seq(vocab_size=10, width=8, attention=AdditiveAttention())
    >>> source, lengths, inputs = jnp.ones((2, 5), int), jnp.array([5, 2]), jnp.zeros((2, 3), int)
    >>> params = model.init(jax.random.key(0), source, lengths, inputs)
    >>> alignment(model, params, source, lengths, inputs)[1].sum(axis=0)[2:]  # no weight on padding
    Array([0., 0., 0.], dtype=float32)
    """
    _, sown = model.apply(params, source, lengths, inputs, mutable=["intermediates"])
    (weights,) = jax.tree.leaves(sown["intermediates"])  # [T, B, 1, S], or with heads [T, B, H, 1, S]
    weights = weights.reshape(*weights.shape[:2], -1, source.shape[1])
    return jnp.swapaxes(weights.mean(axis=2), 0, 1)
