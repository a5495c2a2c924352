"""Multi-head stick-breaking attention."""

from typing import ClassVar

import jax.numpy as jnp

from attnlab.nn.multihead import AttentionConfig, MultiHeadAttention
from attnlab.ops.stick_breaking import stick_breaking_attention, stick_breaking_weights


class StickBreakingAttention(MultiHeadAttention):
    """Multi-head attention by `attnlab.stick_breaking_attention` (Tan et al. 2024, arXiv 2410.17980).

    A token attends to the tokens before it, the nearest first, and not to itself. Of the positions, it uses only the
    order of the keys. Parameters, cache and call are the same as in `MultiHeadAttention`.

    Attributes: as in `MultiHeadAttention`, without `score_mod`, `dropout_rate`, `sinks` and `forget_gate`.
      impl: "auto", "dense" or "blockwise".

    >>> block = Block(StickBreakingAttention(num_heads=2), Mlp())
    >>> block.init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 8)
    """

    operator: ClassVar[str | None] = "stick_breaking_attention"
    takes: ClassVar[tuple[str, ...]] = (
        *("head_dim", "kv_heads", "qkv_bias", "qk_norm", "qk_norm_joint", "scale", "impl"),
        *("value_residual", "output_gate", "conv"),
    )

    def project(self, x, memory, context, cache):
        unset = {"score_mod": None, "dropout_rate": 0.0, "forget_gate": False}
        for name, value in unset.items():
            if getattr(self, name) != value:
                raise ValueError(f"{name} = {getattr(self, name)!r}: stick-breaking attention has none, remove it")
        return super().project(x, memory, context, cache)

    def _check_cross(self, cache):
        raise ValueError("stick-breaking attention needs queries and keys of one sequence: remove inputs_kv")

    def attend(self, q, k, v, terms, context):
        options = {name: terms[name] for name in ("mask", "q_positions", "kv_positions")} | {"scale": self.scale}

        def weights(rows=None):
            matrix = stick_breaking_weights(q, k, **options)
            return matrix if rows is None else jnp.take(matrix, rows, axis=-2)

        out = stick_breaking_attention(q, k.astype(q.dtype), v.astype(q.dtype), impl=self.impl, **options)
        return out, weights


class StickBreakingConfig(AttentionConfig, of=StickBreakingAttention, kind="stick_breaking"):
    """Stick-breaking attention."""

    soft_cap: ClassVar[None] = None
    rotary: ClassVar[None] = None
    score_mod: ClassVar[None] = None

    def shared(self, model):
        return super().shared(model) | {"score_mod": None, "dropout_rate": 0.0}
