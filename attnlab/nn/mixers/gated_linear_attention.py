"""Gated linear attention."""

import jax
import jax.numpy as jnp

from attnlab.nn.layer import LayerOut
from attnlab.nn.mixers.interface import MixerState, RecurrentConfig, RecurrentMixer
from attnlab.nn.norms import RMSNorm
from attnlab.support.options import option


class GatedLinearAttention(RecurrentMixer):
    """Gated linear attention (Yang et al. 2024, arXiv 2312.06635, section 4): one decay per feature of the keys.

    The log of the decay is g = log σ(W₂ W₁ x + b) / 16, where W₁ maps x to `rank` features. The output of
    `linear_recurrence(q, k, v, g)` is normalized for each head, multiplied by silu of a gate, and projected.

    Its cache holds states `[B, H, K, V]` in float32.

    Attributes: as in `RecurrentMixer`, plus
      key_dim: K; None for half the input width / H.
      rank: rank of the projection to decays.

    >>> block = Block(GatedLinearAttention(num_heads=2), Mlp())
    >>> block.init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 8)
    """

    gate: bool = option("multiply outputs by a gate", True)
    rank: int = 16
    norm_epsilon: float = option("ε of the output norm", 1e-5, low=1e-30, high=1)

    def key_features(self, features):
        return self.key_dim or max(1, super().key_features(features) // 2)

    def mix(self, x, state, context):
        keys, values = self.key_features(x.shape[-1]), self.value_features(x.shape[-1])
        q, k = (self._dense(name, self.num_heads, keys)(x) for name in ("query", "key"))
        v = self._dense("value", self.num_heads, values)(x)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        low = self._dense("decay_down", self.rank, dtype=wide)(x)
        g = jax.nn.log_sigmoid(self._dense("decay_up", self.num_heads, keys, use_bias=True, dtype=wide)(low)) / 16
        z, last_state = self._recur(q, k, v, state, context, g=g)
        z = RMSNorm(self.norm_epsilon, dtype=self.dtype, name="norm")(z)
        z = z * jax.nn.silu(self._dense("gate", *z.shape[-2:], use_bias=True)(x)) if self.gate else z
        return LayerOut(self._out(z, x.shape[-1]), MixerState(last_state))


class GatedLinearConfig(RecurrentConfig, of=GatedLinearAttention, kind="gla"):
    """Gated linear attention."""
