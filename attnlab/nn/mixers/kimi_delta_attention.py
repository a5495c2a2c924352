"""Kimi Delta Attention."""

import jax
import jax.numpy as jnp

from attnlab.nn.layer import LayerOut
from attnlab.nn.mixers import gates
from attnlab.nn.mixers.delta_rule import DeltaRule
from attnlab.nn.mixers.interface import MixerState, RecurrentConfig


class KimiDeltaAttention(DeltaRule):
    """Kimi Delta Attention (Kimi Team 2025, arXiv 2510.26692, section 4): the delta rule with one decay per feature.

    Queries, keys and values are as in `GatedDeltaNet`. With g = −exp(A_log) · softplus(W₂ W₁ x + b) for each feature of
    the keys (one A_log per head) and β = σ(b(x)), `linear_recurrence(q, k, v, g, β)` is normalized for each head,
    multiplied by σ(U₂ U₁ x), and projected. W₁ (`decay_down`) and U₁ (`gate_down`) map x to V features.

    Its cache holds states `[B, HV, K, V]` in float32 and the last W − 1 inputs of the convolutions.

    Attributes: as in `GatedDeltaNet` without `decay`; the paper does not use `negative_eigenvalues`.

    >>> block = Block(KimiDeltaAttention(num_heads=2), Mlp())
    >>> block.init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 8)
    """

    def mix(self, x, state, context):
        q, k, v, conv = self._projected(x, state, context)
        beta = self._beta(x, self.states)
        rank = self.value_features(x.shape[-1])
        g = self._decay_by_feature(x, rank)
        z, last_state = self._recur(q, k, v, state, context, g=g, beta=beta)
        z = self._normed(z)
        if self.gate:
            z = z * jax.nn.sigmoid(self._dense("gate_up", *z.shape[-2:])(self._dense("gate_down", rank)(x)))
        return LayerOut(self._out(z, x.shape[-1]), MixerState(last_state, conv))

    def _decay_by_feature(self, x, rank):
        """g `[B, T, HV, K]`."""
        wide, size = jnp.promote_types(x.dtype, jnp.float32), (self.states, self.key_features(x.shape[-1]))
        up = self._dense("decay_up", *size, use_bias=True, bias_init=gates.dt_bias, dtype=wide)
        a_log = self.param("A_log", gates.a_log(1.0, 16.0), (self.states,)).astype(wide)
        return -jnp.exp(a_log)[:, None] * jax.nn.softplus(up(self._dense("decay_down", rank, dtype=wide)(x)))


class KimiDeltaConfig(RecurrentConfig, of=KimiDeltaAttention, kind="kda"):
    """Kimi Delta Attention."""
