"""Differential attention."""

from typing import ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp

from attnlab.nn.multihead import AttentionConfig, MultiHeadAttention, without_dropout
from attnlab.nn.norms import RMSNorm
from attnlab.ops.attention import attention, attention_weights
from attnlab.support.options import FieldError


class DifferentialAttention(MultiHeadAttention):
    """Differential attention: (softmax(q₁k₁ᵀ) − λ softmax(q₂k₂ᵀ)) v (Ye et al. 2024, arXiv 2410.05258, section 2.1).

    Two softmax maps share values of twice the width: output head h of H/2 uses the maps of query heads h and H/2 + h.
    λ = exp(λ_q1·λ_k1) − exp(λ_q2·λ_k2) + λ₀ is one number for all heads, where λ₀ = 0.8 − 0.6·exp(−0.3·l) in layer l,
    counted from 0. Each head's output is normalized and multiplied by 1 − λ₀.

    Parameters are named as in `MultiHeadAttention`, with `value/kernel` `[F, Hk/2, 2·D]` and `out/kernel`
    `[H/2, 2·D, F]`, plus `lambda_q1`, `lambda_k1`, `lambda_q2` and `lambda_k2` `[D]`, and `norm/scale` `[2·D]`. A cache
    holds keys `[B, S, Hk, D]` and values `[B, S, Hk/2, 2·D]`. Dropout is independent for each map.

    Attributes: as in `MultiHeadAttention`, but without `sinks`, `value_residual` and `output_gate`; `num_heads` and
    `kv_heads`, H and Hk, count softmax maps and must be even.
      norm_epsilon: ε of `qk_norm` and of the norm of each head's output.

    >>> block = Block(DifferentialAttention(num_heads=2, mask=Causal()), Mlp())
    >>> block.init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 8)
    """

    norm_epsilon: float = 1e-5

    takes: ClassVar[tuple[str, ...]] = (
        *("head_dim", "kv_heads", "qkv_bias", "qk_norm", "qk_norm_joint", "scale", "impl", "conv"),
    )

    def operands(self, batch, length, features):
        q, k, v = super().operands(batch, length, features)
        return q, k, jax.ShapeDtypeStruct((*v.shape[:2], 2 * v.shape[2], v.shape[3]), v.dtype)

    def _of_values(self, features):
        heads, size = self._of_keys(features)
        if heads % 2 or self.num_heads % 2:
            name, odd = ("num_heads", self.num_heads) if self.num_heads % 2 else ("kv_heads", heads)
            raise FieldError(name, odd, "expected an even number, as differential attention has two maps per head")
        return heads // 2, 2 * size

    def attend(self, q, k, v, terms, context):
        share = self._share(q.shape[-1]) + _start(context)
        terms = {**terms, "scale": self.scale}

        def difference(x, axis):
            first, second = jnp.split(x, 2, axis=axis)
            return first - share.astype(x.dtype) * second

        doubled = jnp.concatenate([v, v], axis=-2).astype(q.dtype)
        out = difference(attention(q, k.astype(q.dtype), doubled, impl=self.impl, **terms), -2)
        return out, lambda rows=None: difference(attention_weights(q, k, rows=rows, **without_dropout(terms)), -3)

    def after(self, z, v, x, context):
        z = RMSNorm(self.norm_epsilon, dtype=self.dtype, name="norm")(z)
        return z * (1 - _start(context)).astype(z.dtype)

    def _share(self, size):
        """λ − λ₀, in float32."""
        names = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
        q1, k1, q2, k2 = (self.param(name, nn.initializers.normal(0.1), (size,)) for name in names)
        return jnp.exp((q1 * k1).sum()) - jnp.exp((q2 * k2).sum())


def _start(context):
    """λ₀ of the layer."""
    return 0.8 - 0.6 * jnp.exp(-0.3 * context.layer)


class DifferentialConfig(AttentionConfig, of=DifferentialAttention, kind="differential"):
    """Differential attention."""

    def shared(self, model):
        return super().shared(model) | {"norm_epsilon": model.norm_epsilon}
