"""Mamba-2."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from attnlab.nn.layer import LayerOut
from attnlab.nn.matrices import Matrix
from attnlab.nn.mixers import gates
from attnlab.nn.mixers.interface import MixerState, RecurrentConfig, RecurrentMixer
from attnlab.nn.mixers.short_conv import ShortConv
from attnlab.nn.norms import RMSNorm
from attnlab.support.options import FieldError, option


class Mamba2(RecurrentMixer):
    """Mamba-2 (Dao and Gu 2024, arXiv 2405.21060, section 7): a selective state space model with one decay per head.

    One projection gives the gate z, values x, keys B, queries C and steps dt; x, B and C pass through a short
    convolution and silu. With dt ← softplus(dt + dt_bias) and A = −exp(A_log),
    `linear_recurrence(C, B, dt · x, dt · A, scale=1)` plus D · x is multiplied by silu(z), normalized over the features
    of each group, and projected.

    Its cache holds states `[B, HV, K, V]` in float32 and the last W − 1 inputs of the convolution.

    Attributes: as in `RecurrentMixer`, plus
      num_heads: number of groups of heads that share B and C.
      key_dim: K, the size of each value feature's state; None for 128, or half the input width if that is less.
      value_dim: V; None for twice the input width / HV.

    >>> block = Block(Mamba2(value_heads=2), Mlp())
    >>> block.init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 8)
    """

    value_heads: int | None = option("value heads, HV, a multiple of heads; None for heads", None, low=1)
    conv: int = option("kernel size of the short convolution in tokens, W; 0 for none", 4, low=0)
    norm_epsilon: float = option("ε of the output norm", 1e-5, low=1e-30, high=1)

    @property
    def states(self):
        return self.value_heads or self.num_heads

    def key_features(self, features):
        return self.key_dim or min(128, max(1, features // 2))

    def value_features(self, features):
        if self.value_dim is None and 2 * features % self.states:
            raise FieldError("value_heads", self.states, f"expected a divisor of {2 * features}; or set value_dim")
        return self.value_dim or 2 * features // self.states

    def fused(self, features):
        """Sizes of z, x, B, C and dt, which one kernel projects."""
        inner, shared = self.states * self.value_features(features), self.num_heads * self.key_features(features)
        return inner, inner, shared, shared, self.states

    def matrices(self, features):
        """See `attnlab.nn.matrices`."""
        return {"in/kernel": Matrix(fused=self.fused(features))}

    def mix(self, x, state, context):
        sizes = inner, _, shared, _, _ = self.fused(x.shape[-1])
        projected = self._dense("in", sum(sizes))(x)
        gate, xbc, dt = jnp.split(projected, (inner, sum(sizes[:-1])), axis=-1)
        last = None
        if self.conv:
            conv = ShortConv(self.conv, use_bias=True, dtype=self.dtype, name="conv")
            xbc, last = conv(xbc, state.conv, context.segments, context.lengths)
        v, k, q = jnp.split(jax.nn.silu(xbc), (inner, inner + shared), axis=-1)
        v = v.reshape(*v.shape[:2], self.states, self.value_features(x.shape[-1]))
        q, k = (y.reshape(*y.shape[:2], self.num_heads, self.key_features(x.shape[-1])) for y in (q, k))
        wide = jnp.promote_types(x.dtype, jnp.float32)
        dt = jax.nn.softplus(dt.astype(wide) + self.param("dt_bias", gates.dt_bias, (self.states,)))
        g = -jnp.exp(self.param("A_log", gates.a_log(1.0, 16.0), (self.states,)).astype(wide)) * dt
        skip = self.param("D", nn.initializers.ones, (self.states,))
        written = (v * dt[..., None]).astype(v.dtype)
        z, last_state = self._recur(q, k, written, state, context, g=g, scale=1.0)
        z = z + v * skip[:, None].astype(v.dtype)
        gated = z.reshape(gate.shape) * jax.nn.silu(gate)
        norm = RMSNorm(self.norm_epsilon, groups=self.num_heads, dtype=self.dtype, name="norm")
        return LayerOut(self._out(norm(gated).reshape(z.shape), x.shape[-1]), MixerState(last_state, last))

    def init_state(self, batch, features):
        state = super().init_state(batch, features)
        if not self.conv:
            return state
        channels = self.states * self.value_features(features) + 2 * self.num_heads * self.key_features(features)
        conv = jnp.zeros((batch, self.conv - 1, channels), self.dtype or jnp.float32)
        return state._replace(conv=conv)


class Mamba2Config(RecurrentConfig, of=Mamba2, kind="mamba2"):
    """Mamba-2."""

    heads: int = option("groups of heads that share keys and queries", 1, low=1)
    value_heads: int | None = option("value heads, a multiple of heads; None for num_heads", None, low=1)

    def shared(self, model):
        return super().shared(model) | {"value_heads": self.value_heads or model.num_heads}
