"""Retention."""

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.nn.layer import LayerOut
from attnlab.nn.mixers.interface import MixerState, RecurrentConfig, RecurrentMixer
from attnlab.nn.positions import within_segments
from attnlab.nn.rotations import rotary
from attnlab.ops.cpu import pointwise
from attnlab.support.options import FieldError, option


class Retention(RecurrentMixer):
    """Multi-scale retention (Sun et al. 2023, arXiv 2307.08621, section 2): a fixed decay for each head.

    Queries and keys are rotated by their positions. Head h decays by γ = 1 − 2^(−5−h) per token.
    `linear_recurrence(q, k, v, log γ)` is normalized for each head, without parameters, multiplied by silu of a gate,
    and projected.

    Its cache holds states `[B, H, K, V]` in float32.

    Attributes: as in `RecurrentMixer`, plus
      key_dim: K, even; None for input width / H.
      value_dim: V; None for twice the input width / H.
      base: base of the rotary positions.

    >>> block = Block(Retention(num_heads=2), Mlp())
    >>> block.init_with_output(jax.random.key(0), jnp.ones((2, 5, 8)))[0].shape
    (2, 5, 8)
    """

    gate: bool = option("multiply outputs by a gate", True)
    base: float = 10_000.0
    norm_epsilon: float = option("ε of the output norm", 1e-5, low=1e-30, high=1)

    def value_features(self, features):
        return self.value_dim or 2 * super().value_features(features)

    def init_state(self, batch, features):
        if (keys := self.key_features(features)) % 2:
            raise FieldError("key_dim", keys, "expected an even number, as retention rotates pairs of features")
        return super().init_state(batch, features)

    def mix(self, x, state, context):
        keys, values = self.key_features(x.shape[-1]), self.value_features(x.shape[-1])
        q, k = (self._dense(name, self.num_heads, keys)(x) for name in ("query", "key"))
        v = self._dense("value", self.num_heads, values)(x)
        if context.segments is None:
            positions = state.length[:, None] + jnp.arange(x.shape[1])
        else:
            positions = within_segments(context.segments)
        q, k = (rotary(y, positions, self.base) for y in (q, k))
        decay = np.log1p(-(2.0 ** (-5 - np.arange(self.num_heads))))
        g = jnp.broadcast_to(jnp.asarray(decay), (*x.shape[:2], self.num_heads))
        z, last_state = self._recur(q, k, v, state, context, g=g)
        z = pointwise.rms_normalize(z, self.norm_epsilon).astype(z.dtype)
        z = z * jax.nn.silu(self._dense("gate", *z.shape[-2:])(x)) if self.gate else z
        return LayerOut(self._out(z, x.shape[-1]), MixerState(last_state))


class RetentionConfig(RecurrentConfig, of=Retention, kind="retention"):
    """Retention."""
