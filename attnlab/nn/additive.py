"""Additive attention (Bahdanau et al. 2015)."""

import functools

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Float

from attnlab.nn import checks, taps
from attnlab.ops.attention import attention, attention_weights
from attnlab.ops.masks import join
from attnlab.types import Array, DType


class AdditiveAttention(checks.MaskedModule):
    """Additive attention (Bahdanau et al. 2015, appendix A.1.2): a small network scores each query-key pair.

        e_ij = wᵀ tanh(W s_i + U h_j),    α_i = softmax(e_i),    c_i = Σ_j α_ij h_j

    The values are the h_j themselves, without a projection. Each score needs A values of tanh, so time and memory are
    O(Tq·Tk·A); dot-product scores need only O(Tq·Tk) memory.

    Attributes:
      features: A, width of the scoring layer; None for the width of the queries.
      use_bias: whether W adds a bias.
      mask: which keys each query may attend to; and-ed with the call's `mask`. A bool array counts as
        `masks.Dense`. Pass masks with traced arrays to the call.
      kernel_init: initializer of `query/kernel` `[F, A]`, `key/kernel` `[Fk, A]` and `score/kernel` `[A, 1]`.
      dtype: type of the computation; None for the input's type.

    With `mutable=["intermediates"]` the weights `[B, Tq, Tk]` are sown as `attention_weights`.

    >>> module = AdditiveAttention(features=4)
    >>> queries, memory = jnp.ones((2, 3, 8)), jnp.ones((2, 5, 6))  # [batch, length, features]
    >>> params = module.init(jax.random.key(0), queries, memory)
    >>> jax.jit(module.apply)(params, queries, memory).shape
    (2, 3, 6)
    """

    features: int | None = None
    use_bias: bool = False
    mask: checks.MaskLike | None = None
    kernel_init: nn.initializers.Initializer = nn.initializers.lecun_normal()
    dtype: DType | None = None

    @checks.compact
    def __call__(
        self,
        inputs_q: Float[Array, "B Tq F"],
        inputs_kv: Float[Array, "B Tk Fk"] | None = None,
        *,
        mask: checks.MaskLike | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "B Tq Fk"]:
        """Attend from `inputs_q` to `inputs_kv`, or within `inputs_q` when that is None.

        Args:
          inputs_q: s, `[B, Tq, F]`.
          inputs_kv: h, `[B, Tk, Fk]`.
          mask: and-ed with the field `mask`, e.g. `masks.Padding(lengths)`.
          deterministic: has no effect, as this module has no dropout; accepted for calls like `MultiHeadAttention`'s.

        Returns:
          c, `[B, Tq, Fk]`; 0 in fully masked rows.

        Raises:
          ValueError: any error of `attnlab.attention`, e.g. for a mask of another shape.
        """
        memory = inputs_q if inputs_kv is None else inputs_kv
        options = {"dtype": self.dtype, "kernel_init": self.kernel_init}
        width = self.features or inputs_q.shape[-1]
        q = nn.Dense(width, use_bias=self.use_bias, name="query", **options)(inputs_q)
        k = nn.Dense(width, use_bias=False, name="key", **options)(memory)
        hidden = jnp.tanh(q[:, :, None] + k[:, None])  # [B, Tq, Tk, A]
        scores = nn.Dense(1, use_bias=False, name="score", **options)(hidden)[..., 0]

        # The operator applies mask and softmax. Queries and keys are 0, so that its scores are this bias alone.
        zero_q, zero_k = (jnp.zeros((*x.shape[:2], 1, 1), scores.dtype) for x in (inputs_q, memory))
        terms = {"bias": scores[:, None], "mask": join(self.mask, mask)}
        weights = functools.partial(attention_weights, zero_q, zero_k, **terms)
        if self.is_mutable_collection("intermediates"):
            self.sow("intermediates", "attention_weights", weights()[:, 0])
        values = memory.astype(scores.dtype)[:, :, None]
        z = attention(zero_q, zero_k, values, impl="dense", **terms)
        return taps.tap(self, "z", taps.attended(self, z, lambda rows: weights(rows=rows), values))[:, :, 0]
