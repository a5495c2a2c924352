"""Additive attention: the mechanism that attention began with."""

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Float

from attnlab.ops.attention import attention, attention_weights
from attnlab.ops.masks import Mask, join
from attnlab.types import Array, DType


class AdditiveAttention(nn.Module):
    """Additive attention (Bahdanau et al. 2015, appendix A.1.2): a small network scores every pair.

        e_ij = wᵀ tanh(W s_i + U h_j),    α_i = softmax(e_i),    c_i = Σ_j α_ij h_j

    The values are the memory itself. Every score has its own tanh, so memory and time are O(Tq·Tk·A), where those of a
    dot product are O(Tq·Tk).

    Attributes:
      features: A, width of the scoring layer; None for the width of the queries.
      use_bias: whether W adds a bias.
      mask: who may look at whom, fixed and without arrays; and-ed with the mask of the call.
      kernel_init: initialiser of `query/kernel` `[F, A]`, `key/kernel` `[Fk, A]` and `score/kernel` `[A, 1]`.
      dtype: type of the computation; the input's when None.

    Under `mutable=["intermediates"]` the weights `[B, Tq, Tk]` are sown as `attention_weights`.

    >>> module = AdditiveAttention(features=4)
    >>> queries, memory = jnp.ones((2, 3, 8)), jnp.ones((2, 5, 6))  # [batch, length, features]
    >>> params = module.init(jax.random.key(0), queries, memory)
    >>> jax.jit(module.apply)(params, queries, memory).shape
    (2, 3, 6)
    """

    features: int | None = None
    use_bias: bool = False
    mask: Mask | None = None
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
    dtype: DType | None = None

    @nn.compact
    def __call__(
        self,
        inputs_q: Float[Array, "B Tq F"],
        inputs_kv: Float[Array, "B Tk Fk"] | None = None,
        *,
        mask: Mask | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "B Tq Fk"]:
        """Attends from `inputs_q` to `inputs_kv`, or within `inputs_q` where that is None.

        Args:
          inputs_q: s, `[B, Tq, F]`.
          inputs_kv: h, `[B, Tk, Fk]`.
          mask: and-ed with the field; the place for masks that hold arrays, e.g. `masks.Padding(lengths)`.
          deterministic: nothing here drops; taken so that it stands where `MultiHeadAttention` does.

        Returns:
          c, `[B, Tq, Fk]`; 0 in rows that see nothing.

        Raises:
          ValueError: what `attnlab.attention` raises, e.g. for a mask that does not fit.
        """
        memory = inputs_q if inputs_kv is None else inputs_kv
        options = {"dtype": self.dtype, "kernel_init": self.kernel_init}
        width = self.features or inputs_q.shape[-1]
        q = nn.Dense(width, use_bias=self.use_bias, name="query", **options)(inputs_q)
        k = nn.Dense(width, use_bias=False, name="key", **options)(memory)
        hidden = jnp.tanh(q[:, :, None] + k[:, None])  # [B, Tq, Tk, A]
        scores = nn.Dense(1, use_bias=False, name="score", **options)(hidden)[..., 0]

        # Softmax and masks are the operator's: what it adds to dot products is here all there is.
        nothing_q, nothing_k = (jnp.zeros((*x.shape[:2], 1, 1), scores.dtype) for x in (inputs_q, memory))
        terms = {"bias": scores[:, None], "mask": join(self.mask, mask)}
        if self.is_mutable_collection("intermediates"):
            self.sow("intermediates", "attention_weights", attention_weights(nothing_q, nothing_k, **terms)[:, 0])
        values = memory.astype(scores.dtype)[:, :, None]
        return attention(nothing_q, nothing_k, values, impl="dense", **terms)[:, :, 0]
